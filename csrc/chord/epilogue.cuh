// FP32 sums in registers -> BF16 rows in global memory.
//
// A warpgroup's sums are D[row of the weight, token]: a thread holds rows r and r+8 of its warp, tokens 2q and 2q+1 of
// every eight. Output rows are tokens, so 8x8 pieces are turned by stmatrix.trans into staging rows of one token each,
// 16 B (8 channels) a chunk, and leave as 16-byte stores, whole 128-byte lines at a time.
//
//   plain:   chunk = 8 * block + 2 * warp + h                   column = the weight's row
//   gate_up: chunk = 4 * kBlocks * h + 4 * block + warp         row r (h = 0) is gate, row r+8 (h = 1) up of one channel
//   swiglu:  chunk = 4 * block + warp                           silu(gate) * up, both in this thread's registers
#pragma once
#include "chord/barrier.cuh"
#include "chord/tile.cuh"

namespace chord {

constexpr int kChunksPerRow = kRowBytes / 16;
constexpr float kOutputScale = 4294967296.0f;  // 2^kOutputExp
static_assert(kOutputExp == 32, "kOutputScale");

// Chunks are permuted within 128 B by the token, so that stmatrix's eight rows fall in different banks.
CHORD_DEVICE u32 staging_offset(int token, int chunk) {
  constexpr int kPerLine = kChunksPerRow < 8 ? kChunksPerRow : 8;  // chunks of a row in one 128-byte line
  const int key = kPerLine == 8 ? token & 7 : token * kPerLine / 8 & (kPerLine - 1);
  return token * kRowBytes + ((chunk ^ key) << 4);
}

CHORD_DEVICE u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

CHORD_DEVICE float silu_times(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

CHORD_DEVICE void store_matrix_transposed(u32 address, u32 a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
}
CHORD_DEVICE void store_matrices_transposed(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// First column of a chunk of 8 output channels; `first_row` is the warpgroup's first row of the weight.
CHORD_DEVICE int column_of(int chunk, int first_row, int n) {
  if (kOutput == kPlain) return first_row + chunk * 8;
  const int half = chunk / (4 * kBlocks), within = chunk % (4 * kBlocks);
  return half * (n / 2) + first_row / 2 + within * 8;
}

// Write a tile's sums. my_row: the output row of token `thread`, -1 for none.
CHORD_DEVICE void store_tile(Shared& shared, int warpgroup, const float (&sums)[kBlocks][kTokens / 2], int rows,
                             int first_row, int my_row, const float* row_weight, u16* out, int n) {
  const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
  const u32 staging = shared_address(shared.staging[warpgroup]);
  int* const out_row = shared.out_row[warpgroup];
  float* const weight = shared.weight[warpgroup];
  const i64 columns = kOutput == kSwiGLU ? n / 2 : n;

#pragma unroll
  for (int chunk0 = 0; chunk0 < kTokens; chunk0 += kChunk) {
    if (chunk0 >= rows) break;
    warpgroup_sync(warpgroup);  // the last reader of the staging rows has finished
    if (chunk0 == 0) {
      if (thread < kTokens) out_row[thread] = my_row;
      if (row_weight != nullptr) {
        if (thread < kTokens) weight[thread] = my_row >= 0 ? row_weight[my_row] : 0.0f;
        warpgroup_sync(warpgroup);
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int group = 0; group < kChunk / 8; ++group) {
        const int token = chunk0 + group * 8;
        if (token >= rows) break;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = sums[block][token / 2 + i] * kOutputScale;
        if (kOutput == kSwiGLU) {
          v[0] = silu_times(v[0], v[2]);
          v[1] = silu_times(v[1], v[3]);
        }
        if (row_weight != nullptr) {
#pragma unroll
          for (int i = 0; i < (kOutput == kSwiGLU ? 2 : 4); ++i) v[i] *= weight[token + lane % 4 * 2 + i % 2];
        }
        const int stage_token = group * 8 + lane % 8, h = lane / 8 & 1;
        if (kOutput == kSwiGLU) {
          store_matrix_transposed(staging + staging_offset(stage_token, 4 * block + warp), pack_bf16(v[0], v[1]));
        } else {
          const int chunk = kOutput == kPlain ? 8 * block + 2 * warp + h : 4 * kBlocks * h + 4 * block + warp;
          store_matrices_transposed(staging + staging_offset(stage_token, chunk), pack_bf16(v[0], v[1]),
                                    pack_bf16(v[2], v[3]));
        }
      }
    }
    warpgroup_sync(warpgroup);
    constexpr int kRowsAtOnce = kWarpgroup / kChunksPerRow;
    const int chunk = thread % kChunksPerRow;
    u16* const column = out + column_of(chunk, first_row, n);
#pragma unroll 4
    for (int row = thread / kChunksPerRow; row < smaller(kChunk, rows - chunk0); row += kRowsAtOnce) {
      const int to = out_row[chunk0 + row];
      if (to >= 0) *reinterpret_cast<uint4*>(column + to * columns) = load_shared_16(staging + staging_offset(row, chunk));
    }
  }
}

}  // namespace chord
