// A time loop that streams R from L2 or memory at every step, for heads that do not fit on the chip; used in both
// directions.
//
// The work of a step is split into items: UNITS units of one head for SEQS sequences. An item is always computed by the
// same block. All blocks are co-resident (a cooperative launch); a block with several items processes them in turn. The
// items with the same head and sequences form a group. At every step, an item multiplies its ROWS rows of a matrix made
// of R by vectors of K numbers, which all items of its group wrote in the previous step. When it has written its own,
// it increments its group's counter.
//
// R is stored in the order in which it is multiplied, and is loaded directly into registers, DEPTH vectors of 64 bytes
// per row ahead. These loads do not depend on other blocks: while a block waits for its group, the first vectors of its
// next item are loaded.
#pragma once
#include "kernels/gates.cuh"
#include "kernels/math.cuh"
#include "kernels/memory.cuh"
#include "kernels/vectors.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int SEQS = 16 * SEQ_TILES;
constexpr int ROW_TILES = ROWS / 8;
constexpr int PADDED_K = WARPS * WARP_VECTORS * VECTOR;        // vectors are assigned to the warps in turn
constexpr int UNIT_BLOCKS = (D + UNITS - 1) / UNITS;           // items of a group
constexpr int CELLS = (SEQS * UNITS + THREADS - 1) / THREADS;  // cells of a thread: units of one sequence each
constexpr i64 ROW = i64(HEADS) * D;                            // units of all heads
constexpr int AHEAD = 4;                                       // steps between a prefetch and its use
constexpr int GATE_BYTES = GATES * sizeof(gate);               // of a unit
// The stride between rows of sums puts the accesses of half a warp, four rows of four pairs, into different banks.
constexpr int SUM_STRIDE = ROWS + (40 - ROWS % 32) % 32;
static_assert(ROWS % 8 == 0 && DEPTH <= WARP_VECTORS && PADDED_K >= K);
constexpr int PART_FLOATS = 4 * EXCHANGED_VECTORS;  // of an exchange over units, per sequence: reductions.cuh
constexpr int SUM_FLOATS = WARPS * SEQS * SUM_STRIDE, REDUCTION_FLOATS = PART_FLOATS * SEQS * (UNITS + 1);
static_assert((SUM_FLOATS + REDUCTION_FLOATS) * 4 == SHARED_BYTES_EXPECTED,
              "streaming/tiling.py counts shared memory differently");

// The gates of a unit at one step, as the forward stores them for the backward; aligned such that few, wide accesses
// suffice.
struct alignas((GATE_BYTES & -GATE_BYTES) < 16 ? GATE_BYTES & -GATE_BYTES : 16) UnitGates {
  gate values[GATES];
};

// The coordinates of an item.
struct Item {
  int head, unit0, counter;  // counter: index of the group's counter, each in its own cache line
  i64 sequence0, matrix;     // matrix: index of the item's first row, in units of 16 bytes
  DEVICE Item(int index) {
    int block = index % UNIT_BLOCKS, group = index / UNIT_BLOCKS;
    counter = group * 32, head = group % HEADS, sequence0 = i64(group / HEADS) * SEQS, unit0 = block * UNITS;
    matrix = i64(head * UNIT_BLOCKS + block) * (WARPS * WARP_VECTORS * ROW_TILES * 32);
  }
  DEVICE static int count(i64 B) { return int((B + SEQS - 1) / SEQS) * HEADS * UNIT_BLOCKS; }
};

// The coordinates of a cell (one unit of one sequence), number i < CELLS of a thread.
struct CellCoord {
  int row, column;  // unit and sequence within the item
  bool valid;
  i64 sequence, element;  // element: in [N, D]
  DEVICE CellCoord(const Item& item, int i, i64 B) {
    int cell = threadIdx.x + i * THREADS;
    row = cell % UNITS, column = cell / UNITS;
    sequence = item.sequence0 + column, element = item.head * D + item.unit0 + row;
    valid = cell < SEQS * UNITS && item.unit0 + row < D && sequence < B;
  }
  // Returns the row of the cell's sequence at step t in tensors [B, T, ...], of which batch and time may be swapped in
  // memory.
  DEVICE i64 row_at(const Params& params, i64 t) const { return sequence * params.row_b + t * params.row_t; }
  // Returns the index of the cell's value in part k of the vectors [HEADS, B, PADDED_K] that a group exchanges.
  DEVICE i64 exchanged(const Item& item, i64 B, int k) const {
    return (item.head * B + sequence) * PADDED_K + k * D + item.unit0 + row;
  }
};

// Calls f(i, cell) for each valid cell of the thread, number i < CELLS.
template <class F>
DEVICE void for_each_cell(const Item& item, i64 B, F f) {
  UNROLL for (int i = 0; i < CELLS; i++) {
    const CellCoord cell(item, i, B);
    if (cell.valid) f(i, cell);
  }
}

// The stream of R through the registers of a warp.
struct Stream {
  const uint4* R;  // the lane's first 16 bytes
  uint4 ahead[DEPTH][ROW_TILES];

