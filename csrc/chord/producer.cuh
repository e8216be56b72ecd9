// The producer's side of the ring: weights by bulk copies, activations by tensor map.
#pragma once
#include "chord/barrier.cuh"
#include "chord/tile.cuh"

namespace chord {

// Wait for a stage, describe the tile in it if it is the tile's first, and start copying its weights.
// `more` is what else will complete on the stage's barrier, in bytes.
CHORD_DEVICE void begin_stage(Shared& shared, RingPosition at, const Tile& tile, int kb, const u8* w, int n, int k,
                              u32 more) {
  const u32 full = shared_address(&shared.full[at.stage]);
  if (kb == 0) shared.tiles[at.stage] = tile;
  barrier_arrive_expect(full, tile.strips * kStageK * kStripBytes + more);
  const u32 to = shared_address(shared.weights[at.stage]);
  const u8* from = w + strip_offset(tile.expert, tile.strip, kb, n, k);
  const i64 next_strip = i64(k / kBlockK) * kStripBytes;
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
    if (strip < tile.strips) copy_bulk(to + strip * kStageK * kStripBytes, from + strip * next_strip, kStageK * kStripBytes, full);
  }
}

// Tell the consumers that there are no more tiles.
CHORD_DEVICE void end_tiles(Shared& shared, RingPosition at) {
  barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
  shared.tiles[at.stage] = Tile{};
  barrier_arrive(shared_address(&shared.full[at.stage]));
}

// The producer warps feed the ring with the scheduler's tiles, each warp every kProducerWarps-th stage: waiting, arming
// the barrier and starting copies takes one thread about 400 clocks a stage, more than a stage lasts in decode.
// trim(tile) may lower tile.rows, to 0 to skip the tile. The whole warp waits: 1 to 2 % faster than one lane.
template <class Scheduler, class Trim>
CHORD_DEVICE void produce_tiles(Shared& shared, Scheduler scheduler, Trim trim, const TensorMap& map, const u8* w, int n,
                                int k) {
  static_assert(!kResident, "activations stay where rows are gathered only (gather.cuh)");
  // A warp knows only its own stages: were it a whole ring ahead, it would take one phase of a barrier for another.
  constexpr int kTurns = smaller(kProducerWarps, kStages);
  // One box a stage if it holds the whole tile; else boxes of kBox tokens of one k64 block.
  constexpr bool kWhole = kBox == kTokens;
  const int warp = threadIdx.x / kWarp % kProducerWarps;
  RingPosition at = {0, 1};
  int turn = 0;
  Tile tile;
  while (scheduler.next(tile)) {
    trim(tile);
    if (tile.rows == 0) continue;
    const int boxes = ceil_div(tile.rows, kBox);
    for (int kb = 0; kb < k / kBlockK; kb += kStageK) {
      if (turn == warp) barrier_wait(shared_address(&shared.empty[at.stage]), at.parity);
      if (turn == warp && lane_id() == 0) {
        begin_stage(shared, at, tile, kb, w, n, k, boxes * kBox * kStageK * kBlockK * 2);
        const u32 full = shared_address(&shared.full[at.stage]), to = shared_address(shared.activations[at.stage]);
        for (int box = 0; box < boxes; ++box) {
#pragma unroll
          for (int i = 0; i < (kWhole ? 1 : kStageK); ++i)
            copy_tile(to + (i * kTokens + box * kBox) * kBlockK * 2, map, tile.row0 + box * kBox, kb + i, full);
        }
      }
      turn = (turn + 1) % kTurns;
      at.advance();
    }
    __syncwarp();
  }
  if (turn == warp && lane_id() == 0) end_tiles(shared, at);
}

}  // namespace chord
