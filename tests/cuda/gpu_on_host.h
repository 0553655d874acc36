// Enough of a GPU for the streaming kernels to run on a processor: a thread for each of theirs, barriers, and the
// instructions of common.cuh and memory.cuh by their definitions.
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <list>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __restrict__ __restrict

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline float __uint_as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }

struct bfloat16 {
  u16 bits;
  explicit bfloat16(float x) {
    u32 word = __float_as_uint(x);
    bits = x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fff;
  }
  explicit operator float() const { return __uint_as_float(u32(bits) << 16); }
};
#if defined SCALAR_F16
using scalar = _Float16;
using operand = _Float16;
#elif defined SCALAR_BF16
using scalar = bfloat16;
using operand = bfloat16;
#else
using scalar = float;
using operand = bfloat16;
#endif
using gate = std::conditional_t<sizeof(scalar) == 4, float, _Float16>;
inline void to_gate(float& to, float x) { to = x; }
inline void to_gate(_Float16& to, float x) { to = _Float16(std::fmin(std::fmax(x, -65504.0f), 65504.0f)); }
constexpr int PLANES = sizeof(scalar) == 4 ? 3 : 1;

inline float half_of(u32 word, int upper) {
  u16 bits = word >> 16 * upper;
  operand value{0.0f};
  std::memcpy(&value, &bits, 2);
  return float(value);
}
template <class S>
struct PairOf {
  S low, high;
  u32 next_plane() {
    operand rounded[2] = {operand(low), operand(high)};
    u32 pair;
    std::memcpy(&pair, rounded, 4);
    low -= float(rounded[0]), high -= float(rounded[1]);
    return pair;
  }
};

struct Index { unsigned x; };
inline thread_local Index threadIdx, blockIdx, gridDim;

struct Warp {
  std::barrier<> meet{32};
  u32 a[32][4], b[32][2];
};
struct Block {
  std::barrier<> meet;
  std::list<Warp> warps;
  std::vector<float> shared;
  Block(int threads, int shared_bytes) : meet(threads), warps(threads / 32), shared(shared_bytes / 4, NAN) {}
};
inline thread_local Block* block;
inline thread_local Warp* warp_of_thread;

inline void __syncthreads() { block->meet.arrive_and_wait(); }

inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& warp = *warp_of_thread;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  std::memcpy(warp.a[lane], a, 16);
  warp.b[lane][0] = b0, warp.b[lane][1] = b1;
  warp.meet.arrive_and_wait();
  for (int r = 0; r < 4; r++) {
    const int row = g + r / 2 * 8, column = 2 * t + r % 2;
    for (int k = 0; k < 16; k++) {
      const u32 left = warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], right = warp.b[column * 4 + k % 8 / 2][k / 8];
      c[r] += half_of(left, k % 2) * half_of(right, k % 2);
    }
  }
  warp.meet.arrive_and_wait();
}

inline uint4 load_once(const uint4* from) { return *from; }
inline uint4 load_exchanged(const uint4* from, bool valid) { return valid ? *from : uint4{}; }
inline void prefetch(const void*) {}
inline void signal(u32* counter) { std::atomic_ref(*counter).fetch_add(1, std::memory_order_release); }
inline void await(const u32* counter, u32 count) {
  while (std::atomic_ref(const_cast<u32&>(*counter)).load(std::memory_order_acquire) < count) std::this_thread::yield();
}

template <class... A, std::size_t... I>
void run_thread(void (*kernel)(A...), const i64* arguments, std::index_sequence<I...>) {
  kernel((A)(arguments[I])...);
}

// Runs all threads of all blocks at the same time; arguments are pointers and numbers, as 64 bits each.
template <class... A>
void launch(void (*kernel)(A...), int blocks, int threads, int shared_bytes, const i64* arguments) {
  std::list<Block> all;
  std::vector<std::thread> running;
  for (int b = 0; b < blocks; b++) {
    all.emplace_back(threads, shared_bytes);
    auto warp = all.back().warps.begin();
    for (int i = 0; i < threads; i++) {
      if (i > 0 && i % 32 == 0) warp++;
      running.emplace_back([=, home = &all.back(), mine = &*warp] {
        threadIdx = {unsigned(i)}, blockIdx = {unsigned(b)}, gridDim = {unsigned(blocks)};
        block = home, warp_of_thread = mine;
        run_thread(kernel, arguments, std::index_sequence_for<A...>{});
      });
    }
  }
  for (auto& thread : running) thread.join();
}
