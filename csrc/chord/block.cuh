// The packed weight, as the kernels read it. docs/format.md is the specification and chord_runtime/format/block.py the
// same geometry in Python; a test compares the constants.
//
//   expert -> strips of 128 rows -> blocks of 64 k, each strip contiguous along K:
//
//        k64 block 0        k64 block 1
//      +-----------------+-----------------+--
//      | rows 0..63      | rows 0..63      |        each half: 2048 B of codes, then 256 B of scales;
//      | rows 64..127    | rows 64..127    |        4608 B a strip and k64 block, one bulk copy for any run of them
//      +-----------------+-----------------+--
//
//   Inside a half, warp w owns rows 16w..16w+15. Lane 4r+q reads 16 B: one word for each k16 step, which holds exactly
//   the lane's A fragment of m64nNk16 (rows r and r+8, k = 2q, 2q+1, 2q+8, 2q+9); nibble p = 4e + 2g + h.
#pragma once
#include "chord/base.cuh"

namespace chord {

constexpr int kBlockRows = 64;
constexpr int kBlockK = 64;
constexpr int kStripRows = 128;
constexpr int kCodeBytes = 2048;
constexpr int kScaleBytes = 256;
constexpr int kBlockBytes = kCodeBytes + kScaleBytes;
constexpr int kStripBytes = 2 * kBlockBytes;  // of one strip and k64 block
constexpr int kOutputExp = 32;                // weights are multiplied as w * 2^-32: see dequant.cuh

static_assert(kCodeBytes == kBlockRows * kBlockK / 2, "one nibble a weight");
static_assert(kScaleBytes == kBlockRows * (kBlockK / 32) * 2, "one bf16 a group of 32");

// First byte of a strip (128 rows) at k64 block `kb`.
CHORD_DEVICE i64 strip_offset(int expert, int strip, int kb, int n, int k) {
  const i64 strips = i64(expert) * (n / kStripRows) + strip;
  return (strips * (k / kBlockK) + kb) * kStripBytes;
}

}  // namespace chord
