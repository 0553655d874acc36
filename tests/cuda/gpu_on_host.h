// Enough of a GPU for the kernels to run on a processor: a fiber for each of their threads, barriers of warps, blocks and
// clusters, and the instructions of common.cuh, memory.cuh, cluster.cuh, grid.cuh and warpgroup.cuh by their definitions.
// What is the same for all kernels is in gpu_on_host.cpp, which is compiled once.
//
// ThreadSanitizer sees the order that barriers make, and none that they do not: instructions of a whole warp, such as mma,
// exchange values and order nothing else. Copies without waiting happen at once or as late as they may, by chance.
#include "standard_library.h"

#define DEVICE inline
#define UNROLL
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using std::max;
using std::min;

#define CHECK(condition) ((condition) ? void() : fail(#condition))
[[noreturn]] void fail(const char* what);

// Numbers.

struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
inline u32 __float_as_uint(float x) { return same_bits<u32>(x); }
inline u32 __umulhi(u32 a, u32 b) { return u64(a) * b >> 32; }
inline u32 __byte_perm(u32 a, u32 b, u32 order) {
  u32 bytes = 0;
  for (int i = 0; i < 4; i++) bytes |= u32((u64(b) << 32 | a) >> (order >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return bytes;
}
template <class T>
inline T __ldg(const T* from) { return *from; }

struct __nv_bfloat16 {
  u16 bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    u32 word = __float_as_uint(x);
    bits = x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fff;
  }
  explicit operator float() const { return __uint_as_float(u32(bits) << 16); }
};
struct __half {
  u16 bits;
  __half() = default;
  explicit __half(float x) : bits(same_bits<u16>(_Float16(x))) {}
  explicit operator float() const { return same_bits<_Float16>(bits); }
};
inline __half __ushort_as_half(u16 bits) { return same_bits<__half>(bits); }

#if defined SCALAR_F16
using scalar = __half;
using operand = __half;
#elif defined SCALAR_BF16
using scalar = __nv_bfloat16;
using operand = __nv_bfloat16;
#elif defined SCALAR_SCALED
using scalar = float;
using operand = __half;
#else
using scalar = float;
using operand = __nv_bfloat16;
#endif
constexpr int BYTES = sizeof(scalar);
#ifdef SCALAR_SCALED
constexpr bool SCALED = true;
#else
constexpr bool SCALED = false;
#endif
#if defined SCALAR_TF32 || defined SCALAR_SCALED
constexpr int SPLITS = 2;
#else
constexpr int SPLITS = BYTES == 4 ? 3 : 1;
#endif
using gate = std::conditional_t<BYTES == 4, float, __half>;

template <class T>
inline u32 pair_of(float low, float high) { return T(low).bits | u32(T(high).bits) << 16; }
template <class T>
inline float2 both_of(u32 pair) { return {float(same_bits<T>(u16(pair))), float(same_bits<T>(u16(pair >> 16)))}; }
inline float finite(float x) { return std::fmin(std::fmax(x, -65504.0f), 65504.0f); }
inline u32 pack(float low, float high) { return pair_of<operand>(low, high); }
inline float2 unpack(u32 pair) { return both_of<operand>(pair); }
inline float2 unpack_halves(u32 pair) { return both_of<__half>(pair); }
inline float2 unpack_bfloats(u32 pair) { return both_of<__nv_bfloat16>(pair); }
inline u32 pack_gates(float low, float high) { return pair_of<__half>(finite(low), finite(high)); }
inline void to_gate(float& gate, float x) { gate = x; }
inline void to_gate(__half& gate, float x) { gate = __half(finite(x)); }

template <class S>
struct PairOf {
  u32 word;
  void round(float low, float high) { word = pack(low, high); }
  u32 next_split() const { return word; }
  void multiply(float) {}
  float magnitude() const { return 0; }
};
template <>
struct PairOf<float> {
  float low, high;
  void round(float new_low, float new_high) { low = new_low, high = new_high; }
  u32 next_split() {
    u32 word = pack(low, high);
    float2 rounded = unpack(word);
    low -= rounded.x, high -= rounded.y;
    return word;
  }
  void multiply(float factor) { low *= factor, high *= factor; }
  float magnitude() const { return max(std::fabs(low), std::fabs(high)); }
};
using Pair = PairOf<scalar>;
inline void transpose(PairOf<float>& a, PairOf<float>& b) { std::swap(a.high, b.low); }
template <class S>
inline void transpose(PairOf<S>& a, PairOf<S>& b) {
  u32 first = a.word, second = b.word;
  a.word = (first & 0xffff) | second << 16, b.word = first >> 16 | (second & 0xffff0000u);
}
inline void load(PairOf<float>& pair, const scalar* from) {
  auto* floats = reinterpret_cast<const float*>(from);
  pair = from ? PairOf<float>{floats[0], floats[1]} : PairOf<float>{};
}
template <class S>
inline void load(PairOf<S>& pair, const scalar* from) { pair.word = from ? *reinterpret_cast<const u32*>(from) : 0; }
template <class T>
inline void advance(T*& pointer, i64 bytes) { pointer = reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes); }
template <class T>
inline void asm_fence(T&) {}

