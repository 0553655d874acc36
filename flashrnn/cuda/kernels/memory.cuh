// Accesses to global memory through which concurrent blocks of one or two launches communicate.
#pragma once
#include "kernels/common.cuh"

// Loads 16 bytes that are read once and never written, without allocating them in the L1 cache.
DEVICE uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Loads 16 bytes that other blocks wrote, from the L2 cache; zeros if not `valid`.
DEVICE uint4 load_exchanged(const uint4* from, bool valid) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (valid)
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

// Stores values that other blocks may load concurrently by load_exchanged.
DEVICE void store_exchanged(float* to, float v) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}
DEVICE void store_exchanged(float2* to, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}
// Stores 16 bytes that load_b128 returns either all old or all new.
DEVICE void store_b128(uint4* to, uint4 v) {
  const u64 low = u64(v.y) << 32 | v.x, high = u64(v.w) << 32 | v.z;
  asm volatile("{.reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.gpu.global.b128 [%0], v;}"
               ::"l"(to), "l"(low), "l"(high) : "memory");
}
DEVICE uint4 load_b128(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v; ld.relaxed.gpu.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}"
               : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4(u32(low), u32(low >> 32), u32(high), u32(high >> 32));
}

// Adds x to a sum that only this thread modifies, without waiting for the old value.
DEVICE void add_to(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}

// Prefetches data of a later step into the L2 cache.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Increments the counter and releases the block's writes to the threads that await it. Called by one thread, after a
// __syncthreads that follows these writes.
DEVICE void signal(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }

// Increments the counter without releasing writes.
DEVICE void count_up(u32* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the counter has reached `count`; acquires what was released by signal().
DEVICE void await(const u32* counter, u32 count) {
  u32 now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  while (now < count);
}

// Returns the counter, without acquiring anything.
DEVICE u32 read_counter(const u32* counter) {
  u32 now;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter));
  return now;
}

// Raises a number to at least `at_least`. Other blocks may raise it concurrently.
DEVICE void raise_to(u64* number, u64 at_least) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(number), "l"(at_least) : "memory");
}

// Increments the counter as signal() does, acquires what earlier callers released, and returns their number.
DEVICE u32 signal_and_count(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Returns whether this is the last block of the grid to call this, which releases the writes of each block. All threads
// of the block call it.
DEVICE bool last_of_grid(u32* counter) {
  __syncthreads();
  const u32 before = threadIdx.x == 0 ? signal_and_count(counter) : 0;
  return __syncthreads_or(threadIdx.x == 0 && before == gridDim.x - 1);
}

// Allows the dependent kernel (the next in the stream) to begin once all blocks of this kernel have called this.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// Waits until the kernel that this one depends on has completed.
DEVICE void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Invalidates the L1 cache, which may hold data that other blocks have overwritten.
DEVICE void invalidate_l1() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
