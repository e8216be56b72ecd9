// The producer's side of the ring when rows are gathered: weights by bulk copies, rows by cp.async.
//
// Bulk copies cannot gather: a tensor map brings one row for about 55 clocks of issue (measured), 100 times too slow. So
// warps copy 16 bytes a lane, eight lanes a row of 128 B, straight into the swizzled layout. No thread waits for its
// copies: each leaves an arrival on the stage's full barrier that happens when they have landed, and goes on to the next
// stage. cp.async belongs to the generic proxy, so consumers fence between that barrier and wgmma (consumer.cuh).
#pragma once
#include "chord/barrier.cuh"
#include "chord/producer.cuh"
#include "chord/rows.cuh"
#include "chord/scheduler.cuh"

namespace chord {

// The routed indices of a tile, 32 to a register across the warp; trims the tile to its last valid row, 0 if there is none.
struct TileIds {
  int ids[ceil_div(kTokens, kWarp)];

  CHORD_DEVICE TileIds(const RoutedRows& rows, Tile& tile) {
    int last = 0;
#pragma unroll
    for (int slot = 0; slot < ceil_div(kTokens, kWarp); ++slot) {
      const int row = slot * kWarp + lane_id();
      ids[slot] = row < tile.rows ? rows.fetch(tile.row0 + row) : -1;
      const u32 valid = __ballot_sync(kFullMask, rows.valid(ids[slot]));
      if (valid) last = slot * kWarp + highest_bit(valid) + 1;
    }
    tile.rows = last;
  }
  // Of a row that differs between lanes; every lane must ask. `slot` is row / 32, the same in all lanes.
  CHORD_DEVICE int of(int slot, int row) const { return __shfl_sync(kFullMask, ids[slot], row % kWarp); }
};

CHORD_DEVICE u32 swizzled(int row, int chunk) { return row * kBlockK * 2 + ((chunk ^ (row & 7)) << 4); }

// Few rows: one warp streams weights, which need not wait for rows, two gather, and one is idle; or three gather rows that
// stay. Else all four gather and take weights in turn.
constexpr bool kStreams = kGathered && (kResident || kTokens <= 32);

CHORD_DEVICE bool streams_weights() { return kStreams && threadIdx.x / kWarp == kConsumers / kWarp; }

template <class Scheduler>
CHORD_DEVICE void produce_gathered(Shared& shared, Scheduler scheduler, RoutedRows rows, const u16* x, const u8* w, int n,
                                   int k) {
  constexpr int kFirst = kStreams ? 1 : 0, kGatherers = kStreams ? 2 : kProducerWarps;
  constexpr int kRowsAtOnce = kGatherers * 4, kCopies = ceil_div(kTokens, kRowsAtOnce);
  const int warp = threadIdx.x / kWarp % kProducerWarps, lane = lane_id();
  const bool gathers = u32(warp - kFirst) < kGatherers;
  const int group_row = u32(warp + kGatherers - kFirst) % kGatherers * 4 + lane / 8, chunk = lane % 8;
  RingPosition at = {0, 1};
  u32 turn = 0;
  Tile tile;
  while (scheduler.next(tile)) {
    const TileIds ids(rows, tile);
    if (tile.rows == 0) continue;
    // Where this lane's 16 bytes of each row begin, in bytes; launch.py refuses more than 32 bits hold. Padding among
    // them reads the first row: its sums are not stored.
    u32 from[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsAtOnce + group_row, id = ids.of(i * kRowsAtOnce / kWarp, row);
      from[i] = u32(row < tile.rows && rows.valid(id) ? id / rows.top_k : 0) * (k * 2) + chunk * 16;
    }
    for (int kb = 0; kb < k / kBlockK; kb += kStageK) {
      barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
      if (u32(warp) == turn && lane == 0) begin_stage(shared, at, tile, kb, w, n, k, 0);
      if (!kStreams) turn = (turn + 1) % kProducerWarps;
      __syncwarp();
      if (gathers) {
        const u32 to = shared_address(shared.activations[at.stage]) + swizzled(group_row, chunk);
        const u8* const columns = reinterpret_cast<const u8*>(x) + kb * kBlockK * 2;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (i * kRowsAtOnce + group_row >= tile.rows) break;
#pragma unroll
          for (int j = 0; j < kStageK; ++j)
            copy_async_16(to + (j * kTokens + i * kRowsAtOnce) * kBlockK * 2, columns + from[i] + j * kBlockK * 2);
        }
      }
      copy_async_arrive(shared_address(&shared.full[at.stage]));
      at.advance();
    }
  }
  if (warp == 0 && lane == 0)
    end_tiles(shared, at);
  else
    barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
  copy_async_arrive(shared_address(&shared.full[at.stage]));
}

// The same for a short K, whose activations stay while kGroup tiles of weights pass: one warp streams weights, the others
// gather the next rows, all of K, into a slot as soon as one is free.
template <class Scheduler>
CHORD_DEVICE void produce_resident(Shared& shared, Scheduler scheduler, RoutedRows rows, const u16* x, const u8* w, int n,
                                   int k) {
  constexpr int kRowsAtOnce = (kProducerWarps - 1) * 4, kCopies = ceil_div(kTokens, kRowsAtOnce);
  const int warp = threadIdx.x / kWarp % kProducerWarps, lane = lane_id(), chunk = lane % 8;
  RingPosition at = {0, 1};
  Position<kSlots> slot = {0, 1};
  Tile tile;
  while (scheduler.next(tile)) {
    const TileIds ids(rows, tile);
    if (tile.rows == 0) continue;
    if (warp == 0) {
      const int end = smaller(tile.strip + kGroup * kStrips, n / kStripRows);
      for (; tile.strip < end; tile.strip += kStrips) {
        tile.strips = smaller(kStrips, end - tile.strip);
        for (int kb = 0; kb < k / kBlockK; kb += kStageK, at.advance()) {
          barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
          if (lane == 0) begin_stage(shared, at, tile, kb, w, n, k, 0);
          __syncwarp();
        }
      }
    } else {
      barrier_wait(shared_address(&shared.rows_empty[slot.stage]), slot.parity);
      const u32 to = shared_address(shared.activations[slot.stage]);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int first = i * kRowsAtOnce, row = first + (warp - 1) * 4 + lane / 8;
        // The rows of one step lie in at most two registers of ids.
        const int low = ids.of(first / kWarp, row);
        const int high = ids.of(smaller(first / kWarp + 1, ceil_div(kTokens, kWarp) - 1), row);
        const int id = row / kWarp == first / kWarp ? low : high;
        if (row < tile.rows && rows.valid(id)) {
          const u8* from = reinterpret_cast<const u8*>(x + i64(id / rows.top_k) * k) + chunk * 16;
#pragma unroll
          for (int kb = 0; kb < kResident; ++kb)
            copy_async_16(to + kb * kTokens * kBlockK * 2 + swizzled(row, chunk), from + kb * kBlockK * 2);
        }
      }
      copy_async_arrive(shared_address(&shared.rows_full[slot.stage]));
      slot.advance();
    }
  }
  if (warp == 0 && lane == 0) end_tiles(shared, at);
}

}  // namespace chord
