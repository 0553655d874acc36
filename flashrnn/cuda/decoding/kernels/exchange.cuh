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
  // The same for marked results (below), without releasing them, which takes as long as two loads: after the wait they are likely
  // to be there.
  DEVICE void arrive_marked(int blocks = GRID) {
    sync();
    if (threadIdx.x == THREAD) count_up(counter);
    pass(blocks);
  }
  // Whether all other blocks have called this, and released what they wrote; `before` is in shared memory.
  DEVICE static bool is_last(u32* counter, u32& before) {
    sync();
    if (threadIdx.x == 0) before = signal_and_count(counter);
    sync();
    return before == GRID - 1;
  }
};

// Marked results tell by themselves whether they are new: the lowest bit of each float, or of each 16 bytes, is a mark that changes
// with every result that is written there.
DEVICE u32 with_mark(u32 word, u32 mark) { return word & ~1u | mark; }
DEVICE float with_mark(float x, u32 mark) { return __uint_as_float(with_mark(__float_as_uint(x), mark)); }
DEVICE float unmarked(float x) { return with_mark(x, 0); }

template <int K>
DEVICE void store_marked(float* to, const float (&v)[K], u32 mark) {
  static_assert(K <= 2);
  if constexpr (K == 1) store_exchanged(to, with_mark(v[0], mark));
  else store_exchanged(reinterpret_cast<float2*>(to), make_float2(with_mark(v[0], mark), with_mark(v[1], mark)));
}
// Stores numbers that lanes of a warp next to each other have, where they are `valid`, 16 bytes at a time; all call it. `to` is the
// place of the lane's own.
template <class S>
DEVICE void store_together(S* to, S number, bool valid, u32 mark) {
  constexpr int LANES = 16 / sizeof(S), OF_WORD = LANES / 4;
  u32 word;
  if constexpr (OF_WORD == 1) word = __float_as_uint(number);
  else word = pack(float(number), __shfl_down_sync(0xffffffffu, float(number), 1));
  auto next = [&](int k) { return __shfl_down_sync(0xffffffffu, word, k * OF_WORD); };
  const uint4 v = make_uint4(with_mark(word, mark), next(1), next(2), next(3));
  if (valid && threadIdx.x % LANES == 0) store_whole(reinterpret_cast<uint4*>(to), v);
}

// Loads 16 bytes from each place(k) until they have this mark, or each of their words with EACH; all lanes of a warp call it.
template <bool EACH, int K, class F>
DEVICE void load_marked(uint4 (&v)[K], u32 mark, F place) {
  u32 wrong;
  do {
#pragma unroll
    for (int k = 0; k < K; k++) v[k] = load_whole(reinterpret_cast<const uint4*>(place(k)));
    wrong = 0;
#pragma unroll
    for (int k = 0; k < K; k++) wrong |= EACH ? v[k].x ^ mark | v[k].y ^ mark | v[k].z ^ mark | v[k].w ^ mark : v[k].x ^ mark;
  } while (__any_sync(0xffffffffu, wrong & 1));
}
