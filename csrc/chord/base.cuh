// Types and helpers that every header needs. NVRTC compiles these files as they are: nothing of the toolkit is included.
#pragma once

#define CHORD_DEVICE __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace chord {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kProducerWarps = kWarpgroup / kWarp;
constexpr u32 kFullMask = 0xFFFFFFFFu;

constexpr CHORD_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr CHORD_DEVICE int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr CHORD_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
CHORD_DEVICE int lowest_bit(u32 x) { return __ffs(x) - 1; }
CHORD_DEVICE int highest_bit(u32 x) { return 31 - __clz(x); }
// The same value, computed here once: the compiler may not work it out again inside a loop.
CHORD_DEVICE u32 kept(u32 x) {
  asm volatile("mov.u32 %0, %0;" : "+r"(x));
  return x;
}
// The same value, known to the compiler to be the same in the whole warp: it may live in a uniform register.
CHORD_DEVICE int uniform(int x) { return __shfl_sync(kFullMask, x, 0); }
CHORD_DEVICE int warp_sum(int x) { return __reduce_add_sync(kFullMask, x); }
CHORD_DEVICE int lane_id() { return threadIdx.x % kWarp; }
// The thread's place, worked out where it is asked for: a consumer has no register to keep it in during the main loop.
CHORD_DEVICE int own_warpgroup() { return uniform(kept(threadIdx.x) / kWarpgroup); }
CHORD_DEVICE int own_thread() { return kept(threadIdx.x) % kWarpgroup; }

// Shared memory is addressed by 32-bit offsets, as PTX does it.
CHORD_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

CHORD_DEVICE uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
CHORD_DEVICE uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// Programmatic dependent launch: wait until the kernel before has finished, then let the one after be scheduled.
// Both are no-ops in a launch without the attribute.
CHORD_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
CHORD_DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace chord
