// Registers move from the producer warpgroup to the consumers, which hold the sums.
//
// Launches of T threads on a multiprocessor get 65536 / T registers a thread, rounded down to a multiple of 8, and setmaxnreg only deals
// those out again: consumers * theirs + the producer's must not exceed that pool, or the kernel hangs.
#pragma once
#include "chord/tile.cuh"

namespace chord {

constexpr int kThreads = kConsumers + kWarpgroup;
constexpr int kLaunchRegisters = smaller(65536 / kThreads / kOccupancy, 255) / 8 * 8;
constexpr int kProducerRegisters = CHORD_PRODUCER_REGISTERS;
constexpr int kConsumerRegisters =
    smaller(((kWarpgroups + 1) * kLaunchRegisters - kProducerRegisters) / kWarpgroups, 255) / 8 * 8;

CHORD_DEVICE void take_registers() {
  if constexpr (kConsumerRegisters > kLaunchRegisters)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
}
CHORD_DEVICE void give_registers() {
  if constexpr (kConsumerRegisters > kLaunchRegisters)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
}

}  // namespace chord
