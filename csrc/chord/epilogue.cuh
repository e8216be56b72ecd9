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
constexpr int kStep = kTokens <= 16 ? 8 : 16;  // tokens between two looks at whether any are left
constexpr float kOutputScale = 4294967296.0f;  // 2^kOutputExp
static_assert(kOutputExp == 32, "kOutputScale");
// Of sums that are stored as they are, the scale is part of the row's weight: both products are rounded once, to the same.
constexpr float kPlainScale = kOutput == kSwiGLU ? 1.0f : kOutputScale;

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

// The output row of each token of a tile, -1 for none, and what its sums are multiplied by. Called with the row of token
// `thread`; seen by others after the next warpgroup_sync.
CHORD_DEVICE void set_rows(Shared& shared, int my_row, const float* row_weight) {
  const int warpgroup = own_warpgroup(), thread = own_thread();
  warpgroup_sync(warpgroup);  // the rows of the last tile have been stored
  if (thread >= kTokens) return;
  shared.out_row[warpgroup][thread] = my_row;
  shared.weight[warpgroup][thread] = (row_weight != nullptr && my_row >= 0 ? row_weight[my_row] : 1.0f) * kPlainScale;
}

// Turn the sums of eight tokens into staging rows, multiplied by `factor`: of this thread's two tokens.
CHORD_DEVICE void stage_eight(u32 staging, const float (&sums)[kBlocks][kTokens / 2], int token, float2 factor) {
  const int warp = own_thread() / kWarp, lane = lane_id();
  const int stage_token = token % kChunk + lane % 8, h = lane / 8 & 1;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = sums[block][token / 2 + i];
    if (kOutput == kSwiGLU) {
      v[0] = silu_times(v[0] * kOutputScale, v[2] * kOutputScale) * factor.x;
      v[1] = silu_times(v[1] * kOutputScale, v[3] * kOutputScale) * factor.y;
      store_matrix_transposed(staging + staging_offset(stage_token, 4 * block + warp), pack_bf16(v[0], v[1]));
    } else {
      const int chunk = kOutput == kPlain ? 8 * block + 2 * warp + h : 4 * kBlocks * h + 4 * block + warp;
      store_matrices_transposed(staging + staging_offset(stage_token, chunk), pack_bf16(v[0] * factor.x, v[1] * factor.y),
                                pack_bf16(v[2] * factor.x, v[3] * factor.y));
    }
  }
}

// Write a tile's sums of its first `rows` tokens to the rows that were set, kChunk tokens at a time.
CHORD_DEVICE void store_tile(Shared& shared, const float (&sums)[kBlocks][kTokens / 2], int rows, int first_row, u16* out,
                             int n) {
  const int warpgroup = own_warpgroup(), thread = own_thread();
  const u32 staging = shared_address(shared.staging[warpgroup]);
  const float* const weight = shared.weight[warpgroup] + thread % 4 * 2;
  // This thread stores 16 bytes of every kRowsAtOnce-th row. That is a multiple of 8, so that all are permuted alike.
  constexpr int kRowsAtOnce = kWarpgroup / kChunksPerRow, kBatch = ceil_div(kStep, kRowsAtOnce);
  const int chunk = thread % kChunksPerRow, first = thread / kChunksPerRow;
  const u32 from = staging + staging_offset(first, chunk);
  const int* const to_row = shared.out_row[warpgroup] + first;
  u8* const column = reinterpret_cast<u8*>(out + column_of(chunk, first_row, n));
  const u32 row_bytes = (kOutput == kSwiGLU ? n / 2 : n) * 2;

#pragma unroll
  for (int token0 = 0; token0 < kTokens; token0 += kChunk) {
    if (token0 >= rows) break;
    warpgroup_sync(warpgroup);  // rows are set, and the staging rows have been read
#pragma unroll
    for (int step = 0; step < kChunk; step += kStep) {
      if (token0 + step >= rows) break;
      float2 factors[kStep / 8];  // of this thread's two tokens of every eight; all read before the first store
#pragma unroll
      for (int i = 0; i < kStep / 8; ++i) {
        const int token = token0 + step + i * 8;
        if (token < kTokens) factors[i] = *reinterpret_cast<const float2*>(weight + token);
      }
#pragma unroll
      for (int i = 0; i < kStep / 8; ++i) {
        const int token = token0 + step + i * 8;
        if (token < kTokens) stage_eight(staging, sums, token, factors[i]);
      }
    }
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int row0 = 0; row0 < kChunk; row0 += kBatch * kRowsAtOnce) {
      if (token0 + row0 >= rows) break;
      int to[kBatch];
      uint4 channels[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {  // all reads of a batch are under way before the first store
        const int row = row0 + i * kRowsAtOnce, end = smaller(kChunk, kTokens - token0);
        to[i] = -1;
        if (row + kRowsAtOnce <= end || row + first < end) {
          to[i] = to_row[token0 + row];
          channels[i] = load_shared_16(from + row * kRowBytes);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (to[i] >= 0) *reinterpret_cast<uint4*>(column + u64(u32(to[i])) * row_bytes) = channels[i];
    }
  }
}

}  // namespace chord
