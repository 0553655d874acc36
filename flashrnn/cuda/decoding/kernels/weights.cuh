// The weights that a block of threads multiplies at a step, in the order in which it does: a stream of chunks through shared
// memory, SLOTS ahead of the products.
//
// A chunk is a tile of eight rows of a matrix and at most WIDTH numbers of each. Weights depend on no other block, so the stream
// goes on while a block waits for others. Chunks are bulk copies: a queue of loads would delay what the block waits for. A warp
// issues bulk copies one after the other, so each warp copies one of the eight rows.
#pragma once
#include "decoding/kernels/rows.cuh"
#include "kernels/cluster.cuh"
#include "kernels/vectors.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int LANE = 16 / BYTES;  // numbers that a lane loads at once
constexpr int VECTORS = WIDTH / VECTOR;
constexpr int WARP_VECTORS = (VECTORS + WARPS - 1) / WARPS;
constexpr int UNIT_TILES = WIDTH / 8;
constexpr int HIDDEN_TILES = HIDDEN / 8;
constexpr int CLASS_TILES = (CLASSES + 7) / 8;
constexpr int SLICES = HIDDEN / WIDTH;  // chunks of a tile of the matrix from HIDDEN to WIDTH
constexpr int ROW_BYTES = WIDTH * BYTES + 64;  // of a slot: a quarter of a warp, two rows of four lanes, reads from all banks
constexpr int SLOT_BYTES = 8 * ROW_BYTES;
static_assert(D % VECTOR == 0 && HIDDEN % WIDTH == 0 && WARPS == 8);

// The columns of the table of addresses: tensors of a residual block, as bytes from one address.
enum Entry { MIXER_NORM, GATE_WEIGHT, RECURRENT_WEIGHT, BIAS, HEAD_NORM, MLP_NORM, UP, DOWN, STATE, ENTRIES };

template <int K>
struct Number {
  static constexpr int VALUE = K;
  DEVICE constexpr operator int() const { return K; }
};
// Calls f(Number<0>()), f(Number<1>()), ..., K times.
template <int K, class F>
DEVICE void each(F f) {
  if constexpr (K > 0) each<K - 1>(f), f(Number<K - 1>());
}

struct Model {
  const char* base;
  const i64* table;  // [BLOCKS, ENTRIES], in shared memory
  template <class T = const scalar>
  DEVICE T* at(int block, Entry entry) const {
    return reinterpret_cast<T*>(const_cast<char*>(base) + table[block * ENTRIES + entry]);
  }
};

// The tiles that this block multiplies, of `tiles`, are first, first + step, ...: how many there are.
DEVICE int tiles_from(int first, int tiles, int step = GRID) { return first < tiles ? (tiles - 1 - first) / step + 1 : 0; }
DEVICE int first_unit_tile() { return blockIdx.x; }
// Of the matrix from HIDDEN to WIDTH, a block multiplies its tiles with all slices of the hidden layer; the last blocks, which
// have no tile of units, begin. With MANY sequences it reads one slice, and has tiles of its group of SLICES blocks.
constexpr int OUTPUT_STEP = MANY ? GRID / SLICES : GRID;
constexpr int OUTPUT_SLICES = MANY ? 1 : SLICES;
DEVICE int output_slice() { return MANY ? blockIdx.x % SLICES : 0; }
DEVICE int first_output_tile() {
  if constexpr (MANY) return blockIdx.x < OUTPUT_STEP * SLICES ? blockIdx.x / SLICES : UNIT_TILES;
  return GRID - 1 - blockIdx.x;
}

using Operand = uint4[WARP_VECTORS][SEQ_TILES][2];  // of a product: the lane's part of the warp's vectors of each sequence
using Sums = float[SEQ_TILES][1][4];                // of a warp: a tile of rows by all sequences

struct Weights {
  Model model;
  const scalar* head;
  u32 slots, barriers;       // addresses; a barrier ends a phase when its slot has been filled
  int unit_chunks, up_chunks, of_block, head_chunks;
  int block = 0, chunk = 0;  // the next one to copy
  int free = 0, next = 0;    // slots: to copy to, to multiply
  int empty = SLOTS;         // slots whose chunks have been multiplied
  u32 parity = 0;            // of the phase of the slot to multiply