// Threads, and what they wait for. They are fibers, which take turns where they wait and by chance, in the same order in
// every run. ThreadSanitizer takes them for threads.

struct Index { unsigned x; };
struct Copy {
  u32 to;
  const u32* from;
  int bytes;
};
struct WarpgroupProduct;
struct Fiber {
  void *of_sanitizer, *stack;
};
struct Thread {
  Index index, block_index, grid_size, block_size;
  u32 chance = 1;
  struct Group* group;
  struct Block* block;
  struct Warp* warp;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> committed;
  std::vector<WarpgroupProduct> open_products;
  std::deque<std::vector<WarpgroupProduct>> committed_products;

  std::function<void()> body;
  bool done = false;
  Fiber fiber;
  ucontext_t context;
  const void* awaited;
  Thread* next;  // in a list
};
extern Thread* self;  // the one that runs
#define threadIdx (self->index)
#define blockIdx (self->block_index)
#define gridDim (self->grid_size)
#define blockDim (self->block_size)

void start(Thread& one, std::function<void()> body);
void join(Thread& one);
void yield();
void sleep_until_woken(const void* word);
void wake(const void* word);
inline u32 draw() {
  u32& chance = self->chance;
  return chance ^= chance << 13, chance ^= chance >> 17, chance ^= chance << 5;
}
inline void dawdle() { if (draw() % 16 == 0) yield(); }

class Barrier {
  int arrived = 0, generation = 0;

 public:
  void wait(int threads, bool orders_memory = true);
};

struct Warp {
  Barrier meet;
  u32 words[32][6];
};
struct Block {
  char* shared;
  int bytes, rank;
  std::atomic<bool> any;  // of __syncthreads_or
  Barrier barriers[16];
  std::vector<Warp> warps;
  Block(int rank, int threads, int bytes);
  ~Block();
};
struct Group {  // that run together
  std::deque<Block> blocks;
  Block** by_rank;
  int threads;
  Barrier meet;
};

inline void __syncwarp() { self->warp->meet.wait(32); }
inline void __syncthreads() { dawdle(), self->block->barriers[0].wait(blockDim.x), dawdle(); }
inline bool __syncthreads_or(bool value) {
  if (threadIdx.x == 0) self->block->any = false;
  __syncthreads();
  if (value) self->block->any = true;
  __syncthreads();
  const bool any = self->block->any;
  __syncthreads();
  return any;
}
template <int THREADS>
inline void named_barrier(int id) {
  if constexpr (THREADS == 32) return __syncwarp();
  CHECK(id > 0 && id < 16);
  dawdle(), self->block->barriers[id].wait(THREADS), dawdle();
}

// Instructions of a whole warp.

UNSEEN inline void show(const u32* words, int count) {
  std::copy_n(words, count, self->warp->words[threadIdx.x % 32]);
  self->warp->meet.wait(32, false);
}
UNSEEN inline u32 of_lane(int lane, int word) { return self->warp->words[lane][word]; }
UNSEEN inline void seen() { self->warp->meet.wait(32, false); }

inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  show(words, 6);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int r = 0; r < 4; r++) {
    const int row = g + r / 2 * 8, column = 2 * t + r % 2;
    for (int k = 0; k < 16; k += 2) {
      const float2 left = unpack(of_lane(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2));
      const float2 right = unpack(of_lane(column * 4 + k % 8 / 2, 4 + k / 8));
      c[r] += left.x * right.x, c[r] += left.y * right.y;
    }
  }
  seen();
}
inline float2 sum_of_quads(float value) {
  const auto tf32 = [](float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000); };
  const u32 word = __float_as_uint(tf32(value) + tf32(value - tf32(value)));
  show(&word, 1);
  float sums[2] = {};
  for (int i = 0; i < 8; i++) sums[i / 4] += __uint_as_float(of_lane(threadIdx.x % 4 * 8 + i, 0));
  seen();
  return make_float2(sums[0], sums[1]);
}
template <class T>
inline T shuffled(T x, int from) {
  u32 words[sizeof(T) / 4];
  std::memcpy(words, &x, sizeof(T));
  show(words, sizeof(T) / 4);
  for (int i = 0; i < int(sizeof(T) / 4); i++) words[i] = of_lane(from, i);
  seen();
  std::memcpy(&x, words, sizeof(T));
  return x;
}
template <class T>
inline T __shfl_xor_sync(u32, T x, int mask) { return shuffled(x, threadIdx.x % 32 ^ mask); }
template <class T>
inline T __shfl_down_sync(u32, T x, int lanes) { return shuffled(x, std::min(int(threadIdx.x % 32) + lanes, 31)); }
inline u32 __reduce_max_sync(u32, u32 x) {
  for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}
inline u32 __ballot_sync(u32, u32 x) {
  show(&x, 1);
  u32 lanes = 0;
  for (int lane = 0; lane < 32; lane++) lanes |= u32(of_lane(lane, 0) != 0) << lane;
  seen();
  return lanes;
}
inline bool __any_sync(u32, u32 x) { return __ballot_sync(~0u, x) != 0; }

template <class T>
inline T __shfl_sync(u32, T x, int lane) { return shuffled(x, lane); }

inline float __shfl_sync(u32, float x, int lane) {
  const u32 word = __float_as_uint(x);
  show(&word, 1);
  const float other = __uint_as_float(of_lane(lane, 0));
  seen();
  return other;
}

// Shared memory: an address is the block's rank in its group, and how far from the beginning.

constexpr int RANK = 20;  // bits of an address below the rank
u32 shared_address(const void* p);
char* remote_memory(u32 address, int size);
char* own_memory(u32 address, int size);
template <class T>
inline T* remote(u32 address) { return reinterpret_cast<T*>(remote_memory(address, sizeof(T))); }
template <class T>
inline T* own(u32 address) { return reinterpret_cast<T*>(own_memory(address, sizeof(T))); }
inline void store_shared(u32 address, u32 word) { *own<u32>(address) = word; }
inline void store_shared(u32 address, uint2 words) { *own<uint2>(address) = words; }
inline void store_shared(u32 address, u16 half) { *own<u16>(address) = half; }
inline uint4 load_shared(u32 address) { return *own<uint4>(address); }
template <class W>
inline void load_shared(W& words, u32 address) { words = *own<W>(address); }
inline void store_fragment(u32 address, const u32 (&words)[4]) { *own<uint4>(address) = {words[0], words[1], words[2], words[3]}; }
inline void load_fragment(u32 (&words)[4], u32 address) {
  const uint4 v = *own<uint4>(address);
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}
inline void load_matrices(u32* r, int count, u32 address) {
  show(&address, 1);
  for (int i = 0; i < count; i++) {
    const uint4* row = own<uint4>(of_lane(i * 8 + threadIdx.x % 32 / 4, 0));
    r[i] = reinterpret_cast<const u32*>(row)[threadIdx.x % 4];
  }
  seen();
}
inline void load_four_matrices(u32 (&r)[4], u32 address) { load_matrices(r, 4, address); }
inline void load_four_transposed(u32 (&r)[4], u32 address) {
  show(&address, 1);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    u16 of[2];
    for (int k = 0; k < 2; k++) of[k] = reinterpret_cast<const u16*>(own<uint4>(of_lane(i * 8 + lane % 4 * 2 + k, 0)))[lane / 4];
    r[i] = of[0] | u32(of[1]) << 16;
  }
  seen();
}
inline void load_two_matrices(u32& r0, u32& r1, u32 address) {
  u32 r[2];
  load_matrices(r, 2, address);
  r0 = r[0], r1 = r[1];
}

