// gather: rows of tokens to where their expert expects them, for layouts whose rows must be sorted (contiguous, masked).
// Rows that belong to no token are left as they are: the GEMMs read them at most beside valid rows, never into them.
#include "chord/base.cuh"

using namespace chord;

constexpr int kThreads = 256;

extern "C" __constant__ unsigned chord_gather_threads = kThreads;

// x [tokens, columns], routed [rows] (token * top_k + choice, anything else for none), out [rows, columns]; a block a row.
extern "C" __global__ void __launch_bounds__(kThreads)
    chord_gather(const uint4* __restrict__ x, const int* __restrict__ routed, uint4* __restrict__ out, int choices,
                 int top_k, int columns) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int id = routed[blockIdx.x];
  if (u32(id) >= u32(choices)) return;
  const int chunks = columns / 8;  // 16 bytes each
  const uint4* const from = x + i64(id / top_k) * chunks;
  uint4* const to = out + i64(blockIdx.x) * chunks;
  for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) to[chunk] = from[chunk];
}
