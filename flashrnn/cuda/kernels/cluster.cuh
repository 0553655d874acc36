// Thread-block clusters (sm_90 and later): asynchronous stores to the shared memory of another block, and bulk copies
// from global memory. Both complete on an mbarrier.
#pragma once
#include "kernels/common.cuh"

DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

// Maps an address of this block's shared memory to the corresponding address in block `rank` of the cluster.
DEVICE u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Initialises an mbarrier whose phases complete after ARRIVALS arrivals. Its users must synchronise afterwards.
template <int ARRIVALS = 1>
DEVICE void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;"
               ::"r"(barrier), "n"(ARRIVALS) : "memory");
}
// Arrives once. The barrier's phase completes after the arrivals of several threads.
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once when all asynchronous copies of this thread have been made.
DEVICE void barrier_arrive_with_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Loads 16 bytes from the shared memory of another block.
DEVICE float4 load_remote(u32 remote) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
  return v;
}
// Arrives, and adds `bytes` to those that must be stored before the phase completes. Called by one thread.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the completion of the phase with this parity. Acquires in the scope of the block: send() stores to this
// block's shared memory, and an acquire in the scope of the cluster would also invalidate the L1 cache.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// Stores `v` asynchronously to another block's shared memory; completes on the mbarrier `remote_barrier` of that block.
DEVICE void send(u32 remote, uint4 v, u32 remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(remote), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier) : "memory");
}
DEVICE void send(u32 remote, uint2 v, u32 remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];"
               ::"r"(remote), "r"(v.x), "r"(v.y), "r"(remote_barrier) : "memory");
}

// Orders bulk copies after stores of other blocks to global memory that this thread has acquired.
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Copies `bytes` bytes, a multiple of 16, from global memory to this block's shared memory; completes on `barrier`.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
