// Runs a CUDA kernel that uses no tensor cores on the CPU: every thread of a block is a fiber, blocks run one by one.
// Barriers and warp functions hand over to the next fiber until all that take part have come; a kernel in which one
// thread never comes hangs here as it would there.
#pragma once
#include <ucontext.h>

#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define asm if (false) __asm__  // PTX; tests replace the lines whose results matter

struct Dim {
  unsigned x, y, z;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static Dim threadIdx, blockIdx, gridDim, blockDim;

namespace host {
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
struct Barrier {
  int arrived = 0, generation = 0;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Barrier block_barrier, warp_barrier[32];
static unsigned deposited[32][32];
static std::function<void()> body;

inline void yield() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }
inline void arrive(Barrier& barrier, int all) {
  const int generation = barrier.generation;
  if (++barrier.arrived == all) {
    barrier.arrived = 0;
    barrier.generation++;
  } else {
    while (barrier.generation == generation) yield();
  }
}
// Every lane's value, once all 32 lanes have come.
template <class Read>
auto exchange(unsigned value, Read read) {
  const unsigned warp = threadIdx.x / 32;
  deposited[warp][threadIdx.x % 32] = value;
  arrive(warp_barrier[warp], 32);
  const auto result = read(deposited[warp]);
  arrive(warp_barrier[warp], 32);
  return result;
}
inline void enter() {
  body();
  fibers[threadIdx.x].done = true;
  yield();
}
inline void run_block(unsigned threads) {
  fibers.assign(threads, {});
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(64 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
  }
  for (unsigned running = threads; running;) {
    running = 0;
    for (unsigned thread = 0; thread < threads; thread++) {
      if (fibers[thread].done) continue;
      running++;
      threadIdx = {thread, 0, 0};
      swapcontext(&scheduler, &fibers[thread].context);
    }
  }
}
template <auto Kernel>
struct Launch;
template <class... Arguments, void (*Kernel)(Arguments...)>
struct Launch<Kernel> {
  static void run(unsigned blocks_x, unsigned blocks_y, unsigned threads, Arguments... arguments) {
    gridDim = {blocks_x, blocks_y, 1};
    blockDim = {threads, 1, 1};
    body = [=] { Kernel(arguments...); };
    for (unsigned y = 0; y < blocks_y; y++)
      for (unsigned x = 0; x < blocks_x; x++) {
        blockIdx = {x, y, 0};
        run_block(threads);
      }
  }
};
}  // namespace host

inline void __syncthreads() { host::arrive(host::block_barrier, static_cast<int>(blockDim.x)); }
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const unsigned lane = threadIdx.x % 32, from = lane >= static_cast<unsigned>(distance) ? lane - distance : lane;
  return static_cast<T>(host::exchange(static_cast<unsigned>(value), [=](const unsigned* all) { return all[from]; }));
}
template <class T>
T __shfl_down_sync(unsigned, T value, int distance) {
  const unsigned lane = threadIdx.x % 32, from = lane + distance < 32 ? lane + distance : lane;
  return static_cast<T>(host::exchange(static_cast<unsigned>(value), [=](const unsigned* all) { return all[from]; }));
}
inline int __reduce_add_sync(unsigned, int value) {
  return host::exchange(static_cast<unsigned>(value), [](const unsigned* all) {
    unsigned sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += all[lane];
    return static_cast<int>(sum);
  });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return static_cast<T>(host::exchange(static_cast<unsigned>(value), [=](const unsigned* all) { return all[lane]; }));
}
template <class T>
unsigned __match_any_sync(unsigned, T value) {
  const auto mine = static_cast<unsigned>(value);
  return host::exchange(mine, [=](const unsigned* all) {
    unsigned mask = 0;
    for (int lane = 0; lane < 32; lane++) mask |= static_cast<unsigned>(all[lane] == mine) << lane;
    return mask;
  });
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  return host::exchange(mine, [=](const unsigned* all) {
    unsigned mask = 0;
    for (int lane = 0; lane < 32; lane++) mask |= all[lane] << lane;
    return mask;
  });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// cvt.rn.bf16x2.f32: nearest, ties to even; finite values only.
inline unsigned host_bf16x2(float low, float high) {
  const auto round = [](float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  };
  return round(high) << 16 | round(low);
}
