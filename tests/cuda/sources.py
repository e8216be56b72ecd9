"""Small kernels of the tests' own: a good one with headers, and one for each thing that makes a kernel slow."""

from __future__ import annotations

from pathlib import Path

SCALE = """\
#include "chord/factor.cuh"
extern "C" __global__ void scale(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= factor() * TIMES;
}
"""
FACTOR = '#pragma once\n#include "chord/two.cuh"\n__device__ inline float factor() { return TWO; }\n'
TWO = "#pragma once\n#define TWO 2.0f\n"

# One wgmma whose A registers are written between it and the wait: what ptxas serialises with note C7513.
SERIALISED = """\
extern "C" __global__ void __launch_bounds__(128) serialised(float* out, unsigned long long desc, int steps) {
  float d[4] = {};
  unsigned a = threadIdx.x;
  for (int i = 0; i < steps; i++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%4,%4,%4}, %5, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "l"(desc));
    a = a * 3 + __float_as_uint(d[0]);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
LOCAL = """\
extern "C" __global__ void local(float* x) {
  float kept[100];
  for (int i = 0; i < 100; i++) kept[i] = x[i];
  x[0] = kept[(int)x[3]];
}
"""
SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x, int n) {
  float kept[96];
  #pragma unroll
  for (int i = 0; i < 96; i++) kept[i] = x[i * 1024 + threadIdx.x];
  for (int j = 0; j < n; j++) {
    #pragma unroll
    for (int i = 0; i < 96; i++) kept[i] = kept[i] * kept[(i + 7) % 96] + x[j];
  }
  #pragma unroll
  for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = kept[i];
}
"""
SLOW = {"local": LOCAL, "spilling": SPILLING, "serialised": SERIALISED}


def write_sources(root: Path) -> None:
    """Lay the good kernel and its headers under ``root`` as csrc/ is laid."""
    for path, text in {"kernels/scale.cu": SCALE, "chord/factor.cuh": FACTOR, "chord/two.cuh": TWO}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
