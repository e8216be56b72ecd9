// indexed: rows stay where they are; sorted_ids lists, block by block, which rows an expert takes. These are the buffers
// of vLLM's moe_align_block_size, used unchanged: num_tokens_padded and the experts of blocks are read here.
//
//   sorted_ids   | 12  3 40  T  T  T  T  T | 7  9 11 13 17 21 22 23 | 30 31  T  T ...     T: padding, >= tokens * top_k
//   expert_ids   |            0            |           2            |          2    ...   -1: skip
//                                           `--- runs of one expert are merged, then cut into tiles ---'
//
// Row id / top_k of x is multiplied for routed index id, and row id of out is written: top_k fans tokens out in gate_up
// and is 1 in down, whose rows are routed already.
//
// `overlap`: weights and routing are older than the kernel before, so copies of weights need not wait for its end.
//
//   4 producer warps | scheduler -> bulk copies of weights, cp.async of rows (gather.cuh) --> full[stage]
//   kWarpgroups      | as in masked.cu
//   consumers        |
#include "chord/consumer.cuh"
#include "chord/gather.cuh"
#include "chord/registers.cuh"
#include "chord/rows.cuh"
#include "chord/scheduler.cuh"

using namespace chord;

extern "C" __global__ void __launch_bounds__(kThreads, kOccupancy)
    chord_indexed(const u16* __restrict__ x, const u8* __restrict__ w, const int* __restrict__ sorted_ids,
                  const int* __restrict__ expert_ids, const int* __restrict__ num_tokens_padded,
                  const float* __restrict__ topk_weights, u16* __restrict__ out, int experts, int num_ids, int top_k,
                  int block_size, int n, int k, int overlap) {
  extern __shared__ u8 raw[];
  Shared& shared = aligned_shared(raw);
  init_ring(shared, kResident ? 1 : 1 + kWarpgroup);
  if (!overlap || !streams_weights()) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }

  const RoutedRows rows = {sorted_ids, num_ids, top_k};
  if (own_warpgroup() == kWarpgroups) {
    give_registers();
    const int blocks = *num_tokens_padded / block_size;
    TileScheduler<RunSegments> scheduler(RunSegments(expert_ids, 1, blocks, block_size, experts), n);
    if constexpr (kResident > 0)
      produce_resident(shared, scheduler, rows, x, w, n, k);
    else
      produce_gathered(shared, scheduler, rows, x, w, n, k);
  } else {
    take_registers();
    Consumer<RoutedRows>{shared, rows, topk_weights, out, n, k}.run();
  }
}
