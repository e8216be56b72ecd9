// align: a router's choices -> rows sorted by expert, for the three layouts. Rows of one expert keep the order of their
// routed indices (token * top_k + choice), so results do not depend on scheduling. One launch, no workspace.
//
// A thread block places kChunk choices. It counts all choices itself, those before its chunk apart, rather than wait for
// the other blocks: at decode there is one block, at prefill the ids are read from L2 by every block.
//
//   count all choices -> scan over experts: where each one's rows start -> place own chunk -> pad a share of the experts
//
//   CHORD_LAYOUT 0 indexed    an expert's rows are padded to `align`; owner[slot / align] = expert of the block, -1 unused;
//                             row_of_choice = the routed index itself, which is the row that the kernels write
//                1 contiguous the same with owner[slot] = expert, -1 in padding; row_of_choice = slot
//                2 masked     expert e's rows start at e * align; owner[e] = its rows; what does not fit is routed nowhere
#include "chord/base.cuh"

using namespace chord;

enum Layout { kIndexed, kContiguous, kMasked };
constexpr int kLayout = CHORD_LAYOUT;
constexpr int kChunk = 1024;  // threads of a block too
constexpr int kWarps = kChunk / kWarp;
constexpr int kMaxExperts = 512;  // of this rank, and of all ranks
constexpr int kBatch = 8;         // ids that a thread has in flight while it counts
#if CHORD_IDS_64
typedef i64 Id;
#else
typedef int Id;
#endif

extern "C" __constant__ unsigned chord_align_threads = kChunk;
extern "C" __constant__ unsigned chord_align_max_experts = kMaxExperts;

struct Counts {
  int before[kMaxExperts], all[kMaxExperts];  // choices of each expert: in earlier chunks, in all
  int start[kMaxExperts], end[kMaxExperts];   // its rows, padding included
  int warp_sum[kWarps];
  short local[kMaxExperts];           // global -> local expert
  u16 in_warp[kWarps][kMaxExperts];  // choices of an expert in each warp of this chunk; then in the warps before it
};

// Local expert of a choice, -1 for none.
static CHORD_DEVICE int local_expert(const Counts& counts, Id id, bool mapped, int ids) {
  if (id < 0 || id >= ids) return -1;
  return mapped ? counts.local[id] : static_cast<int>(id);
}

// Inclusive sum over the block's threads.
static CHORD_DEVICE int block_sum(Counts& counts, int value) {
  const int warp = threadIdx.x / kWarp;
  for (int d = 1; d < kWarp; d *= 2) {
    const int lower = __shfl_up_sync(kFullMask, value, d);
    if (lane_id() >= d) value += lower;
  }
  if (lane_id() == kWarp - 1) counts.warp_sum[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; w++) value += counts.warp_sum[w];
  return value;
}

static CHORD_DEVICE void count(Counts& counts, int* into, const Id* topk_ids, int from, int to, bool mapped, int ids) {
  for (int first = from + threadIdx.x; first < to; first += kChunk * kBatch) {
    Id batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) batch[i] = first + i * kChunk < to ? topk_ids[first + i * kChunk] : -1;
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int expert = local_expert(counts, batch[i], mapped, ids);
      if (expert >= 0) atomicAdd(&into[expert], 1);
    }
  }
}

// topk_ids [choices]; expert_map [ids] or null; topk_weights [choices]. Writes routed [capacity] (routed index of
// each row, `padding` in padding), owner, used [1] (rows, padding included; not if masked), row_of_choice [choices]
// (-1: routed nowhere) and, unless it is null, row_weight [capacity].
extern "C" __global__ void __launch_bounds__(kChunk)
    chord_align(const Id* __restrict__ topk_ids, const int* __restrict__ expert_map, const float* __restrict__ topk_weights,
                int* __restrict__ routed, int* __restrict__ owner, int* __restrict__ used, int* __restrict__ row_of_choice,
                float* __restrict__ row_weight, int choices, int ids, int experts, int align, int capacity, int padding) {
  __shared__ Counts counts;
  const int thread = threadIdx.x, warp = thread / kWarp;
  const int chunk = blockIdx.x * kChunk, mine = chunk + thread;
  const bool mapped = expert_map != nullptr;
  wait_for_previous_kernel();
  allow_next_kernel();

  if (thread < kMaxExperts) counts.before[thread] = counts.all[thread] = 0;
  if (mapped && thread < ids) {
    const int local = expert_map[thread];
    counts.local[thread] = local < experts ? local : -1;
  }
  const int busy_warps = smaller(kWarps, ceil_div(choices - chunk, kWarp));  // those that have choices
  if (warp < busy_warps)
    for (int e = lane_id(); e < experts; e += kWarp) counts.in_warp[warp][e] = 0;
  __syncthreads();

  count(counts, counts.before, topk_ids, 0, chunk, mapped, ids);
  count(counts, counts.all, topk_ids, chunk, choices, mapped, ids);
  const int expert = mine < choices ? local_expert(counts, topk_ids[mine], mapped, ids) : -1;
  const u32 same = __match_any_sync(kFullMask, expert);
  const int rank = __popc(same & ((1u << lane_id()) - 1));
  if (expert >= 0 && rank == 0) counts.in_warp[warp][expert] = __popc(same);
  __syncthreads();

  int rows = 0;
  if (thread < experts) {
    rows = counts.all[thread] += counts.before[thread];
    int total = 0;
    for (int first = 0; first < busy_warps; first += kBatch) {
      int here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) here[i] = counts.in_warp[first + i][thread];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        counts.in_warp[first + i][thread] = total;
        total += here[i];
      }
    }
  }
  const int room = kLayout == kMasked ? (thread < experts ? align : 0) : round_up(rows, align);
  const int end = block_sum(counts, room);
  if (thread < experts) {
    counts.start[thread] = end - room;
    counts.end[thread] = end;
  }
  __syncthreads();

  if (mine < choices) {
    int row = -1;
    if (expert >= 0) {
      const int place = counts.before[expert] + counts.in_warp[warp][expert] + rank;
      if (kLayout != kMasked || place < align) {
        row = counts.start[expert] + place;
        routed[row] = mine;
        if (row_weight) row_weight[row] = topk_weights[mine];
        if (kLayout == kContiguous) owner[row] = expert;
        if (kLayout == kIndexed && place % align == 0) owner[row / align] = expert;
      }
    }
    row_of_choice[mine] = kLayout == kIndexed && row >= 0 ? mine : row;
  }
  auto pad = [&](int slot) {
    routed[slot] = padding;
    if (row_weight) row_weight[slot] = 0;
    if (kLayout == kContiguous) owner[slot] = -1;
    if (kLayout == kIndexed && slot % align == 0) owner[slot / align] = -1;
  };
  for (int e = mine / kWarp; e < experts; e += gridDim.x * kWarps)  // a warp pads an expert's rows
    for (int slot = counts.start[e] + counts.all[e] + lane_id(); slot < counts.end[e]; slot += kWarp) pad(slot);
  for (int slot = counts.end[experts - 1] + mine; slot < capacity; slot += gridDim.x * kChunk) pad(slot);
  if (mine < experts && kLayout == kMasked) owner[mine] = smaller(counts.all[mine], align);
  if (mine == 0 && kLayout != kMasked) *used = counts.end[experts - 1];
}
