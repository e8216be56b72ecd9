// The bandwidth floor that `chord bench` measures: every block reads its own range with bulk copies and drops it.
// STAGES copies of CHUNK bytes are in flight on each SM; thread 0 issues them and refills a stage when it has landed.

static __device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

extern "C" __constant__ unsigned chord_shared_bytes = STAGES * CHUNK;

// from: 16-byte aligned; chunks: how many CHUNKs each block reads.
extern "C" __global__ void __launch_bounds__(32) bulk_read(const char* from, unsigned long long chunks) {
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) unsigned long long landed[STAGES];
  if (threadIdx.x != 0) return;
  for (int stage = 0; stage < STAGES; stage++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&landed[stage])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

  const char* source = from + blockIdx.x * chunks * CHUNK;
  auto issue = [&](unsigned long long chunk, int stage) {
    const unsigned barrier = shared_address(&landed[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(CHUNK) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(ring + stage * CHUNK)),
        "l"(source + chunk * CHUNK), "n"(CHUNK), "r"(barrier)
        : "memory");
  };
  for (unsigned long long chunk = 0; chunk < STAGES && chunk < chunks; chunk++) issue(chunk, chunk);
  int stage = 0;
  unsigned parity = 0;
  for (unsigned long long chunk = 0; chunk < chunks; chunk++) {
    unsigned done = 0;
    while (!done)
      asm volatile(
          "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(shared_address(&landed[stage])), "r"(parity)
          : "memory");
    if (chunk + STAGES < chunks) issue(chunk + STAGES, stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}
