// Warpgroup matrix multiply: the weight block is operand A (registers), activations are operand B (shared memory).
#pragma once
#include "chord/wgmma_shapes.cuh"

namespace chord {

CHORD_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CHORD_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
CHORD_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operand B: rows (tokens) of 64 bf16, K-major, 128-byte swizzle, 8-row groups 1024 B apart, 1024-aligned. PTX ISA, "Shared
// memory matrix layout": address and strides are in units of 16 B. Steps in K or along rows are added to the descriptor.
CHORD_DEVICE u64 activation_descriptor(u32 address) {
  constexpr u64 kSwizzle128 = 1ull << 62, kGroupStride = u64(1024 >> 4) << 32, kLeadingUnused = 1u << 16;
  return kSwizzle128 | kGroupStride | kLeadingUnused | u32(uniform(address >> 4));
}
constexpr CHORD_DEVICE u64 descriptor_step(int bytes) { return bytes >> 4; }

// One k16 step of a warpgroup's 64x64 weight block times the first kN tokens; `add` 0 sets the sums. Left to it, the compiler
// puts descriptors together from 32-bit halves; as 64-bit sums they cost one instruction each.
template <int kN>
CHORD_DEVICE void wgmma_step(float (&sums)[kN / 2], const u32 (&a)[4][4], u64 activations, int step, int add = 1) {
  Wgmma<kN>::run(sums, a[step], activations + descriptor_step(step * 32), add);
}

}  // namespace chord
