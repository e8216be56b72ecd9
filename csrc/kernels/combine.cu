// combine: each token's rows added in FP32, in the order of its choices, rounded to BF16 once. No atomics: equal inputs
// give equal bits. A choice that is routed nowhere adds nothing, and its row, which may hold anything, is not read.
//
// A thread adds 8 columns; rows are read kBatch at a time, so that many loads are in flight.
#include "chord/base.cuh"

using namespace chord;

constexpr int kThreads = 128;
constexpr int kColumns = 8;  // 16 bytes
constexpr int kBatch = 8;

extern "C" __constant__ unsigned chord_combine_threads = kThreads;
extern "C" __constant__ unsigned chord_combine_columns = kThreads * kColumns;  // of a block

static CHORD_DEVICE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
static CHORD_DEVICE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
static CHORD_DEVICE u32 round_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// results [rows, columns], rows [tokens, top_k] (-1: nowhere), out [tokens, columns]; a block is a token's columns.
// `overlap`: rows are older than the kernel before, and are read while that ends.
extern "C" __global__ void __launch_bounds__(kThreads)
    chord_combine(const u16* __restrict__ results, const int* __restrict__ rows, u16* __restrict__ out, int top_k,
                  int columns, int overlap) {
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns;
  if (!overlap) wait_for_previous_kernel();
  const int* const my_rows = rows + i64(blockIdx.x) * top_k;
  int row[kBatch];
  auto find = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; i++) row[i] = first + i < top_k ? my_rows[first + i] : -1;
  };
  find(0);
  if (overlap) wait_for_previous_kernel();
  allow_next_kernel();
  if (column >= columns) return;
  float sum[kColumns] = {};
  for (int first = 0; first < top_k; first += kBatch) {
    if (first) find(first);
    uint4 batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      batch[i] = make_uint4(0, 0, 0, 0);  // adding +0 changes no sum: one that starts at +0 is never -0
      if (row[i] >= 0) batch[i] = *reinterpret_cast<const uint4*>(results + i64(row[i]) * columns + column);
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const u32 pairs[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
#pragma unroll
      for (int p = 0; p < 4; p++) {
        sum[2 * p] += low_bf16(pairs[p]);
        sum[2 * p + 1] += high_bf16(pairs[p]);
      }
    }
  }
  *reinterpret_cast<uint4*>(out + i64(blockIdx.x) * columns + column) =
      make_uint4(round_bf16(sum[0], sum[1]), round_bf16(sum[2], sum[3]), round_bf16(sum[4], sum[5]),
                 round_bf16(sum[6], sum[7]));
}
