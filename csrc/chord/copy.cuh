// Copies from global to shared memory: bulk (weights), tensor map (activation tiles), cp.async (gathered rows).
#pragma once
#include "chord/base.cuh"

namespace chord {

struct alignas(64) TensorMap {
  u8 opaque[128];  // CUtensorMap
};

// Contiguous bytes; completes on an mbarrier. Size and both addresses are multiples of 16.
CHORD_DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// A box of activations: all 64 elements of k64 blocks kb.. of rows row.., 128-byte swizzled, 128 B a row and block.
CHORD_DEVICE void copy_tile(u32 to, const TensorMap& map, int row, int kb, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(kb), "r"(barrier)
      : "memory");
}

// 16 bytes, in the generic proxy: wgmma sees them only after fence_async_proxy.
CHORD_DEVICE void copy_async_16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// This thread arrives when all that it has started has landed; the barrier counts one arrival for it.
CHORD_DEVICE void copy_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace chord
