// The input product of a layer, computed chunk by chunk while the layer below computes its h: h [rows, K] times W^T,
// where W is [WIDTH, K]. With BACKWARD, the gradient of h of the layer below, computed while the layer computes the
// gradients of its gates [rows, K]: these times W, which is [K, WIDTH], from the last step to the first. A block
// computes COLUMNS of the WIDTH columns for all rows, ROWS at a time; its part of W stays in shared memory.
//
// A warp computes WARP_ROWS rows by WARP_COLUMNS columns. In each 32 columns of the product, column 2l + e of tile i
// holds column 8l + 2i + e of the result, so that a lane's sums of a row are eight neighbouring columns, which it
// stores at once.
#pragma once
#include "kernels/common.cuh"
#include "resident/kernels/layers.cuh"

constexpr int THREADS = 256, DEPTH = 64;  // DEPTH: elements along K of a stage
constexpr int WARP_COLUMNS = COLUMNS < 64 ? COLUMNS : 64, ROW_WARPS = THREADS / 32 / (COLUMNS / WARP_COLUMNS);
constexpr int WARP_ROWS = ROWS / ROW_WARPS, ROW_TILES = WARP_ROWS / 16, COLUMN_TILES = WARP_COLUMNS / 8;
constexpr int DEPTHS = (K + DEPTH - 1) / DEPTH;
// Bytes between columns of W, such that eight of them access different banks; with BACKWARD, between rows.
constexpr int PITCH = BACKWARD ? COLUMNS * 2 : DEPTHS * DEPTH * 2 + 16;
constexpr int WEIGHT_BYTES = (BACKWARD ? DEPTHS * DEPTH : COLUMNS) * PITCH, STAGE = ROWS * DEPTH * 2;
constexpr int VECTORS = DEPTH / 8, AT_ONCE = THREADS / VECTORS, COPIES = ROWS / AT_ONCE;  // copies of a thread
static_assert(BYTES == 2 && K % 8 == 0 && WIDTH % 8 == 0 && COLUMNS % 32 == 0 && WARP_ROWS % 16 == 0 &&
              ROWS % AT_ONCE == 0);
static_assert(WEIGHT_BYTES + STAGES * STAGE == SHARED_BYTES_EXPECTED);

// The rows of a chunk: LAYER_CHUNK steps of each sequence. Steps outside of the sequences do not exist.
struct Chunk {
  int first_step, B, T;  // first_step may be negative
  bool time_major;
  DEVICE Chunk(const Params& params, int number)
      : first_step(BACKWARD ? int(params.T) - (number + 1) * LAYER_CHUNK : number * LAYER_CHUNK), B(int(params.B)),
        T(int(params.T)),
        time_major(params.row_t != 1) {}
  DEVICE int rows() const { return B * LAYER_CHUNK; }
  // Returns the index of row r in memory, or a negative number if it does not exist.
  DEVICE i64 operator()(int r) const {
    const int step = first_step + (time_major ? r / B : r % LAYER_CHUNK);
    if (r >= rows() || step < 0 || step >= T) return -1;
    return time_major ? i64(first_step) * B + r : i64(r / LAYER_CHUNK) * T + step;
  }
};

// Returns the column of the product that holds column `column` of the block's result.
DEVICE int place_of(int column) { return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2; }

// BACKWARD: the swizzle of row k of W in shared memory. The 16-byte vector v is at position v ^ first_vector(k), so
// that the same vector of eight rows is in different banks.
DEVICE constexpr int first_vector(int k) {
  constexpr int IN_ROW = COLUMNS / 8;
  return IN_ROW < 8 ? k / (8 / IN_ROW) % IN_ROW : k % 8;
}

// Starts to copy the block's columns of W.
DEVICE void copy_weights(u32 to, const scalar* W) {
  if constexpr (BACKWARD) {
    for (int i = threadIdx.x; i < DEPTHS * DEPTH * COLUMNS / 2; i += THREADS) {
      const int row = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2, of_all = blockIdx.x * COLUMNS + column;
      const bool valid = of_all < WIDTH && row < K;
      const int place = place_of(column);
      copy_async<4>(to + row * PITCH + (place / 8 ^ first_vector(row)) * 16 + place % 8 * 2,
                    valid ? W + i64(row) * WIDTH + of_all : W, valid);
    }
    return;
  }
  for (int i = threadIdx.x; i < COLUMNS * DEPTHS * VECTORS; i += THREADS) {
    const int column = i / (DEPTHS * VECTORS), vector = i % (DEPTHS * VECTORS);
    const int of_all = blockIdx.x * COLUMNS + column;
    const bool valid = of_all < WIDTH && vector * 8 < K;
    copy_async<16>(to + place_of(column) * PITCH + vector * 16, valid ? W + i64(of_all) * K + vector * 8 : W, valid);
  }
}

// Returns the offset of a 16-byte vector in a stage: vector v of row r is at position v ^ r % 8 of the row.
DEVICE constexpr u32 in_stage(int row, int vector) { return row * (DEPTH * 2) + (vector ^ row % 8) * 16; }