  DEVICE Stream(const uint4* R_of_all, const Item& first) {
    R = R_of_all + threadIdx.x / 32 * ROW_TILES * 32 + threadIdx.x % 32;
    UNROLL for (int slot = 0; slot < DEPTH; slot++) load(slot, first, slot);
  }
  // Loads vector number k of the warp, for all rows of an item, into a slot.
  DEVICE void load(int slot, const Item& item, int k) {
    UNROLL for (int n = 0; n < ROW_TILES; n++)
      ahead[slot][n] = load_once(R + item.matrix + (k * WARPS * ROW_TILES + n) * 32);
  }

  // Computes this warp's partial sums of an item: rows of tile (m, n) of c are sequences, its columns rows of R.
  // `vectors` are those of the head; the first vectors of R for the `next` item are loaded at the end.
  DEVICE void product(float (&c)[SEQ_TILES][ROW_TILES][4], const Item& item, const Item& next, const scalar* vectors,
                      i64 B) {
    const int warp = threadIdx.x / 32, quad = threadIdx.x % 32 / 4, lane_in_quad = threadIdx.x % 4;
    const uint4* lane_vectors = reinterpret_cast<const uint4*>(vectors + (item.sequence0 + quad) * PADDED_K) +
        warp * 4 + lane_in_quad;
    uint4 v[DEPTH][SEQ_TILES][2];
    auto load_vectors = [&](int slot, int k) {
      UNROLL for (int m = 0; m < SEQ_TILES; m++)
        UNROLL for (int half = 0; half < 2; half++) {
          int sequence = m * 16 + half * 8;
          const uint4* from = lane_vectors + sequence * (PADDED_K / VECTOR * 4) + k * WARPS * 4;
          v[slot][m][half] = load_exchanged(from, item.sequence0 + sequence + quad < B);
        }
    };
    UNROLL for (int slot = 0; slot < DEPTH; slot++) load_vectors(slot, slot);
    UNROLL for (int m = 0; m < SEQ_TILES; m++)
      UNROLL for (int n = 0; n < ROW_TILES; n++)
        UNROLL for (int i = 0; i < 4; i++) c[m][n][i] = 0;
#pragma unroll 1
    for (int first = 0; first < WARP_VECTORS; first += DEPTH)
      UNROLL for (int slot = 0; slot < DEPTH; slot++) {
        const int k = first + slot, later = k + DEPTH;
        if (WARP_VECTORS % DEPTH != 0 && k >= WARP_VECTORS) break;
        multiply(c, v[slot], ahead[slot]);
        if (later < WARP_VECTORS) load_vectors(slot, later), load(slot, item, later);
        else load(slot, next, slot);
      }
  }
};

// Waits for the group's vectors of the previous step, and stores every warp's partial sums of the item in shared
// memory. All threads of the block call this; it synchronises before and after.
DEVICE void step_sums(float* sums, Stream& stream, const Params& params, const Item& item, const Item& next,
                      const scalar* vectors, u32 step) {
  const int warp = threadIdx.x / 32, quad = threadIdx.x % 32 / 4, lane_in_quad = threadIdx.x % 4;
  if (threadIdx.x == 0) await(params.counters + item.counter, step * UNIT_BLOCKS);
  __syncthreads();  // also: all threads have read the previous sums
  float c[SEQ_TILES][ROW_TILES][4];
  stream.product(c, item, next, vectors + item.head * params.B * PADDED_K, params.B);
  UNROLL for (int m = 0; m < SEQ_TILES; m++)
    UNROLL for (int half = 0; half < 2; half++)
      UNROLL for (int n = 0; n < ROW_TILES; n++) {
        float* to = sums + (warp * SEQS + m * 16 + half * 8 + quad) * SUM_STRIDE + n * 8 + 2 * lane_in_quad;
        *reinterpret_cast<float2*>(to) = make_float2(c[m][n][2 * half], c[m][n][2 * half + 1]);
      }
  __syncthreads();
}

// Returns the sum over the warps of row `row` of the item, for the cell's sequence.
DEVICE float sum_of(const float* sums, const CellCoord& cell, int row) {
  float sum = 0;
  UNROLL for (int warp = 0; warp < WARPS; warp++) sum += sums[(warp * SEQS + cell.column) * SUM_STRIDE + row];
  return sum;
}

// Stores the gradients d_g(j) of a cell's gates at step t, and adds them to those of the biases.
template <class Gradient, class P>  // Params of a backward
DEVICE void store_gate_gradients(const Gradient& d_g, const P& params, const CellCoord& cell, i64 t) {
  const i64 row = cell.row_at(params, t);
  UNROLL for (int j = 0; j < GATES; j++) {
    if (INPUT_OF[j] >= 0) params.d_x[(row * GI + INPUT_OF[j]) * ROW + cell.element] = scalar(d_g(j));
    else if (RECURRENT_OF[j] >= 0) params.d_u[(row * GU + RECURRENT_ONLY_OF[j]) * ROW + cell.element] = scalar(d_g(j));
    add_to(params.d_bias + (cell.sequence * GATES + j) * ROW + cell.element, d_g(j));
  }
}
