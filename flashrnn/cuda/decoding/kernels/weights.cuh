// The weights that a block of threads multiplies at a step, in the order in which it does: a stream of chunks through shared
// memory, SLOTS ahead of the products.
//
// A chunk is a tile of eight rows of a matrix and at most WIDTH numbers of each. Weights depend on no other block, so while a
// block waits at a barrier of the grid, the stream goes on. Each thread copies what it multiplies itself, and waits for nobody.
#pragma once
#include "kernels/vectors.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = HEADS * D;
constexpr int LANE = 16 / BYTES;  // numbers that a lane loads at once
constexpr int VECTORS = WIDTH / VECTOR;
constexpr int WARP_VECTORS = (VECTORS + WARPS - 1) / WARPS;
constexpr int UNIT_TILES = WIDTH / 8;
constexpr int HIDDEN_TILES = HIDDEN / 8;
constexpr int CLASS_TILES = (CLASSES + 7) / 8;
constexpr int SLICES = HIDDEN / WIDTH;  // chunks of a tile of the matrix from HIDDEN to WIDTH
static_assert(D % VECTOR == 0 && HIDDEN % WIDTH == 0);

// The columns of the table of addresses: tensors of a residual block, as bytes from one address.
enum Entry { MIXER_NORM, GATE_WEIGHT, RECURRENT_WEIGHT, BIAS, HEAD_NORM, MLP_NORM, UP, DOWN, STATE, ENTRIES };

struct Model {
  const char* base;
  const i64* table;  // [BLOCKS, ENTRIES]
  template <class T = const scalar>
  DEVICE T* at(int block, Entry entry) const {
    return reinterpret_cast<T*>(const_cast<char*>(base) + table[block * ENTRIES + entry]);
  }
};

// How many tiles of `tiles` this block multiplies: first, first + gridDim.x, ...
DEVICE int tiles_from(int first, int tiles) { return first < tiles ? (tiles - 1 - first) / int(gridDim.x) + 1 : 0; }
// Some blocks have no tile of units; they begin with those that the last ones have none of.
DEVICE int first_unit_tile() { return blockIdx.x; }
DEVICE int first_output_tile() { return gridDim.x - 1 - blockIdx.x; }

struct Weights {
  Model model;
  const scalar* head;
  u32 slots;                    // address of this thread's 16 bytes in the first slot
  int unit_chunks, up_chunks, of_block, head_chunks;
  int block = 0, chunk = 0;     // the next one to copy
  int copied = 0, taken = 0;    // slots

  DEVICE Weights(const Model& model, const scalar* head, uint4* fifo)
      : model(model), head(head), slots(shared_address(fifo + threadIdx.x)) {
    unit_chunks = tiles_from(first_unit_tile(), UNIT_TILES) * (GR + GI);
    up_chunks = unit_chunks + tiles_from(blockIdx.x, HIDDEN_TILES);
    of_block = up_chunks + tiles_from(first_output_tile(), UNIT_TILES) * SLICES;
    head_chunks = tiles_from(blockIdx.x, CLASS_TILES);
#pragma unroll 1
    for (int i = 0; i < SLOTS; i++) copy_next();
  }

  // Starts to copy the next chunk, if there is one, to the slot that was taken last.
  DEVICE void copy_next() {
    if (block < BLOCKS) {
      copy_of_block(chunk);
      if (++chunk == of_block) block++, chunk = 0;
    } else if (chunk < head_chunks) {
      const int row = (blockIdx.x + chunk++ * gridDim.x) * 8;
      copy(head + i64(row) * WIDTH, WIDTH, VECTORS, CLASSES - row);
    }
    copy_commit();
    copied = copied + 1 == SLOTS ? 0 : copied + 1;
  }
  DEVICE void copy_of_block(int i) {
    if (i < unit_chunks) {
      const int unit = (first_unit_tile() + i / (GR + GI) * gridDim.x) * 8, gate = i % (GR + GI);
      if (gate < GR) copy(model.at(block, RECURRENT_WEIGHT) + i64(gate * WIDTH + unit) * D, D, D / VECTOR, 8);
      else copy(model.at(block, GATE_WEIGHT) + i64((gate - GR) * WIDTH + unit) * WIDTH, WIDTH, VECTORS, 8);
    } else if (i < up_chunks) {
      const i64 row = (blockIdx.x + (i - unit_chunks) * gridDim.x) * 8;
      copy(model.at(block, UP) + row * WIDTH, WIDTH, VECTORS, 8);
    } else {
      const int tile = first_output_tile() + (i - up_chunks) / SLICES * gridDim.x, slice = (i - up_chunks) % SLICES;
      copy(model.at(block, DOWN) + i64(tile) * 8 * HIDDEN + slice * WIDTH, HIDDEN, VECTORS, 8);
    }
  }
  // Copies `vectors` vectors of each row from `first`, as far as there are rows.
  DEVICE void copy(const scalar* first, int stride, int vectors, int rows) {
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4;
    const scalar* from = first + (row < rows ? row : 0) * stride + warp * VECTOR + threadIdx.x % 4 * LANE;
#pragma unroll
    for (int i = 0; i < WARP_VECTORS; i++)
      if (i * WARPS + warp < vectors)
        copy_async<16>(slots + (copied * WARP_VECTORS + i) * THREADS * 16, from + i * WARPS * VECTOR, row < rows);
  }

  // c += vectors times the next chunk; operand[i] is the lane's part of the warp's vector i, of the chunk's `count` vectors.
  DEVICE void multiply_next(float (&c)[SEQ_TILES][1][4], const uint4 (&operand)[WARP_VECTORS][SEQ_TILES][2], int count) {
    copy_wait<SLOTS - 1>();
#pragma unroll
    for (int i = 0; i < WARP_VECTORS; i++) {
      if (i * WARPS + int(threadIdx.x / 32) >= count) break;
      const uint4 row[1] = {load_slot(i)};
      multiply(c, operand[i], row);
    }
    taken = taken + 1 == SLOTS ? 0 : taken + 1;
    copy_next();
  }
  DEVICE uint4 load_slot(int i) const { return load_shared(slots + (taken * WARP_VECTORS + i) * THREADS * 16); }
};