  // Called by all threads of the block, before a __syncthreads.
  DEVICE Weights(const Model& model, const scalar* head, void* slots_of_block, u64* barriers_of_block)
      : model(model), head(head), slots(shared_address(slots_of_block)), barriers(shared_address(barriers_of_block)) {
    unit_chunks = tiles_from(first_unit_tile(), UNIT_TILES) * (GR + GI);
    up_chunks = unit_chunks + tiles_from(blockIdx.x, HIDDEN_TILES);
    of_block = up_chunks + tiles_from(first_output_tile(), UNIT_TILES, OUTPUT_STEP) * OUTPUT_SLICES;
    head_chunks = tiles_from(blockIdx.x, CLASS_TILES);
    if (of_block == 0) block = BLOCKS;
    if (threadIdx.x == 0)
      for (int i = 0; i < SLOTS; i++) barrier_init(barriers + 8 * i);
  }

  // Starts to copy the next chunks, as far as there are any, to the slots whose chunks all threads have multiplied.
  DEVICE void refill() {
#pragma unroll 1
    for (; empty > 0; empty--) {
      if (block < BLOCKS) {
        copy_of_block(chunk);
        if (++chunk == of_block) block++, chunk = 0;
      } else if (chunk < head_chunks) {
        const int row = (blockIdx.x + chunk++ * GRID) * 8;
        copy(head + i64(row) * WIDTH, WIDTH, WIDTH, min(8, CLASSES - row));
      }
      free = free + 1 == SLOTS ? 0 : free + 1;
    }
  }
  DEVICE void copy_of_block(int i) {
    if (i < unit_chunks) {
      const int unit = (first_unit_tile() + i / (GR + GI) * GRID) * 8, gate = i % (GR + GI);
      if (gate < GR) copy(model.at(block, RECURRENT_WEIGHT) + i64(gate * WIDTH + unit) * D, D, D, 8);
      else copy(model.at(block, GATE_WEIGHT) + i64((gate - GR) * WIDTH + unit) * WIDTH, WIDTH, WIDTH, 8);
    } else if (i < up_chunks) {
      const i64 row = (blockIdx.x + (i - unit_chunks) * GRID) * 8;
      copy(model.at(block, UP) + row * WIDTH, WIDTH, WIDTH, 8);
    } else {
      const int tile = first_output_tile() + (i - up_chunks) / OUTPUT_SLICES * OUTPUT_STEP;
      const int slice = output_slice() + (i - up_chunks) % OUTPUT_SLICES;
      copy(model.at(block, DOWN) + i64(tile) * 8 * HIDDEN + slice * WIDTH, HIDDEN, WIDTH, 8);
    }
  }
  // Copies `numbers` numbers of each of `rows` rows from `first`.
  DEVICE void copy(const scalar* first, int stride, int numbers, int rows) {
    if (threadIdx.x % 32) return;
    const int row = threadIdx.x / 32;
    const u32 barrier = barriers + 8 * free;
    if (row == 0) barrier_expect(barrier, rows * numbers * BYTES);
    if (row < rows) copy_bulk(slots + free * SLOT_BYTES + row * ROW_BYTES, first + i64(row) * stride, numbers * BYTES, barrier);
  }

  // Adds to sums(k) the product of operand(k), of `vectors` vectors, and the next chunk number k, for K chunks or `count`, if
  // that is less.
  template <int K, class S, class O>
  DEVICE void multiply(S sums, O operand, int vectors, int count = K) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of AT_ONCE chunks the rows are loaded before any is multiplied, so that products of several chunks are under way.
    constexpr int AT_ONCE = K * WARP_VECTORS * SEQ_TILES <= 16 ? K : 1;
    each<K>([&](auto first) {
      if constexpr (first % AT_ONCE == 0) {
        uint4 rows[AT_ONCE][WARP_VECTORS];
        each<AT_ONCE>([&](auto k) {
          if (first + k < count && first + k < K) {
            barrier_wait(barriers + 8 * next, parity);
            const u32 from = slots + next * SLOT_BYTES + lane / 4 * ROW_BYTES + lane % 4 * 16;
#pragma unroll
            for (int i = 0; i < WARP_VECTORS; i++)
              if (i * WARPS + warp < vectors) rows[k][i] = load_shared(from + (i * WARPS + warp) * 64);
            if (++next == SLOTS) next = 0, parity ^= 1;
            empty++;
          }
        });
#pragma unroll
        for (int i = 0; i < WARP_VECTORS; i++) {
          if (i * WARPS + warp >= vectors) break;
          each<AT_ONCE>([&](auto k) {
            constexpr Number<decltype(first)::VALUE + decltype(k)::VALUE> chunk;
            const uint4 row[1] = {rows[k][i]};
            if constexpr (chunk < K)
              if (chunk < count) ::multiply(sums(chunk), operand(chunk)[i], row);
          });
        }
      }
    });
  }
};
