// Exchange through L2 between all blocks of the grid, which wait for each other at barriers.
#pragma once
#include "kernels/memory.cuh"

// A barrier of the grid. The counter is zero when the kernel starts, and again when it ends.
struct CountingBarrier {
  u32 *counter, expected = 0;
  DEVICE explicit CountingBarrier(u32* counter) : counter(counter) {}
  // Releases what the block has written.
  DEVICE void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) signal(counter);
    expected += GRID;
  }
  // Waits for what all blocks wrote before they arrived last.
  DEVICE void wait() const {
    if (threadIdx.x == 0) await(counter, expected);
    __syncthreads();
  }
};
