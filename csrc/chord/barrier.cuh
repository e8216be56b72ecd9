// mbarriers, named barriers and proxy fences.
#pragma once
#include "chord/base.cuh"

namespace chord {

CHORD_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
CHORD_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

CHORD_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrive, and hold the phase open until `bytes` have been copied.
CHORD_DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
CHORD_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Threads of one warpgroup meet at their own hardware barrier (0 is __syncthreads').
CHORD_DEVICE void warpgroup_sync(int warpgroup) {
  asm volatile("bar.sync %0, %1;" ::"r"(warpgroup + 1), "n"(kWarpgroup) : "memory");
}

// Shared memory written by ordinary stores or cp.async becomes visible to wgmma and bulk copies.
CHORD_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace chord