void copy_now_or_later(const Copy& copy);
template <int SIZE>
inline void copy_async(u32 to, const void* from, bool valid) {
  CHECK(!valid || reinterpret_cast<u64>(from) % SIZE == 0);
  copy_now_or_later({to, valid ? static_cast<const u32*>(from) : nullptr, SIZE});
}
void copy_commit();
void copy_wait_until(int pending);
template <int PENDING>
inline void copy_wait() { copy_wait_until(PENDING); }

// Products of a warpgroup: each thread makes its own sums, as late as it may.

constexpr int BLOCK_COLUMNS = 64, BLOCK_ROW = 128;
inline int swizzled(int row, int vector) { return row * BLOCK_ROW + (vector ^ row % 8) * 16; }
struct Matrix {
  u32 address;
  int apart;
  float at(int row, int column) const {
    const u32 block = address + column / BLOCK_COLUMNS * apart, vector = column % BLOCK_COLUMNS / 8;
    CHECK(block % 1024 == 0);
    return float(own<operand>(block + swizzled(row, vector))[column % 8]);
  }
};
inline Matrix matrix(u32 address, int apart) { return {address, apart}; }
inline Matrix from_row(Matrix m, int row) { return {m.address + row * BLOCK_ROW, m.apart}; }

struct WarpgroupProduct {
  float* c;
  int count;
  Matrix a, b;
  bool adds;
  void perform() const {
    if (!adds) std::fill_n(c, count, 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (int i = 0; i < count; i++)
      for (int k = 0; k < 16; k++) c[i] += a.at(k, warp * 16 + lane / 4 + i % 4 / 2 * 8) * b.at(k, i / 4 * 8 + lane % 4 * 2 + i % 2);
  }
};
template <bool ADDS, int COUNT>
inline void warpgroup_mma(float (&c)[COUNT], Matrix a, Matrix b) { self->open_products.push_back({c, COUNT, a, b, ADDS}); }
inline void warpgroup_begin() {}
inline void warpgroup_commit() { self->committed_products.push_back(std::exchange(self->open_products, {})); }
template <int PENDING>
inline void warpgroup_wait() {
  for (; self->committed_products.size() > PENDING; self->committed_products.pop_front())
    for (const WarpgroupProduct& product : self->committed_products.front()) product.perform();
}
template <int COUNT>
inline void warpgroup_wait_for(float (&)[COUNT]) { warpgroup_wait<0>(); }
inline void fence_async_shared() {}

// Clusters.

inline u32 cluster_rank() { return self->block->rank; }
inline u32 remote_address(u32 address, u32 rank) { return CHECK(int(address >> RANK) == self->block->rank), rank << RANK | (address & ((1 << RANK) - 1)); }
inline void cluster_sync() { dawdle(), self->group->meet.wait(self->group->threads), dawdle(); }

inline float4 load_remote(u32 address) { return *remote<float4>(address); }

struct alignas(8) Phase {  // of an mbarrier
  int bytes;               // that are expected and not there, or there and not expected
  unsigned char pending, arrivals;  // until it ends; of each phase
  u16 number;                       // which phase it is
};
static_assert(std::atomic<Phase>::is_always_lock_free);
inline void change(u32 barrier, int arrivals, int bytes) {
  auto* phase = remote<std::atomic<Phase>>(barrier);
  Phase old = phase->load(std::memory_order_relaxed), now;
  do {
    CHECK(old.number != 0xffff && old.pending >= arrivals);
    now = {old.bytes + bytes, (unsigned char)(old.pending - arrivals), old.arrivals, old.number};
    CHECK(now.pending > 0 || now.bytes >= 0);
    if (now.pending == 0 && now.bytes == 0) now = {0, now.arrivals, now.arrivals, u16(now.number + 1)};
  } while (!phase->compare_exchange_weak(old, now, std::memory_order_release, std::memory_order_relaxed));
  if (now.number != old.number) wake(phase);
}
template <int ARRIVALS = 1>
inline void barrier_init(u32 barrier) {
  own<std::atomic<Phase>>(barrier)->store({0, ARRIVALS, ARRIVALS, 0}, std::memory_order_relaxed);
}
inline void barrier_arrive(u32 barrier) { dawdle(), own<u64>(barrier), change(barrier, 1, 0); }
void complete_copies();
inline void barrier_arrive_with_copies(u32 barrier) { complete_copies(), barrier_arrive(barrier); }
inline void barrier_expect(u32 barrier, u32 bytes) { dawdle(), own<u64>(barrier), change(barrier, 1, int(bytes)); }
inline void barrier_wait(u32 barrier, u32 parity) {
  auto* phase = own<std::atomic<Phase>>(barrier);
  while (phase->load(std::memory_order_acquire).number % 2 == parity) sleep_until_woken(phase);
}
template <class V>
inline void send(u32 to, V v, u32 barrier) {
  CHECK(to >> RANK == barrier >> RANK);
  dawdle(), *remote<V>(to) = v, change(barrier, 0, -int(sizeof(V)));
}

inline void fence_async_global() {}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  CHECK(bytes % 16 == 0 && to % 16 == 0 && reinterpret_cast<u64>(from) % 16 == 0);
  dawdle(), std::memcpy(&own<uint4>(to)->x, from, bytes), change(barrier, 0, -int(bytes));
}

