// Global memory through which blocks of one launch, or of two, communicate while all of them run.
#pragma once
#include "kernels/common.cuh"

// Loads 16 bytes that are read once and never written, without allocating them in the L1 cache.
DEVICE uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
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

// Stores what other blocks load by load_exchanged while this may be under way.
DEVICE void store_exchanged(float* to, float v) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory"); }
DEVICE void store_exchanged(float2* to, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}
// The same of 16 bytes that are loaded by load_whole, all old or all new.
DEVICE void store_whole(uint4* to, uint4 v) {
  const u64 low = u64(v.y) << 32 | v.x, high = u64(v.w) << 32 | v.z;
  asm volatile("{.reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.gpu.global.b128 [%0], v;}" ::"l"(to), "l"(low), "l"(high) : "memory");
}
DEVICE uint4 load_whole(const uint4* from) {
  u64 low, high;
  asm volatile("{.reg .b128 v; ld.relaxed.gpu.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  return make_uint4(u32(low), u32(low >> 32), u32(high), u32(high >> 32));
}

// Adds x to a sum in memory that no other thread adds to, without waiting for the old sum.
DEVICE void add_to(float* sum, float x) { asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory"); }

// Brings what will be read a few steps later into the L2 cache.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Called by one thread of a block: releases what the block wrote before its last __syncthreads to those who await this.
DEVICE void signal(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }

// The same, without releasing anything.
DEVICE void count_up(u32* counter) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }

DEVICE void await(const u32* counter, u32 count) {
  u32 now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  while (now < count);
}

// Raises a number that other blocks raise too.
DEVICE void raise_to(u64* number, u64 at_least) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(number), "l"(at_least) : "memory");
}

// The same; acquires what those before have released, and returns how many these are.
DEVICE u32 signal_and_count(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Called by all threads of a block: whether all other blocks of the grid have called this, which releases what they wrote.
DEVICE bool last_of_grid(u32* counter) {
  __syncthreads();
  const u32 before = threadIdx.x == 0 ? signal_and_count(counter) : 0;
  return __syncthreads_or(threadIdx.x == 0 && before == gridDim.x - 1);
}

// Lets the dependent kernel, the next one in the stream, begin once all blocks of this one have called this.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// Waits for the end of the kernel that this one depends on.
DEVICE void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Invalidates the L1 cache, which may hold data from before others wrote.
DEVICE void forget_cached() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
