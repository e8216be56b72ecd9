// Which tiles a thread block computes: a static rule, found on the device, without atomics.
//
// Rows come in segments: consecutive rows of one expert. A segment is cut into the fewest tiles of at most kTokens rows,
// as equal as multiples of 8 allow, times n_blocks groups of kGroup blocks of weight rows. All tiles of all segments are
// numbered in order, tokens fastest, so that tiles which share weights run side by side; thread block b takes tiles b,
// b + gridDim.x, ... If so few are left for the last of these waves that each of their strips can have a thread block to
// itself, it gets one. A warp finds tiles together: it looks at 32 segments at a time, one a lane, and walks on.
#pragma once
#include "chord/tile.cuh"

namespace chord {

struct Segment {
  int expert, row0, rows;
};

constexpr int kWindows = 4;  // of 32 segments a wave: a look ahead at more takes longer than is won

// masked: a segment is an expert's first masked_m rows of max_m.
class MaskedSegments {
 public:
  CHORD_DEVICE MaskedSegments(const int* masked_m, int experts, int max_m)
      : masked_m_(masked_m), experts_(experts), max_m_(max_m) {}

  // How many there are to look at, and the rows that all segments have, unless some are left out; 0 if not known.
  CHORD_DEVICE int count() const { return experts_; }
  CHORD_DEVICE int least_rows() const { return 0; }

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
      : ids_(ids), stride_(stride), blocks_(blocks), block_rows_(block_rows), experts_(experts), read_(expert_of(lane_id())) {}

  CHORD_DEVICE int count() const { return blocks_; }
  CHORD_DEVICE int least_rows() const { return blocks_ * block_rows_; }

  // A lane whose block begins a run has the run before it as its segment.
  CHORD_DEVICE bool next(Segment& mine) {
    if (block_ > blocks_) return false;  // the block after the last ends its run
    const int lane = lane_id(), block = block_ + lane, expert = read_;
    read_ = expert_of(block + kWarp);  // of the next window: it arrives while this one is looked at
    int before = __shfl_up_sync(kFullMask, expert, 1);
    if (lane == 0) before = expert_;
    const u32 heads = __ballot_sync(kFullMask, expert != before), earlier = heads & ((1u << lane) - 1);
    const int start = earlier ? block_ + highest_bit(earlier) : start_;
    mine = {before, start * block_rows_, before >= 0 && expert != before ? (block - start) * block_rows_ : 0};
    if (heads) start_ = block_ + highest_bit(heads);
    expert_ = __shfl_sync(kFullMask, expert, kWarp - 1);
    block_ += kWarp;
    return true;
  }

 private:
  CHORD_DEVICE int expert_of(int block) const {
    const int expert = block < blocks_ ? ids_[i64(block) * stride_] : -1;
    return u32(expert) < u32(experts_) ? expert : -1;
  }
  const int* ids_;
  int stride_, blocks_, block_rows_, experts_, read_;
  int block_ = 0, start_ = 0, expert_ = -1;  // the next window, and the run that goes on into it
};

template <class Segments>
class TileScheduler {
 public:
  CHORD_DEVICE TileScheduler(Segments segments, int n)
      : segments_(segments),
        strips_(n / kStripRows),
        n_blocks_(ceil_div(n, kRows * kGroup)),
        least_(ceil_div(segments.least_rows(), kTokens) * n_blocks_),
        divides_(kDivides && segments.count() / (least_ / int(gridDim.x) + 1) <= kWindows * kWarp) {}

  // The next tile of this thread block, the first of its group, the same in every lane; false after the last.
  CHORD_DEVICE bool next(Tile& tile) {
    const int grid = gridDim.x, block = blockIdx.x;
    const bool divided = divides_ && wave_ + grid > least_ && (tiles_up_to(wave_ + grid) - wave_) * kStrips <= grid;
    const int number = wave_ + (divided ? block / kStrips : block);
    wave_ += grid;
    if (number >= window_end_) {
      do {
        if (!segments_.next(mine_)) return false;
        window_end_ += warp_sum(tiles_of(mine_));
      } while (number >= window_end_);
      const int tiles = tiles_of(mine_);
      int to_end = tiles;
#pragma unroll
      for (int d = 1; d < kWarp; d *= 2) {
        const int upper = __shfl_down_sync(kFullMask, to_end, d);
        if (lane_id() + d < kWarp) to_end += upper;
      }
      my_start_ = window_end_ - to_end;
      my_end_ = my_start_ + tiles;
    }
    const int owner = __popc(__ballot_sync(kFullMask, my_end_ <= number));
    const int rows = __shfl_sync(kFullMask, mine_.rows, owner);
    const int index = number - __shfl_sync(kFullMask, my_start_, owner);
    const int token_tiles = ceil_div(rows, kTokens);
    const int tokens = round_up(ceil_div(rows, token_tiles), 8);
    const int offset = index % token_tiles * tokens;
    const int strip = index / token_tiles * kGroup * kStrips + (divided ? block % kStrips : 0);
    if (divided && strip >= strips_) return false;  // the last strips of a divided tile, where the weight has ended
    tile.row0 = __shfl_sync(kFullMask, mine_.row0, owner) + offset;
    tile.rows = smaller(tokens, rows - offset);
    tile.strip = strip;
    tile.strips = smaller(divided ? 1 : kStrips, strips_ - strip);
    tile.expert = __shfl_sync(kFullMask, mine_.expert, owner);
    return true;
  }

 private:
  CHORD_DEVICE int tiles_of(const Segment& segment) const { return ceil_div(segment.rows, kTokens) * n_blocks_; }

  // All tiles there are; if those are `limit` or more, perhaps not all are counted.
  CHORD_DEVICE int tiles_up_to(int limit) const {
    Segments ahead = segments_;
    Segment segment;
    int tiles = window_end_;
    while (tiles < limit && ahead.next(segment)) tiles += warp_sum(tiles_of(segment));
    return tiles;
  }

  Segments segments_;
  Segment mine_ = {};
  int strips_, n_blocks_, least_, wave_ = 0, window_end_ = 0, my_start_ = 0, my_end_ = 0;
  bool divides_;
};

}  // namespace chord
