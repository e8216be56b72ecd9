// The consumers' side of the ring: dequantise, multiply, store.
//
// ptxas keeps wgmma asynchronous only if the A registers are not touched between the wgmmas of a group. So a whole
// 64x64 block is dequantised into one of two register buffers, four wgmmas follow back to back, and the other buffer is
// filled while they run:
//
//     dequantise b0 -> A | wgmma A     dequantise b2 -> A | wgmma A
//                        | dequantise b1 -> B | wgmma B   | ...        wait<1>: the group before has finished
//
// Which buffer is used is known at compile time (kBlocks * kStageK is even), and the order of k is the same in every
// instantiation: a row's bits do not depend on the tile, the mode or the batch.
#pragma once
#include "chord/dequant.cuh"
#include "chord/epilogue.cuh"
#include "chord/wgmma.cuh"

namespace chord {

// The stage whose full barrier this is may be filled again; its empty barrier lies kStages further on.
CHORD_DEVICE void release(u32 full) {
  if (threadIdx.x % kWarp == 0) barrier_arrive(full + kStages * 8);
}

// All k of one tile, for this warpgroup's rows of the weight and the first kN tokens.
template <int kN>
CHORD_DEVICE void multiply_tile(Shared& shared, RingPosition& at, int warpgroup, int k, u32 resident,
                                float (&all_sums)[kBlocks][kTokens / 2]) {
  const int thread = threadIdx.x % kWarpgroup;
  const int first_block = warpgroup * kBlocks;  // of the tile; two make a strip
  const u32 all_activations = kept(shared_address(shared.activations)), full = kept(shared_address(shared.full));
  const u32 codes = kept(shared_address(shared.weights) + first_block / 2 * kStageK * kStripBytes +
                         first_block % 2 * kBlockBytes + thread * 16);
  const u32 scales = codes - thread * 16 + kCodeBytes + thread / 4 * 8;
  u32 a[2][4][4];
  Codes next;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) all_sums[block][i] = 0.0f;

  u32 this_full = full + at.stage * 8, previous_full = 0, stage = at.stage * kWeightBytes;
  barrier_wait(this_full, at.parity);
  next.load(codes + stage, scales + stage);
  int left = k / (kBlockK * kStageK);
#pragma unroll 1
  do {
    const u32 activations = uniform(kResident ? resident : all_activations + at.stage * kActivationBytes);
    resident += kActivationStageBytes;
    at.advance();
#pragma unroll
    for (int unit = 0; unit < kBlocks * kStageK; ++unit) {
      const int i = unit / kBlocks, block = unit % kBlocks;
      u32 offset = stage + (unit + 1) / kBlocks * kStripBytes + (unit + 1) % kBlocks * kBlockBytes;
      if (unit + 1 == kBlocks * kStageK) {
        if (left > 1) {
          barrier_wait(full + at.stage * 8, at.parity);
          stage = at.stage * kWeightBytes;
        }
        offset = stage;  // in the last stage a block is read once more, for nothing
      }
      auto& buffer = a[unit % 2];
      auto& sums = reinterpret_cast<float(&)[kN / 2]>(all_sums[block]);
      const u32 b = activations + i * kTokens * kBlockK * 2;
      dequantize(next, buffer);
      wgmma_fence();
      wgmma_step<kN>(sums, buffer, b, 0);
      wgmma_step<kN>(sums, buffer, b, 1);
      next.load(codes + offset, scales + offset);
      wgmma_step<kN>(sums, buffer, b, 2);
      wgmma_step<kN>(sums, buffer, b, 3);
      wgmma_commit();
      wgmma_wait<1>();
      if (unit == 0 && previous_full) release(previous_full);  // its last wgmma has just finished
    }
    previous_full = this_full;
    this_full = full + at.stage * 8;
  } while (--left > 0);
  wgmma_wait<0>();
  release(previous_full);
}

// Rows: how the mode's rows map to output rows (chord/rows.cuh).
template <class Rows>
struct Consumer {
  Shared& shared;
  Rows rows;
  const float* row_weight;
  u16* out;
  int n, k, warpgroup;

  CHORD_DEVICE void run() {
    RingPosition at = {0, 0};
    Position<2> slot = {1, 1};  // of the activations that stay: the next advance leads to the first
    int row0 = -1;
    while (true) {
      barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
      Tile tile = shared.tiles[at.stage];
      tile = {uniform(tile.row0), uniform(tile.rows), uniform(tile.n_block), uniform(tile.expert)};
      if (tile.rows == 0) return;
      const int first_row = tile.n_block * kRows + warpgroup * kBlocks * kBlockRows;
      if (kResident && tile.row0 != row0) {
        if (row0 >= 0 && lane_id() == 0) barrier_arrive(shared_address(&shared.rows_empty[slot.stage]));
        row0 = tile.row0;
        slot.advance();
        barrier_wait(shared_address(&shared.rows_full[slot.stage]), slot.parity);
      }
      const u32 resident = shared_address(shared.activations[slot.stage]);
      if (first_row >= n) {
        skip(at);
        continue;
      }
      const int thread = threadIdx.x % kWarpgroup, row = tile.row0 + thread;
      const bool valid = thread < tile.rows;
      const u32 fetched = valid ? rows.fetch(row) : 0;
      float sums[kBlocks][kTokens / 2];
      if (kNarrow < kTokens && tile.rows <= kNarrow)
        multiply_tile<kNarrow>(shared, at, warpgroup, k, resident, sums);
      else
        multiply_tile<kTokens>(shared, at, warpgroup, k, resident, sums);
      const int my_row = valid ? rows.resolve(tile, row, kept(fetched)) : -1;
      store_tile(shared, warpgroup, sums, tile.rows, first_row, my_row, row_weight, out, n);
    }
  }

 private:
  // The weight ends before this warpgroup's rows: let the stages pass.
  CHORD_DEVICE void skip(RingPosition& at) {
    for (int kb = 0; kb < k / kBlockK; kb += kStageK) {
      barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
      release(shared_address(&shared.full[at.stage]));
      at.advance();
    }
  }
};

// Barriers of the ring; `producers` arrive for each full stage, and one lane of every consumer warp for each empty one.
CHORD_DEVICE void init_ring(Shared& shared, int producers) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), producers);
      barrier_init(shared_address(&shared.empty[stage]), kConsumers / kWarp);
    }
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(shared_address(&shared.rows_full[slot]), kProducerWarps - 1);
      barrier_init(shared_address(&shared.rows_empty[slot]), kConsumers / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

}  // namespace chord
