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

// 16 bytes, in the generic proxy: wgmma sees them only after copy_async_wait and fence_async_proxy by the writer.
CHORD_DEVICE void copy_async_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
CHORD_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
CHORD_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace chord
