// Groups of blocks without distributed shared memory, or too many for it: they exchange through L2. All blocks of a
// launch run at once (a cooperative launch). Data tell themselves that they have arrived, so that an exchange is one way
// to L2 and one back, without flags and fences.
#pragma once
#include "kernels/common.cuh"

// A word that rounding never gives: two NaNs other than the one that conversions make.
constexpr u32 EMPTY = 0xffffffffu;

DEVICE void publish(uint4* to, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void peek(uint4& v, const uint4* from) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
}
DEVICE bool arrived(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

// Eight bytes that carry, in their lowest bit, whether the buffer that they stand in is used for the even or the odd
// time: what was there the time before cannot be taken for them. Eight bytes are stored and loaded at once.
DEVICE void publish_phase(u64* to, uint2 v, u32 phase) {
  u64 whole = u64(v.y) << 32 | (v.x & ~1u) | phase;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(whole) : "memory");
}
DEVICE void peek_phase(uint2& v, const u64* from) {
  u64 whole;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(whole) : "l"(from) : "memory");
  v = make_uint2(u32(whole), u32(whole >> 32));
}
DEVICE bool in_phase(uint2 v, u32 phase) { return (v.x & 1u) == phase; }

// How the blocks of a group begin together, in memory that holds anything: each has a word, into which it writes the
// number of the launch, which no other launch has.
template <int BLOCKS>
struct GridBarrier {
  u64* words;
  u64 launch;
  DEVICE GridBarrier(void* words_of_groups, u64 launch)
      : words(static_cast<u64*>(words_of_groups) + blockIdx.x / BLOCKS * BLOCKS), launch(launch) {}
  // What this block wrote before is there for whoever has waited.
  DEVICE void arrive() const {
    __syncthreads();
    u64* word = words + blockIdx.x % BLOCKS;
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(launch) : "memory");
  }
  DEVICE void wait() const {
    for (int i = threadIdx.x; i < BLOCKS; i += blockDim.x) {
      u64 word;
      do asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(words + i) : "memory");
      while (word != launch);
    }
  }
  // For a block that has heard from all others since. A CUDA graph launches with the same number again.
  DEVICE void reset() const {
    if (threadIdx.x == 0) words[blockIdx.x % BLOCKS] = ~launch;
  }
};
