// The weights that a thread block multiplies in a step, in the order in which it does: a stream of chunks through SLOTS
// slots of shared memory, ahead of the products.
//
// A chunk is a tile of eight rows of a matrix with at most WIDTH numbers each. Weights do not depend on other blocks,
// so the stream goes on while a block waits for others. A producer warp copies them: it issues the bulk copies of a
// chunk's rows one after the other, which takes about 500 cycles.
#pragma once
#include "decoding/kernels/rows.cuh"
#include "kernels/ring.cuh"
#include "kernels/vectors.cuh"

constexpr int THREADS = 32 * WARPS;  // threads that multiply; one more warpgroup has the warp that copies
constexpr int ALL_THREADS = THREADS + 128;
constexpr int LANE = 16 / BYTES;  // numbers that a lane loads at once
constexpr int VECTORS = WIDTH / VECTOR;
// A warp multiplies vectors k_slice(), k_slice() + K_SLICES, ... of each row: for few sequences by all of them, for
// many by a tile of 16.
constexpr int SEQ_TILES = (SEQS + 15) / 16;
constexpr int K_SLICES = WARPS / SEQ_TILES;
constexpr int WARP_VECTORS = (VECTORS + K_SLICES - 1) / K_SLICES;
constexpr int UNIT_TILES = WIDTH / 8;
constexpr int HIDDEN_TILES = HIDDEN / 8;
constexpr int CLASS_TILES = (CLASSES + 7) / 8;
constexpr int SLICES = HIDDEN / WIDTH;  // chunks of a tile of the matrix `down`
// INT8: the weights of linear layers (not R) are int8, and each row has a scale.
template <bool, int>
struct WeightOf { using type = scalar; using Words = uint4; };
template <>
struct WeightOf<true, 2> { using type = signed char; using Words = uint2; };
template <>
struct WeightOf<true, 4> { using type = signed char; using Words = u32; };
using weight = WeightOf<INT8, BYTES>::type;
using Words = WeightOf<INT8, BYTES>::Words;  // loaded by a lane at once
// Bytes between the rows of a slot, such that the lanes read from all banks.
constexpr int WEIGHT_STRIDE = WIDTH * sizeof(weight) + 4 * sizeof(Words), RECURRENT_STRIDE = D * BYTES + 64;
constexpr int SLOT_BYTES = 8 * (WEIGHT_STRIDE > RECURRENT_STRIDE ? WEIGHT_STRIDE : RECURRENT_STRIDE);
static_assert(D % VECTOR == 0 && HIDDEN % WIDTH == 0 && WARPS == 8);

// The columns of the table of addresses: the tensors of a residual block, as offsets in bytes from `base`.
enum Entry {
  MIXER_NORM, GATE_WEIGHT, RECURRENT_WEIGHT, BIAS, HEAD_NORM, MLP_NORM, UP, DOWN, STATE, GATE_SCALE, UP_SCALE,
  DOWN_SCALE, ENTRIES
};

// A compile-time integer that is passed as an argument.
template <int K>
struct Number {
  static constexpr int VALUE = K;
  DEVICE constexpr operator int() const { return K; }
};
// Calls f(Number<0>()), ..., f(Number<K - 1>()).
template <int K, class F>
DEVICE void each(F f) {
  if constexpr (K > 0) each<K - 1>(f), f(Number<K - 1>());
}

// The tensors of the model.
struct Model {
  const char* base;
  const i64* table;  // [BLOCKS, ENTRIES], in shared memory
  // Returns the address of a tensor of a residual block.
  template <class T = const scalar>
  DEVICE T* at(int block, Entry entry) const {
    return reinterpret_cast<T*>(const_cast<char*>(base) + table[block * ENTRIES + entry]);
  }
};