// The source addresses of the rows that a thread copies.
struct Rows {
  const scalar* from[COPIES];  // null: zeros
  DEVICE Rows(const scalar* h, const Chunk& chunk, int first) {
    UNROLL for (int i = 0; i < COPIES; i++) {
      const i64 row = chunk(first + threadIdx.x / VECTORS + i * AT_ONCE);
      from[i] = row < 0 ? nullptr : h + row * K + threadIdx.x % VECTORS * 8;
    }
  }
  // Starts the copies of part number `depth` of K into a stage.
  DEVICE void copy(u32 stage, int depth) const {
    if (depth < DEPTHS) {
      const bool inside = K % DEPTH == 0 || depth * DEPTH + threadIdx.x % VECTORS * 8 < K;
      UNROLL for (int i = 0; i < COPIES; i++) {
        const int row = threadIdx.x / VECTORS + i * AT_ONCE;
        const bool valid = from[i] && inside;
        copy_async<16>(stage + in_stage(row, threadIdx.x % VECTORS), valid ? from[i] + depth * DEPTH : nullptr, valid);
      }
    }
    copy_commit();
  }
};

using Sums = float[ROW_TILES][COLUMN_TILES][4];

// Loads fragments of W: two tiles at once, for 16 columns from n on and 16 elements of K.
struct Weights {
  u32 first;   // address for the lane's column or, with BACKWARD, row
  u32 vector;  // BACKWARD: offset in the row
  DEVICE Weights(u32 shared, int own_column, int lane) {
    // For ldmatrix, lanes 8 to 15 pass the next eight elements of K, and lanes 16 to 31 the next eight columns.
    const int column = own_column + lane / 16 * 8, k = lane / 8 % 2 * 8, row = lane % 8;
    first = shared + (BACKWARD ? (k + row) * PITCH : (column + row) * PITCH + k * 2);
    vector = (column / 8 ^ first_vector(row)) * 16;
  }
  DEVICE void load(u32 (&b)[4], int n, int k) const {
    if constexpr (BACKWARD) load_four_transposed(b, first + k * PITCH + (vector ^ n * 2));
    else load_four_matrices(b, first + n * PITCH + k * 2);
  }
};

// Adds the products of a stage, which holds the part of K from `depth` on.
DEVICE void add_products(Sums& c, u32 stage, const Weights& weights, int depth, int first_row) {
  const int lane = threadIdx.x % 32;
  UNROLL for (int k = 0; k < DEPTH / 16; k++) {
    u32 a[ROW_TILES][4];
    UNROLL for (int m = 0; m < ROW_TILES; m++)
      load_four_matrices(a[m], stage + in_stage(first_row + m * 16 + lane % 16, k * 2 + lane / 16));
    UNROLL for (int n = 0; n < COLUMN_TILES; n += 2) {
      u32 b[4];
      weights.load(b, n * 8, depth + k * 16);
      UNROLL for (int m = 0; m < ROW_TILES; m++) mma(c[m][n], a[m], b[0], b[1]), mma(c[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

// Rounds and stores the warp's sums, except for rows and columns that do not exist.
DEVICE void store_sums(const Sums& c, scalar* product, const Chunk& chunk, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
  UNROLL for (int m = 0; m < ROW_TILES; m++)
    UNROLL for (int half = 0; half < 2; half++) {
      const i64 row = chunk(first_row + m * 16 + half * 8 + lane / 4);
      UNROLL for (int n = 0; n < COLUMN_TILES; n += 4) {
        const int column = first_column + n * 8 + lane % 4 * 8;
        if (row < 0 || column >= WIDTH) continue;
        u32 pairs[4];
        UNROLL for (int i = 0; i < 4; i++) pairs[i] = pack(c[m][n + i][2 * half], c[m][n + i][2 * half + 1]);
        *reinterpret_cast<uint4*>(product + row * WIDTH + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
}

// Computes ROWS rows of a chunk, from `first` on.
DEVICE void multiply_rows(const Params& params, const Chunk& chunk, int first, u32 shared_weights, u32 stages) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own_row = warp % ROW_WARPS * WARP_ROWS, own_column = warp / ROW_WARPS * WARP_COLUMNS;
  const Weights weights(shared_weights, own_column, lane);
  const Rows rows(params.rows, chunk, first);
  Sums c = {};
  UNROLL for (int depth = 0; depth < STAGES - 1; depth++) rows.copy(stages + depth * STAGE, depth);
  for (int depth = 0, stage = 0; depth < DEPTHS; depth++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    rows.copy(stages + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE, depth + STAGES - 1);
    add_products(c, stages + stage * STAGE, weights, depth * DEPTH, own_row);
  }
  store_sums(c, params.product, chunk, first + own_row, blockIdx.x * COLUMNS + own_column);
  __syncthreads();  // before the next rows overwrite the stages
}

// Params: types and shapes are in input_product.py. rows, W -> product. Batch and time of the rows and of the product
// may be swapped in memory: consecutive steps are row_t rows apart. Each of `producers` blocks increments the word in
// `arrived` of each chunk of the rows after storing it; each block of this kernel does the same in `done`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_input_product(PARAMETERS) {
  launch_dependents();
  extern __shared__ __align__(128) char memory[];
  const Params params{PARAMETER_NAMES};
  const u32 weights = shared_address(memory), stages = weights + WEIGHT_BYTES;
  copy_weights(weights, params.W);
  copy_commit();
  for (int number = 0; number * LAYER_CHUNK < params.T; number++) {
    const Chunk chunk(params, number);
    await_chunk(params.arrived, number, params.producers);
    for (int first = 0; first < chunk.rows(); first += ROWS) multiply_rows(params, chunk, first, weights, stages);
    count_chunk(params.done, number, threadIdx.x == 0);
  }
  wait_for_primary();  // so that all earlier kernels have completed when this one has
}
