// Exchange through L2 between all blocks of the grid, which wait for each other at barriers.
#pragma once
#include "kernels/memory.cuh"

// A barrier of the grid. The counter is zero when the kernel starts, and again when it ends.
struct CountingBarrier {
  u32 *counter, expected = 0;
  DEVICE explicit CountingBarrier(u32* counter) : counter(counter) {}
  // Releases what the block has written, as one of `blocks` whose results the next wait() is for; each of them has waited for
  // those before.
  DEVICE void arrive(int blocks = GRID) {
    __syncthreads();
    if (threadIdx.x == 0) signal(counter);
    pass(blocks);
  }
  // Called in place of arrive() by the other blocks.
  DEVICE void pass(int blocks) { expected += blocks; }
  // Waits for what all these blocks wrote before they arrived last.
  DEVICE void wait() const {
    if (threadIdx.x == 0) await(counter, expected);
    __syncthreads();
  }
};
