// Exchange through L2 between all blocks of the grid, which are co-resident.
#pragma once
#include "decoding/kernels/weights.cuh"
#include "kernels/memory.cuh"

constexpr int UNIT_BLOCKS = UNIT_TILES < GRID ? UNIT_TILES : GRID;  // blocks that have tiles of units
// Cells that reduce over units exchange contributions within a step, so each block must have at most one tile of units.
static_assert(HEAD_EXCHANGES == 0 || UNIT_TILES <= GRID);

// A barrier of the grid by a counter. The counter is zero when the kernel starts, and must be reset when it ends.
struct CountingBarrier {
  static constexpr int THREAD = THREADS - 32;  // the thread that accesses memory; the first warps have more to do
  u32 *counter, expected = 0;
  DEVICE explicit CountingBarrier(u32* counter) : counter(counter) {}
  // Releases what the block has written, as one of `blocks` blocks whose results the next wait() is for. Each of these
  // blocks has waited for the previous arrivals. All threads that multiply call this.
  DEVICE void arrive(int blocks = GRID) {
    sync_consumers();
    if (threadIdx.x == THREAD) signal(counter);
    pass(blocks);
  }
  // Called instead of arrive() by blocks that are not among these.
  DEVICE void pass(int blocks) { expected += blocks; }
  // Waits for what these blocks wrote before they arrived last. All threads that multiply call this.
  DEVICE void wait() const {
    if (threadIdx.x == THREAD) wait_alone();
    sync_consumers();
  }
  // Waits in one thread.
  DEVICE void wait_alone() const { await(counter, expected); }
  // Like arrive(), for marked results (see below): does not release them, because that takes as long as two loads.
  // After the wait, they are likely to have arrived.
  DEVICE void arrive_marked(int blocks = GRID) {
    sync_consumers();
    if (threadIdx.x == THREAD) count_up(counter);
    pass(blocks);
  }
  // Returns whether this is the last block of the grid to call this, which releases what each block wrote. All threads
  // that multiply call it; `before` is in shared memory.
  DEVICE static bool is_last(u32* counter, u32& before) {
    sync_consumers();
    if (threadIdx.x == 0) before = signal_and_count(counter);
    sync_consumers();
    return before == GRID - 1;
  }
};

// Marked results show by themselves whether they are new. The lowest bit of each float, or of each 16 bytes, is a mark
// that changes with every result that is written to the same address.
DEVICE u32 with_mark(u32 word, u32 mark) { return word & ~1u | mark; }
DEVICE float with_mark(float x, u32 mark) { return __uint_as_float(with_mark(__float_as_uint(x), mark)); }
DEVICE float unmarked(float x) { return with_mark(x, 0); }

template <int K>
DEVICE void store_marked(float* to, const float (&v)[K], u32 mark) {
  static_assert(K <= 2);
  if constexpr (K == 1) store_exchanged(to, with_mark(v[0], mark));
  else store_exchanged(reinterpret_cast<float2*>(to), make_float2(with_mark(v[0], mark), with_mark(v[1], mark)));
}
// Stores the values of consecutive lanes 16 bytes at a time, with one mark per 16 bytes. `to` is the address of the
// lane's own value, which is stored if `valid`. All lanes of the warp call this.
template <class S>
DEVICE void store_together(S* to, S number, bool valid, u32 mark) {
  constexpr int LANES = 16 / sizeof(S), OF_WORD = LANES / 4;
  u32 word;
  if constexpr (OF_WORD == 1) word = __float_as_uint(number);
  else word = pack(float(number), __shfl_down_sync(0xffffffffu, float(number), 1));
  auto next = [&](int k) { return __shfl_down_sync(0xffffffffu, word, k * OF_WORD); };
  const uint4 v = make_uint4(with_mark(word, mark), next(1), next(2), next(3));
  if (valid && threadIdx.x % LANES == 0) store_b128(reinterpret_cast<uint4*>(to), v);
}

// Loads 16 bytes from each address place(k) until they have this mark, with EACH until each of their words has it. All
// lanes of the warp call this.
template <bool EACH, int K, class F>
DEVICE void load_marked(uint4 (&v)[K], u32 mark, F place) {
  u32 wrong;
  do {
    UNROLL for (int k = 0; k < K; k++) v[k] = load_b128(reinterpret_cast<const uint4*>(place(k)));
    wrong = 0;
    UNROLL for (int k = 0; k < K; k++)
      wrong |= EACH ? v[k].x ^ mark | v[k].y ^ mark | v[k].z ^ mark | v[k].w ^ mark : v[k].x ^ mark;
  } while (__any_sync(0xffffffffu, wrong & 1));
}
