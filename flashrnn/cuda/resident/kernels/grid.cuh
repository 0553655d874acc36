// Exchange through L2 between the blocks of a cooperative group. All blocks of a launch are co-resident (a cooperative
// launch). As in NCCL's low-latency protocol, the value of each word shows whether it has arrived. So an exchange is
// one store to L2 and one load from there, without flags and fences.
#pragma once
#include "kernels/common.cuh"

// A word that no rounding produces: a pair of NaNs other than the canonical one, which conversions return.
constexpr u32 EMPTY = 0xffffffffu;

// Stores 16 bytes that other blocks poll.
DEVICE void publish(uint4* to, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1,%2,%3,%4};"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Loads 16 bytes, or their first word, from L2. They may not have arrived.
DEVICE void peek(uint4& v, const uint4* from) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
}
DEVICE void peek(u32& v, const uint4* from) {
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
}
DEVICE bool arrived(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

// Words of eight bytes that are stored and loaded in one access. The lowest bit is the phase: the parity of how often
// the buffer has been used, which tells new data from that of the previous use. Only eight bytes are guaranteed to
// arrive at once, so a pair of words in one access has a phase in each.
DEVICE void publish_phase(u64* to, uint2 v, u32 phase) {
  u64 whole = u64(v.y) << 32 | (v.x & ~1u) | phase;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(whole) : "memory");
}
DEVICE void publish_phase(u64* to, const uint2 (&v)[1], u32 phase) { publish_phase(to, v[0], phase); }
DEVICE void publish_phase(u64* to, const uint2 (&v)[2], u32 phase) {
  const u64 first = u64(v[0].y) << 32 | (v[0].x & ~1u) | phase, second = u64(v[1].y) << 32 | (v[1].x & ~1u) | phase;
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
DEVICE void peek_phase(uint2& v, const u64* from) {
  u64 whole;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(whole) : "l"(from) : "memory");
  v = make_uint2(u32(whole), u32(whole >> 32));
}
DEVICE void peek_phase(uint2 (&v)[1], const u64* from) { peek_phase(v[0], from); }
DEVICE void peek_phase(uint2 (&v)[2], const u64* from) {
  u64 first, second;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
  v[0] = make_uint2(u32(first), u32(first >> 32)), v[1] = make_uint2(u32(second), u32(second >> 32));
}
DEVICE bool in_phase(uint2 v, u32 phase) { return (v.x & 1u) == phase; }
DEVICE bool in_phase(const uint2 (&v)[1], u32 phase) { return in_phase(v[0], phase); }
DEVICE bool in_phase(const uint2 (&v)[2], u32 phase) { return in_phase(v[0], phase) && in_phase(v[1], phase); }

// A barrier of the blocks of a group, used once per launch. Its memory needs no initialisation: each block writes the
// unique number of the launch into its word.
template <int BLOCKS>
struct GridBarrier {
  u64* words_of_all;  // of all groups
  u64* words;
  u64 launch;
  DEVICE GridBarrier(void* words_of_groups, u64 launch)
      : words_of_all(static_cast<u64*>(words_of_groups)), words(words_of_all + blockIdx.x / BLOCKS * BLOCKS),
        launch(launch) {}
  // Releases this block's earlier writes to the blocks that wait. All threads of the block call this.
  DEVICE void arrive() const {
    __syncthreads();
    u64* word = words + blockIdx.x % BLOCKS;
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(launch) : "memory");
  }
  // Waits until all blocks of the group have arrived. All threads call this, and synchronise afterwards.
  DEVICE void wait() const {
    for (int i = threadIdx.x; i < BLOCKS; i += blockDim.x) {
      u64 word;
      do asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(words + i) : "memory");
      while (word != launch);
    }
  }
  // Must be called after data of all other blocks have arrived. Needed because a CUDA graph relaunches with the same
  // number.
  DEVICE void reset() const {
    if (threadIdx.x == 0) words[blockIdx.x % BLOCKS] = ~launch;
  }
};
