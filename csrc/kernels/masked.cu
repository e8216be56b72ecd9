// masked: every expert has max_m rows, of which the first masked_m[expert] are valid. Decode after a dispatch that leaves
// rows sorted by expert in a fixed layout. Rows beyond masked_m are neither computed nor written.
//
//                        one thread block a multiprocessor, all of them walking the same list of tiles
//
//   4 producer warps | scheduler -> bulk copies of weights, tensor-map copy of activations --> full[stage]
//                    |               ring of kStages stages in shared memory; runs ahead across tiles
//   kWarpgroups      | wait full -> dequantise to registers -> 4 wgmma -> ... --> empty[stage]
//   consumers        | after the last stage of a tile: sums -> staging -> rows of out
#include "chord/consumer.cuh"
#include "chord/producer.cuh"
#include "chord/registers.cuh"
#include "chord/rows.cuh"
#include "chord/scheduler.cuh"

using namespace chord;

extern "C" __global__ void __launch_bounds__(kThreads, kOccupancy)
    chord_masked(const __grid_constant__ TensorMap activations, const u8* __restrict__ w, const int* __restrict__ masked_m,
                 const float* __restrict__ row_weight, u16* __restrict__ out, int experts, int max_m, int n, int k) {
  extern __shared__ u8 raw[];
  Shared& shared = aligned_shared(raw);
  init_ring(shared, 1);
  wait_for_previous_kernel();
  allow_next_kernel();

  if (own_warpgroup() == kWarpgroups) {
    give_registers();
    TileScheduler<MaskedSegments> scheduler(MaskedSegments(masked_m, experts, max_m), n);
    produce_tiles(shared, scheduler, [](Tile&) {}, activations, w, n, k);
  } else {
    take_registers();
    Consumer<MaskedRows>{shared, {}, row_weight, out, n, k}.run();
  }
}
