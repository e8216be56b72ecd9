// All three modes by mma.sync, from the same packed bytes, for devices without wgmma (Blackwell; it compiles from sm_80 up).
//
// The A fragment of m16n8k16 is that of wgmma's m64nNk16, so a warp reads the packed block as it is: 16 B of codes and
// 8 B of scales a lane for 16 rows and 64 k, straight from global memory; so are the activations. Sums, SwiGLU and order of
// k are those of the Hopper kernels. Meant for decode: weights are read once for every kTokens rows of an expert.
//
//   a thread block: 4 warps, 128 rows of the weight; warp w holds rows 16w.. of both 64-row blocks, for kTokens tokens
#include "chord/dequant.cuh"
#include "chord/epilogue.cuh"
#include "chord/rows.cuh"
#include "chord/scheduler.cuh"

using namespace chord;

constexpr int kGroups = kTokens / 8;
static_assert(kRows == kStripRows && kWarpgroups == 1 && kBlocks == 2, "a warp holds 16 rows of each block of a strip");

CHORD_DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One token's two channels of this thread: weight rows `row` and `row` + 8.
CHORD_DEVICE void store_pair(u16* out_row, int row, float low, float high, float weight, int n) {
  low *= kOutputScale, high *= kOutputScale;
  if (kOutput == kPlain) {
    out_row[row] = pack_bf16(low * weight, 0.0f);
    out_row[row + 8] = pack_bf16(high * weight, 0.0f);
  } else {
    const int channel = row / 16 * 8 + row % 8;
    if (kOutput == kSwiGLU) {
      out_row[channel] = pack_bf16(silu_times(low, high) * weight, 0.0f);
    } else {
      out_row[channel] = pack_bf16(low * weight, 0.0f);
      out_row[n / 2 + channel] = pack_bf16(high * weight, 0.0f);
    }
  }
}

// Source(row) is the input row of a row in the mode's order, or -1; Rows its output row (chord/rows.cuh).
template <class Scheduler, class Rows>
CHORD_DEVICE void multiply(Scheduler scheduler, Rows rows, const u16* x, const u8* w, const float* row_weight, u16* out,
                           int n, int k) {
  const int warp = threadIdx.x / kWarp, lane = lane_id(), r = lane / 4, q = lane % 4;
  Tile tile;
  while (scheduler.next(tile)) {
    const u16* from[kGroups];  // the row that this lane reads for each eight tokens; any row where there is none
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int row = tile.row0 + group * 8 + r;
      const bool valid = group * 8 + r < tile.rows && rows.resolve(tile, row, rows.fetch(row)) >= 0;
      from[group] = x + i64(valid ? rows.source(row) : 0) * k + 2 * q;
    }
    const u8* block = w + strip_offset(tile.expert, tile.strip, 0, n, k) + warp * 512 + lane * 16;
    float sums[kBlocks][kGroups][4] = {};
    for (int kb = 0; kb < k / kBlockK; ++kb, block += kStripBytes) {
      u32 b[kGroups][4][2];
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int step = 0; step < 8; ++step)
          b[group][step / 2][step % 2] = *reinterpret_cast<const u32*>(from[group] + kb * kBlockK + step * 8);
#pragma unroll
      for (int half = 0; half < kBlocks; ++half) {
        const u8* codes = block + half * kBlockBytes;
        u32 a[4][4];
        dequantize({*reinterpret_cast<const uint4*>(codes),
                    *reinterpret_cast<const uint2*>(codes - warp * 512 - lane * 16 + kCodeBytes + warp * 64 + r * 8)}, a);
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int group = 0; group < kGroups; ++group) mma(sums[half][group], a[step], b[group][step][0], b[group][step][1]);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = group * 8 + 2 * q + i, row = tile.row0 + token;
        const int to = token < tile.rows ? rows.resolve(tile, row, rows.fetch(row)) : -1;
        if (to < 0) continue;
        const float weight = row_weight != nullptr ? row_weight[to] : 1.0f;
        u16* out_row = out + to * i64(kOutput == kSwiGLU ? n / 2 : n);
#pragma unroll
        for (int half = 0; half < kBlocks; ++half)
          store_pair(out_row, tile.strip * kStripRows + half * kBlockRows + warp * 16 + r, sums[half][group][i],
                     sums[half][group][2 + i], weight, n);
      }
    }
  }
}

// CHORD_MODE: 0 contiguous (routing = m_indices), 1 masked (masked_m), 2 indexed (sorted_ids).
// Six blocks a multiprocessor: left alone, ptxas aims at eight and spills.
extern "C" __global__ void __launch_bounds__(kWarpgroup, 6)
    chord_portable(const u16* __restrict__ x, const u8* __restrict__ w, const int* __restrict__ routing,
                   const int* __restrict__ expert_ids, const int* __restrict__ num_tokens_padded,
                   const float* __restrict__ row_weight, u16* __restrict__ out, int experts, int num_rows, int top_k,
                   int block_size, int n, int k) {
#if CHORD_MODE == 0
  TileScheduler<RunSegments> scheduler(RunSegments(routing, block_size, num_rows / block_size, block_size, experts), n);
  multiply(scheduler, ContiguousRows{routing}, x, w, row_weight, out, n, k);
#elif CHORD_MODE == 1
  TileScheduler<MaskedSegments> scheduler(MaskedSegments(routing, experts, num_rows / experts), n);
  multiply(scheduler, MaskedRows{}, x, w, row_weight, out, n, k);
#else
  TileScheduler<RunSegments> scheduler(RunSegments(expert_ids, 1, *num_tokens_padded / block_size, block_size, experts), n);
  multiply(scheduler, RoutedRows{routing, num_rows, top_k}, x, w, row_weight, out, n, k);
#endif
}
