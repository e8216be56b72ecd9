// Which tiles a thread block computes: a static rule, found on the device, without atomics.
//
// Rows come in segments: consecutive rows of one expert. A segment is cut into the fewest tiles of at most kTokens rows,
// as equal as multiples of 8 allow, times n_blocks groups of kGroup blocks of weight rows. All tiles of all segments are
// numbered in order, tokens fastest, so that tiles which share weights run side by side; thread block b takes tiles b,
// b + gridDim.x, ... A warp finds them together: it looks at 32 segments at a time, one a lane, and walks on.
#pragma once
#include "chord/tile.cuh"

namespace chord {

struct Segment {
  int expert, row0, rows;
};

// masked: a segment is an expert's first masked_m rows of max_m.
class MaskedSegments {
 public:
  CHORD_DEVICE MaskedSegments(const int* masked_m, int experts, int max_m)
      : masked_m_(masked_m), experts_(experts), max_m_(max_m) {}

  // Give every lane its next segment, empty ones too; false after the last.
  CHORD_DEVICE bool next(Segment& mine) {
    if (expert_ >= experts_) return false;
    const int expert = expert_ + lane_id();
    mine = {expert, expert * max_m_, expert < experts_ ? smaller(max_m_, masked_m_[expert]) : 0};
    expert_ += kWarp;
    return true;
  }

 private:
  const int* masked_m_;
  int experts_, max_m_, expert_ = 0;
};

// contiguous, indexed: a segment is a run of blocks of one expert; runs of anything but 0..experts-1 are left out.
class RunSegments {
 public:
  // The expert of block b is ids[b * stride].
  CHORD_DEVICE RunSegments(const int* ids, int stride, int blocks, int block_rows, int experts)
      : ids_(ids), stride_(stride), blocks_(blocks), block_rows_(block_rows), experts_(experts) {}

  CHORD_DEVICE bool next(Segment& mine) {
    if (block_ >= blocks_) return false;
    const int lane = lane_id(), block = block_ + lane, expert = expert_of(block);
    const int before = __shfl_up_sync(kFullMask, expert, 1);
    const u32 heads = __ballot_sync(kFullMask, lane == 0 || expert != before);
    const u32 later_heads = heads & ~((2u << lane) - 1);
    int length = (later_heads ? lowest_bit(later_heads) : kWarp) - lane;
    bool head = heads >> lane & 1;

    const int last_head = highest_bit(heads);
    if (last_head == 0) {  // one run fills the window: look for its end
      const int end = run_end(block_ + kWarp, __shfl_sync(kFullMask, expert, 0));
      length = end - block_;
      block_ = end;
    } else if (block_ + kWarp >= blocks_) {
      block_ = blocks_;
    } else {  // the last run may go on: the next window starts with it
      head = head && lane != last_head;
      block_ += last_head;
    }
    mine = {expert, block * block_rows_, head && expert >= 0 ? length * block_rows_ : 0};
    return true;
  }

 private:
  CHORD_DEVICE int expert_of(int block) const {
    const int expert = block < blocks_ ? ids_[i64(block) * stride_] : -1;
    return u32(expert) < u32(experts_) ? expert : -1;
  }
  CHORD_DEVICE int run_end(int block, int expert) const {
    for (; block < blocks_; block += kWarp) {
      const int other = block + lane_id();
      const u32 ends = __ballot_sync(kFullMask, other >= blocks_ || expert_of(other) != expert);
      if (ends) return block + lowest_bit(ends);
    }
    return blocks_;
  }
  const int* ids_;
  int stride_, blocks_, block_rows_, experts_, block_ = 0;
};

template <class Segments>
class TileScheduler {
 public:
  CHORD_DEVICE TileScheduler(Segments segments, int n) : segments_(segments), n_blocks_(ceil_div(n, kRows * kGroup)) {}

  // The next tile of this thread block, the first of its group, the same in every lane; false after the last.
  CHORD_DEVICE bool next(Tile& tile) {
    while (tile_ >= window_end_) {
      if (!segments_.next(mine_)) return false;
      const int tiles = ceil_div(mine_.rows, kTokens) * n_blocks_;
      int end = tiles;
#pragma unroll
      for (int d = 1; d < kWarp; d *= 2) {
        const int lower = __shfl_up_sync(kFullMask, end, d);
        if (lane_id() >= d) end += lower;
      }
      my_end_ = window_end_ + end;
      my_start_ = my_end_ - tiles;
      window_end_ = __shfl_sync(kFullMask, my_end_, kWarp - 1);
    }
    const int owner = __popc(__ballot_sync(kFullMask, my_end_ <= tile_));
    const int rows = __shfl_sync(kFullMask, mine_.rows, owner);
    const int index = tile_ - __shfl_sync(kFullMask, my_start_, owner);
    const int token_tiles = ceil_div(rows, kTokens);
    const int tokens = round_up(ceil_div(rows, token_tiles), 8);
    const int offset = index % token_tiles * tokens;
    tile.row0 = __shfl_sync(kFullMask, mine_.row0, owner) + offset;
    tile.rows = smaller(tokens, rows - offset);
    tile.n_block = index / token_tiles * kGroup;
    tile.expert = __shfl_sync(kFullMask, mine_.expert, owner);
    tile_ += gridDim.x;
    return true;
  }

 private:
  Segments segments_;
  Segment mine_ = {};
  int n_blocks_, tile_ = blockIdx.x, window_end_ = 0, my_start_ = 0, my_end_ = 0;
};

}  // namespace chord
