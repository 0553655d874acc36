// A ring of slots in shared memory, which some threads fill while others read them.
#pragma once
#include "kernels/cluster.cuh"

// The mbarriers of the slots: one phase of `full` ends after FILLING arrivals, when a slot has been filled; one of
// `empty` after READING arrivals, when it has been read.
template <int SLOTS, int FILLING, int READING>
struct alignas(8) RingBarriers {
  u64 full[SLOTS], empty[SLOTS];
  // Called by one thread. The users must synchronise afterwards.
  DEVICE void init() {
    for (int i = 0; i < SLOTS; i++)
      barrier_init<FILLING>(shared_address(full + i)), barrier_init<READING>(shared_address(empty + i));
  }
};
// A position in the ring, and the parity of the mbarriers there.
template <int SLOTS>
struct RingPosition {
  int slot = 0;
  u32 parity = 0;
  DEVICE void next() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};
