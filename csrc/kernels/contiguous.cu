// contiguous: rows sorted by expert, every expert's run starting at a multiple of 128 rows; m_indices[row] is the expert,
// or -1 for a row to leave alone; a run's first row tells its expert. Prefill. Tiles are found here: the host knows none.
//
// The pipeline is that of masked.cu. Runs of 128-row blocks are cut into tiles; trailing -1 rows of a run are trimmed.
#include "chord/consumer.cuh"
#include "chord/producer.cuh"
#include "chord/registers.cuh"
#include "chord/rows.cuh"
#include "chord/scheduler.cuh"

using namespace chord;

constexpr int kRunRows = 128;

extern "C" __global__ void __launch_bounds__(kThreads, kOccupancy)
    chord_contiguous(const __grid_constant__ TensorMap activations, const u8* __restrict__ w,
                     const int* __restrict__ m_indices, const float* __restrict__ row_weight, u16* __restrict__ out,
                     int experts, int m, int n, int k) {
  extern __shared__ u8 raw[];
  Shared& shared = aligned_shared(raw);
  init_ring(shared, 1);
  wait_for_previous_kernel();
  allow_next_kernel();

  if (own_warpgroup() == kWarpgroups) {
    give_registers();
    TileScheduler<RunSegments> scheduler(RunSegments(m_indices, kRunRows, m / kRunRows, kRunRows, experts), n);
    auto trim = [=](Tile& tile) {
      int last = 0;
#pragma unroll
      for (int first = 0; first < kTokens; first += kWarp) {
        const int row = first + lane_id();
        const bool valid = row < tile.rows && m_indices[tile.row0 + row] == tile.expert;
        const u32 valid_lanes = __ballot_sync(kFullMask, valid);
        if (valid_lanes) last = first + highest_bit(valid_lanes) + 1;
      }
      tile.rows = last;
    };
    produce_tiles(shared, scheduler, trim, activations, w, n, k);
  } else {
    take_registers();
    Consumer<ContiguousRows>{shared, {m_indices}, row_weight, out, n, k}.run();
  }
}
