// The producer's side of the ring when rows are gathered: weights by bulk copies, rows by cp.async.
//
// Bulk copies cannot gather: a tensor map brings one row for about 55 clocks of issue (measured), 100 times too slow. So
// four warps copy 16 bytes a lane, eight lanes a row of 128 B, straight into the swizzled layout. cp.async belongs to the
// generic proxy: its data may be handed to wgmma only after the copies have landed and the writer has fenced. Waiting for
// each stage in turn would leave no copies in flight, so a stage is handed over when kLag - 1 more have been started.
#pragma once
#include "chord/barrier.cuh"
#include "chord/producer.cuh"
#include "chord/rows.cuh"
#include "chord/scheduler.cuh"

namespace chord {

constexpr int kLag = CHORD_LAG;
// A consumer frees a stage only once it holds the next: with more stages held back, the ring would lock.
static_assert(1 <= kLag && kLag <= kStages - 2, "kLag");

template <class Scheduler>
CHORD_DEVICE void produce_gathered(Shared& shared, Scheduler scheduler, RoutedRows rows, const u16* x, const u8* w, int n,
                                   int k) {
  constexpr int kSlots = ceil_div(kTokens, kWarp);       // ids a lane reads
  constexpr int kCopies = ceil_div(kTokens, 16);         // rows a lane copies from: 16 are copied at a time
  const int warp = threadIdx.x / kWarp % kProducerWarps, lane = lane_id();
  const int group_row = warp * 4 + lane / 8, chunk = lane % 8;
  RingPosition at = {0, 1};
  int started = 0, handed = 0, hand_stage = 0;
  auto hand_over = [&] {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.full[hand_stage]));
    ++handed;
    if (++hand_stage == kStages) hand_stage = 0;
  };

  Tile tile;
  while (scheduler.next(tile)) {
    int ids[kSlots], last = 0;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int row = slot * kWarp + lane;
      ids[slot] = row < tile.rows ? rows.fetch(tile.row0 + row) : -1;
      const u32 valid = __ballot_sync(kFullMask, rows.valid(ids[slot]));
      if (valid) last = slot * kWarp + highest_bit(valid) + 1;
    }
    tile.rows = last;
    if (last == 0) continue;

    const u16* from[kCopies];
    bool copies[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * 16 + group_row, id = __shfl_sync(kFullMask, ids[i / 2], row % kWarp);
      copies[i] = row < last && rows.valid(id);
      from[i] = x + i64(copies[i] ? id / rows.top_k : 0) * k + chunk * 8;
    }
    const u32 swizzled = group_row * kBlockK * 2 + ((chunk ^ (group_row & 7)) << 4);

    for (int kb = 0; kb < k / kBlockK; kb += kStageK) {
      barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
      if (warp == started % kProducerWarps && lane == 0) begin_stage(shared, at, tile, kb, w, n, k, 0);
      __syncwarp();
      const u32 to = shared_address(shared.activations[at.stage]) + swizzled;
#pragma unroll
      for (int j = 0; j < kStageK; ++j)
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
          if (copies[i]) copy_async_16(to + (j * kTokens + i * 16) * kBlockK * 2, from[i] + (kb + j) * kBlockK);
      copy_async_commit();
      if (++started - handed >= kLag) {
        copy_async_wait<kLag - 1>();
        hand_over();
      }
      at.advance();
    }
  }
  copy_async_wait<0>();
  while (handed < started) hand_over();
  if (lane == 0) {
    if (warp == 0) {
      end_tiles(shared, at);
      barrier_arrive(shared_address(&shared.full[at.stage]));
    } else {
      barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
    }
    barrier_arrive(shared_address(&shared.full[at.stage]));
  }
}

}  // namespace chord