// Memory of all blocks.

template <class T>
inline std::atomic<T>& shared_word(const void* p) { return *reinterpret_cast<std::atomic<T>*>(const_cast<void*>(p)); }
template <int REGISTERS>
inline void take_registers() {}
template <int REGISTERS>
inline void give_registers() {}
inline uint4 load_once(const uint4* from) { return *from; }
inline uint4 load_exchanged(const uint4* from, bool valid) { return valid ? *from : uint4{}; }
inline void add_to(float* sum, float x) { *sum += x; }
// What is loaded while it may be stored, by its words: of 16 bytes as a whole the first one tells, stored last.
inline void store_exchanged(float* to, float v) { dawdle(), shared_word<float>(to).store(v, std::memory_order_relaxed); }
inline void store_exchanged(float2* to, float2 v) { store_exchanged(&to->x, v.x), store_exchanged(&to->y, v.y); }
inline void store_b128(uint4* to, uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 3; i >= 0; i--) shared_word<u32>(reinterpret_cast<u32*>(to) + i).store(words[i], std::memory_order_release);
  dawdle();
}
inline uint4 load_b128(const uint4* from) {
  u32 words[4];
  dawdle();
  for (int i = 0; i < 4; i++) words[i] = shared_word<u32>(reinterpret_cast<const u32*>(from) + i).load(std::memory_order_acquire);
  return {words[0], words[1], words[2], words[3]};
}
inline void prefetch(const void*) {}
inline void signal(u32* counter) {
  shared_word<u32>(counter).fetch_add(1, std::memory_order_release);
  wake(counter);
}
inline void count_up(u32* counter) {
  shared_word<u32>(counter).fetch_add(1, std::memory_order_relaxed);
  wake(counter);
}
inline u32 read_counter(const u32* counter) {
  dawdle();
  return shared_word<u32>(counter).load(std::memory_order_relaxed);
}
inline void await(const u32* counter, u32 count) {
  while (shared_word<u32>(counter).load(std::memory_order_acquire) < count) sleep_until_woken(counter);
}