// Returns how many of the `tiles` tiles this block multiplies: first, first + step, ...
DEVICE int tiles_from(int first, int tiles, int step = GRID) {
  return first < tiles ? (tiles - 1 - first) / step + 1 : 0;
}
DEVICE int first_unit_tile() { return blockIdx.x; }
// A block multiplies its tiles of the matrix `down` (HIDDEN to WIDTH) with all slices of the hidden layer. The last
// blocks, which have no tile of units, come first. With MANY sequences, a block reads one slice, and shares tiles with
// its group of SLICES blocks.
constexpr int OUTPUT_STEP = MANY ? GRID / SLICES : GRID;
constexpr int OUTPUT_SLICES = MANY ? 1 : SLICES;
DEVICE int output_slice() { return MANY ? blockIdx.x % SLICES : 0; }
DEVICE int first_output_tile() {
  if constexpr (MANY) return blockIdx.x < OUTPUT_STEP * SLICES ? blockIdx.x / SLICES : UNIT_TILES;
  return GRID - 1 - blockIdx.x;
}

struct Vectors {  // the lane's part of a vector, for each sequence of a tile
  uint4 values[1][2];
};
using Operand = Vectors[WARP_VECTORS];  // of a product: the vectors of a warp
using Sums = float[1][1][4];            // of a warp: a tile of rows by a tile of sequences

DEVICE int k_slice() { return threadIdx.x / 32 % K_SLICES; }
DEVICE int seq_tile() { return threadIdx.x / 32 / K_SLICES; }

// Synchronises all threads that multiply.
DEVICE void sync_consumers() { named_barrier<THREADS>(1); }

using Slots = RingBarriers<SLOTS, 1, WARPS>;

// The producer: copies all chunks of this block, by eight lanes with one row each. A lane without a row skips a chunk,
// which can only be the last one: otherwise it could fall behind by two phases of a barrier, and wait for one that is
// over.
struct WeightProducer {
  const Model& model;
  const weight* head;
  u32 chunks, full, empty;  // shared-memory addresses
  RingPosition<SLOTS> pipe;

  DEVICE WeightProducer(const Model& model, const weight* head, void* chunks, Slots& slots)
      : model(model), head(head), chunks(shared_address(chunks)), full(shared_address(slots.full)),
        empty(shared_address(slots.empty)) {}
  DEVICE void run() {
    const int unit_chunks = tiles_from(first_unit_tile(), UNIT_TILES) * (GR + GI);
    const int up_chunks = unit_chunks + tiles_from(blockIdx.x, HIDDEN_TILES);
    const int of_block = up_chunks + tiles_from(first_output_tile(), UNIT_TILES, OUTPUT_STEP) * OUTPUT_SLICES;
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll 1
      for (int i = 0; i < of_block; i++) copy_of_block(block, i, unit_chunks, up_chunks);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < CLASS_TILES; tile += GRID)
      copy(head + i64(tile) * 8 * WIDTH, WIDTH, WIDTH, min(8, CLASSES - tile * 8));
  }
  // Copies chunk number i of a residual block.
  DEVICE void copy_of_block(int block, int i, int unit_chunks, int up_chunks) {
    if (i < unit_chunks) {
      const int unit = (first_unit_tile() + i / (GR + GI) * GRID) * 8, gate = i % (GR + GI);
      if (gate < GR) copy(model.at(block, RECURRENT_WEIGHT) + i64(gate * WIDTH + unit) * D, D, D, 8, RECURRENT_STRIDE);
      else copy(model.at<const weight>(block, GATE_WEIGHT) + i64((gate - GR) * WIDTH + unit) * WIDTH, WIDTH, WIDTH, 8);
    } else if (i < up_chunks) {
      const i64 row = (blockIdx.x + (i - unit_chunks) * GRID) * 8;
      copy(model.at<const weight>(block, UP) + row * WIDTH, WIDTH, WIDTH, 8);
    } else {
      const int tile = first_output_tile() + (i - up_chunks) / OUTPUT_SLICES * OUTPUT_STEP;
      const int slice = output_slice() + (i - up_chunks) % OUTPUT_SLICES;
      copy(model.at<const weight>(block, DOWN) + i64(tile) * 8 * HIDDEN + slice * WIDTH, HIDDEN, WIDTH, 8);
    }
  }
  // Copies `numbers` numbers of each of `rows` rows, from `first` on and `stride` apart, to rows that are slot_stride
  // bytes apart.
  template <class W>
  DEVICE void copy(const W* first, int stride, int numbers, int rows, int slot_stride = WEIGHT_STRIDE) {
    const int row = threadIdx.x % 32;
    if (row >= rows) return;
    barrier_wait(empty + 8 * pipe.slot, pipe.parity ^ 1);
    const u32 barrier = full + 8 * pipe.slot;
    if (row == 0) barrier_expect(barrier, rows * numbers * sizeof(W));
    copy_bulk(chunks + pipe.slot * SLOT_BYTES + row * slot_stride, first + i64(row) * stride, numbers * sizeof(W),
              barrier);
    pipe.next();
  }
};

