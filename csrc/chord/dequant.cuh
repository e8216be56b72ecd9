// INT4 codes to BF16 A fragments, exactly, with one AND and one FMA for every two weights.
//
// BF16 patterns 0x0000..0x00FF (subnormals and the first binade) are linear: value = bits * 2^-133. So a code that is
// left alone in bits 0..3 of a half *is* the number code * 2^-133, and in bits 4..7 code * 2^-129: no magic constant, no
// conversion. With the stored scale a = s * 2^(133-32) (rows r, low nibble) or s * 2^(129-32) (rows r+8, high nibble)
// and c = -8 * s * 2^-32,
//
//     fma(code bits, a, c) = (code - 8) * s * 2^-32, rounded once,
//
// because both terms are power-of-two multiples of s. The epilogue multiplies the FP32 sum by 2^32, also exactly.
// Packing checks 2^-94 <= |s| < 2^27 or s = 0, for which none of this over- or underflows.
#pragma once
#include "chord/block.cuh"

namespace chord {

CHORD_DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
CHORD_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Both halves of the result are one half of x. They cost nothing: HFMA2 takes .H0_H0 and .H1_H1 operands.
CHORD_DEVICE u32 low_half(u32 x) {
  u32 d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(x));
  return d;
}
CHORD_DEVICE u32 high_half(u32 x) {
  u32 d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(x));
  return d;
}

// c of the two rows of a stored scale pair: a * -2^-130 for the low row, a * -2^-126 for the high one.
CHORD_DEVICE u32 offsets_of(u32 scales) { return multiply_bf16x2(scales, 0x80808008u); }

// A lane's share of a 64x64 block, as it lies in shared memory: for each of four k16 steps a word of codes, and the scales
// of rows r and r+8 for k < 32 and k >= 32.
struct Codes {
  uint4 words;
  uint2 scales;

  CHORD_DEVICE void load(u32 words_at, u32 scales_at) {
    words = load_shared_16(words_at);
    scales = load_shared_8(scales_at);
  }
};

// The lane's A registers of the block: rows r in a[..][0] and [2], rows r+8 in [1] and [3]. The compiler interleaves the
// ANDs with the FMAs: they use different pipes, each of which takes an instruction of a warp every other clock.
CHORD_DEVICE void dequantize(const Codes& from, u32 (&a)[4][4]) {
  const u32 words[4] = {from.words.x, from.words.y, from.words.z, from.words.w};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u32 word = words[step], upper = word >> 8;
    const u32 scales = step < 2 ? from.scales.x : from.scales.y;
    const u32 offsets = offsets_of(scales);
    a[step][0] = fma_bf16x2(word & 0x000F000Fu, low_half(scales), low_half(offsets));
    a[step][1] = fma_bf16x2(word & 0x00F000F0u, high_half(scales), high_half(offsets));
    a[step][2] = fma_bf16x2(upper & 0x000F000Fu, low_half(scales), low_half(offsets));
    a[step][3] = fma_bf16x2(upper & 0x00F000F0u, high_half(scales), high_half(offsets));
  }
}

}  // namespace chord