inline void raise_to(u64* number, u64 at_least) {
  auto& word = shared_word<u64>(number);
  for (u64 now = word.load(std::memory_order_relaxed); now < at_least && !word.compare_exchange_weak(now, at_least, std::memory_order_relaxed);) {}
}
inline u32 signal_and_count(u32* counter) { return shared_word<u32>(counter).fetch_add(1, std::memory_order_acq_rel); }
inline bool last_of_grid(u32* counter) {
  __syncthreads();
  return __syncthreads_or(threadIdx.x == 0 && signal_and_count(counter) == gridDim.x - 1);
}

inline std::atomic<int> primary_blocks{0};  // of the kernel before this one that are not done
inline void launch_dependents() {}
inline void wait_for_primary() {
  while (primary_blocks.load(std::memory_order_acquire)) sleep_until_woken(&primary_blocks);
}
inline void invalidate_l1() {}

constexpr u32 EMPTY = 0xffffffffu;
inline void publish(uint4* to, uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  dawdle();
  for (int i = 0; i < 4; i++) shared_word<u32>(reinterpret_cast<u32*>(to) + i).store(words[i], std::memory_order_relaxed);
}
inline void peek(uint4& v, const uint4* from) {
  u32 words[4];
  dawdle();
  for (int i = 0; i < 4; i++) words[i] = shared_word<u32>(reinterpret_cast<const u32*>(from) + i).load(std::memory_order_relaxed);
  v = {words[0], words[1], words[2], words[3]};
}
inline void peek(u32& v, const uint4* from) {
  dawdle();
  v = shared_word<u32>(reinterpret_cast<const u32*>(from)).load(std::memory_order_relaxed);
}
inline bool arrived(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
inline void publish_phase(u64* to, uint2 v, u32 phase) {
  dawdle(), shared_word<u64>(to).store(u64(v.y) << 32 | (v.x & ~1u) | phase, std::memory_order_relaxed);
}
inline void peek_phase(uint2& v, const u64* from) {
  dawdle();
  const u64 whole = shared_word<u64>(from).load(std::memory_order_relaxed);
  v = {u32(whole), u32(whole >> 32)};
}
inline bool in_phase(uint2 v, u32 phase) { return (v.x & 1u) == phase; }
template <int COUNT>
void publish_phase(u64* to, const uint2 (&v)[COUNT], u32 phase) {
  for (int i = 0; i < COUNT; i++) publish_phase(to + i, v[i], phase);
}
template <int COUNT>
void peek_phase(uint2 (&v)[COUNT], const u64* from) {
  for (int i = 0; i < COUNT; i++) peek_phase(v[i], from + i);
}
template <int COUNT>
bool in_phase(const uint2 (&v)[COUNT], u32 phase) {
  for (const uint2& one : v)
    if (!in_phase(one, phase)) return false;
  return true;
}
template <int BLOCKS>
struct GridBarrier {
  u64 *words_of_all, *words, launch;
  GridBarrier(void* words_of_groups, u64 launch)
      : words_of_all(static_cast<u64*>(words_of_groups)), words(words_of_all + blockIdx.x / BLOCKS * BLOCKS), launch(launch) {}
  void arrive() const {
    __syncthreads();
    if (threadIdx.x == 0) shared_word<u64>(words + blockIdx.x % BLOCKS).store(launch, std::memory_order_release);
  }
  void wait() const {
    for (int i = threadIdx.x; i < BLOCKS; i += blockDim.x)
      while (shared_word<u64>(words + i).load(std::memory_order_acquire) != launch) yield();
  }
  void reset() const {
    if (threadIdx.x == 0) shared_word<u64>(words + blockIdx.x % BLOCKS).store(~launch, std::memory_order_relaxed);
  }
};

// Launches.

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), const i64* arguments, std::index_sequence<I...>) {
  kernel((A)(arguments[I])...);
}
template <class... A>
void call(void (*kernel)(A...), const i64* arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}
// Arguments are pointers and numbers, as 64 bits each.
template <auto KERNEL>
void call_with(const i64* arguments) { call(KERNEL, arguments); }