// Converts weights to scalars.
DEVICE uint4 widened(uint4 words) { return words; }
// Converts four int8 to float.
DEVICE float4 floats(u32 word) {
  word ^= 0x80808080u;  // adds 128
  auto number = [&](int k) { return __uint_as_float(0x4b000000u | word >> 8 * k & 0xff) - (8388608.0f + 128); };
  return make_float4(number(0), number(1), number(2), number(3));
}
DEVICE uint4 widened(u32 word) {
  const float4 v = floats(word);
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}
DEVICE uint4 widened(uint2 words) {
  const float4 low = floats(words.x), high = floats(words.y);
  return make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
}

// The chunks from the view of a consumer, a warp that multiplies them.
struct Weights {
  u32 chunks, full, empty;  // shared-memory addresses
  RingPosition<SLOTS> pipe;

  DEVICE Weights(void* chunks, Slots& slots)
      : chunks(shared_address(chunks)), full(shared_address(slots.full)), empty(shared_address(slots.empty)) {}

  // Adds to sums(k) the product of the next chunk number k and the vectors operand(k, i), for K chunks, or for `count`
  // if that is less. All warps together multiply `vectors` vectors. W: what a lane loads at once; STRIDE: bytes between
  // the rows of a chunk.
  template <int K, class W = Words, int STRIDE = WEIGHT_STRIDE, class S, class O>
  DEVICE void multiply(S sums, O operand, int vectors, int count = K) {
    // The vectors of AT_ONCE chunks are loaded before any is multiplied, so that products of several chunks overlap.
    constexpr int VECTORS_AT_ONCE = WARP_VECTORS <= 4 ? WARP_VECTORS : 4;
    constexpr int AT_ONCE = K * VECTORS_AT_ONCE <= 16 && K <= SLOTS ? K : 1;
    const int lane = threadIdx.x % 32;
    each<K>([&](auto first) {
      if constexpr (first % AT_ONCE == 0) {
        RingPosition<SLOTS> pipes[AT_ONCE];
        UNROLL for (int i = 0; i < WARP_VECTORS; i += VECTORS_AT_ONCE) {
          W rows[AT_ONCE][VECTORS_AT_ONCE];
          each<AT_ONCE>([&](auto k) {
            if (first + k >= count || first + k >= K) return;
            if (i == 0) {
              pipes[k] = pipe, pipe.next();
              barrier_wait(full + 8 * pipes[k].slot, pipes[k].parity);
            }
            const u32 from = chunks + pipes[k].slot * SLOT_BYTES + lane / 4 * STRIDE + lane % 4 * sizeof(W);
            UNROLL for (int n = 0; n < VECTORS_AT_ONCE; n++)
              if (int vector = (i + n) * K_SLICES + k_slice(); i + n < WARP_VECTORS && vector < vectors)
                load_shared(rows[k][n], from + vector * 4 * sizeof(W));
          });
          UNROLL for (int n = 0; n < VECTORS_AT_ONCE; n++) {
            if (i + n >= WARP_VECTORS || (i + n) * K_SLICES + k_slice() >= vectors) break;
            each<AT_ONCE>([&](auto k) {
              constexpr Number<decltype(first)::VALUE + decltype(k)::VALUE> chunk;
              const uint4 row[1] = {widened(rows[k][n])};
              if constexpr (chunk < K)
                if (chunk < count) ::multiply(sums(chunk), operand(chunk, i + n).values, row);
            });
          }
        }
        // The products have waited for their operands. A bulk copy is not ordered after loads that have only been
        // issued.
        __syncwarp();
        each<AT_ONCE>([&](auto k) {
          if (lane == 0 && first + k < count && first + k < K) barrier_arrive(empty + 8 * pipes[k].slot);
        });
      }
    });
  }
};
