// Exchange through L2 between all blocks of the grid, which wait for each other at barriers.
#pragma once
#include "decoding/kernels/weights.cuh"
#include "kernels/memory.cuh"

constexpr int UNIT_BLOCKS = UNIT_TILES < GRID ? UNIT_TILES : GRID;  // that have tiles of units
// A cell that reduces over units exchanges parts of its head's, and a block has one tile of them.
static_assert(HEAD_EXCHANGES == 0 || UNIT_TILES <= GRID);

// A barrier of the grid. The counter is zero when the kernel starts, and again when it ends.
struct CountingBarrier {
  static constexpr int THREAD = THREADS - 32;  // which waits for memory; the first warps have more to do
  u32 *counter, expected = 0;
  DEVICE explicit CountingBarrier(u32* counter) : counter(counter) {}
  // Releases what the block has written, as one of `blocks` whose results the next wait() is for; each of them has waited for
  // those before.
  DEVICE void arrive(int blocks = GRID) {
    sync();
    if (threadIdx.x == THREAD) signal(counter);
    pass(blocks);
  }
  // Called in place of arrive() by the other blocks.
  DEVICE void pass(int blocks) { expected += blocks; }
  // Waits for what all these blocks wrote before they arrived last.
  DEVICE void wait() const {
    if (threadIdx.x == THREAD) wait_alone();
    sync();
  }
  DEVICE void wait_alone() const { await(counter, expected); }
  // Whether all other blocks have called this, and released what they wrote; `before` is in shared memory.
  DEVICE static bool is_last(u32* counter, u32& before) {
    sync();
    if (threadIdx.x == 0) before = signal_and_count(counter);
    sync();
    return before == GRID - 1;
  }
};
