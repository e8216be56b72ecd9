// The consumers' side of the ring: dequantise, multiply, store.
//
// ptxas keeps wgmma asynchronous only if the A registers are not touched between the wgmmas of a group. So a whole
// 64x64 block is dequantised into one of two register buffers, four wgmmas follow back to back, and the other buffer is
// filled while they run:
//
//     dequantise b0 -> A | wgmma A     dequantise b2 -> A | wgmma A
//                        | dequantise b1 -> B | wgmma B   | ...        wait<1>: the group before has finished
//
// Codes come from shared memory two blocks ahead. Every instruction counts: on an H200 a 64x64 block takes about its
// issued instructions plus 3/4 of its tensor clocks (docs/performance.md), so that saving either saves time.
//
// Which buffer is used is known at compile time (kBlocks * kStageK is even), and the order of k is the same in every
// instantiation: a row's bits do not depend on the tile, the mode or the batch.
#pragma once
#include "chord/dequant.cuh"
#include "chord/epilogue.cuh"
#include "chord/wgmma.cuh"

namespace chord {

// The stage whose full barrier this is, if any, may be filled again; its empty barrier lies kStages further on. Every lane
// says so: one lane after a __syncwarp is no faster, and compute-sanitizer's racecheck does not know that order.
CHORD_DEVICE void release(u32 full) {
  if (full) barrier_arrive(full + kStages * 8);
}

// Wait for a stage of the ring. Gathered rows were written in the generic proxy.
CHORD_DEVICE void wait_full(u32 full, u32 parity) {
  barrier_wait(full, parity);
  if (kGathered && !kResident) fence_async_proxy();
}

constexpr int kUnits = kBlocks * kStageK;  // 64x64 blocks of a stage that a warpgroup multiplies
static_assert(kBlocks <= 2, "a warpgroup's blocks lie in one strip");
static_assert(kStages >= 3, "a stage is still held when the next but one is waited for");

// All k of one tile, for this warpgroup's rows of the weight and the first kN tokens.
template <int kN>
CHORD_DEVICE void multiply_tile(Shared& shared, RingPosition& at, int k, u32 resident,
                                float (&all_sums)[kBlocks][kTokens / 2]) {
  const int thread = own_thread(), first_block = own_warpgroup() * kBlocks;  // of the tile; two make a strip
  const u32 base = kept(shared_address(&shared)), full = base + offset_in(shared, shared.full);
  const u32 words = kept(base + offset_in(shared, shared.weights) + first_block / 2 * kStageK * kStripBytes +
                         first_block % 2 * kBlockBytes + thread * 16);
  const u32 scales = words - thread * 16 + kCodeBytes + thread / 4 * 8;
  u32 a[2][4][4];
  Codes codes[2];

  u32 held = 0, stage = at.stage * kWeightBytes;  // held: the stage that the last wgmmas may still read
  auto load = [&](int unit) {
    const u32 offset = stage + unit / kBlocks * kStripBytes + unit % kBlocks * kBlockBytes;
    codes[unit % 2].load(words + offset, scales + offset);
  };
  wait_full(full + at.stage * 8, at.parity);
  load(0);
  load(1);
  int left = int(kept(k)) / (kBlockK * kStageK), add = 0;  // the first wgmma of a block sets its sums, others add
#pragma unroll 1
  do {
    const u64 tokens = activation_descriptor(kResident ? resident : base + at.stage * kActivationBytes);
    const u32 this_full = full + at.stage * 8;
    resident += kActivationStageBytes;
    at.advance();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      auto& buffer = a[unit % 2];
      auto& sums = reinterpret_cast<float(&)[kN / 2]>(all_sums[unit % kBlocks]);
      const u64 b = tokens + descriptor_step(unit / kBlocks * kTokens * kBlockK * 2);
      if (unit + 2 == kUnits && left > 1) {  // in the last stage two blocks are read once more, for nothing
        wait_full(full + at.stage * 8, at.parity);
        stage = at.stage * kWeightBytes;
      }
      dequantize(codes[unit % 2], buffer);
      wgmma_fence();
      wgmma_step<kN>(sums, buffer, b, 0, unit < kBlocks ? add : 1);
      wgmma_step<kN>(sums, buffer, b, 1);
      load((unit + 2) % kUnits);
      wgmma_step<kN>(sums, buffer, b, 2);
      wgmma_step<kN>(sums, buffer, b, 3);
      wgmma_commit();
      wgmma_wait<1>();
      if (unit == 0) {
        release(held);  // its last wgmma has just finished
        held = this_full;
      }
    }
    add = 1;
  } while (--left > 0);
  wgmma_wait<0>();
  release(held);
}

// Rows: how the mode's rows map to output rows (chord/rows.cuh).
template <class Rows>
struct Consumer {
  Shared& shared;
  Rows rows;
  const float* row_weight;
  u16* out;
  int n, k;

  CHORD_DEVICE void run() {
    RingPosition at = {0, 0};
    Position<kSlots> slot = {kSlots - 1, 1};  // of activations that stay: the next advance leads to the first
    while (true) {
      barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
      Tile tile = shared.tiles[at.stage];
      tile = {uniform(tile.row0), uniform(tile.rows), uniform(tile.expert), u16(uniform(tile.strip)), u16(uniform(tile.strips))};
      if (tile.rows == 0) return;
      if (kResident) {
        slot.advance();
        barrier_wait(shared_address(&shared.rows_full[slot.stage]), slot.parity);
        fence_async_proxy();
      }
      const int thread = own_thread(), row = tile.row0 + thread;
      const bool valid = thread < tile.rows;
      const u32 fetched = valid ? rows.fetch(row) : 0;
      const u32 resident = shared_address(shared.activations[slot.stage]);
      const int blocks = kGroup == 1 ? 1 : smaller(kGroup, ceil_div(n / kStripRows - tile.strip, kStrips));
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        const int first_row = tile.strip * kStripRows + (block * kWarpgroups + own_warpgroup()) * kBlocks * kBlockRows;
        const bool mine = first_row < (kDivides ? (tile.strip + tile.strips) * kStripRows : n);
        float sums[kBlocks][kTokens / 2];
        if (!mine)
          skip(at);
        else if (kNarrow < kTokens && tile.rows <= kNarrow)
          multiply_tile<kNarrow>(shared, at, k, resident, sums);
        else
          multiply_tile<kTokens>(shared, at, k, resident, sums);
        if (kResident && block + 1 == blocks) barrier_arrive(shared_address(&shared.rows_empty[slot.stage]));
        if (!mine) break;
        if (block == 0) set_rows(shared, valid ? rows.resolve(tile, row, kept(fetched)) : -1, row_weight);
        store_tile(shared, sums, tile.rows, first_row, out, n);
      }
    }
  }

 private:
  // The tile ends before this warpgroup's rows: let the stages pass.
  CHORD_DEVICE void skip(RingPosition& at) {
    for (int kb = 0; kb < k / kBlockK; kb += kStageK) {
      barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
      release(shared_address(&shared.full[at.stage]));
      at.advance();
    }
  }
};

// Barriers of the ring; `producers` arrive for each full stage, and every consumer for each empty one.
CHORD_DEVICE void init_ring(Shared& shared, int producers) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), producers);
      barrier_init(shared_address(&shared.empty[stage]), kConsumers);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(shared_address(&shared.rows_full[slot]), kWarpgroup - kWarp);
      barrier_init(shared_address(&shared.rows_empty[slot]), kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

}  // namespace chord
