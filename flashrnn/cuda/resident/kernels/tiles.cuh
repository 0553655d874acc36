// How one head is distributed over warps and blocks, and the tiles that forward and backward share.
//
// A group of BLOCKS blocks runs one head for a tile of SEQS sequences: one block, a cluster or, with GRID, a cooperative group
// of blocks anywhere on the GPU. A block owns UNIT_TILES tiles of 16 units; K_SLICES warps work on a tile, each on its slice
// of the product's inner axis (slice-K). In the products, row i of a 16-row fragment is unit 2i of its tile and row i + 8 is
// unit 2i + 1. So the lane with quad i (lane / 4) and lane_in_quad j (lane % 4) holds units 2i, 2i + 1 of sequences 2j, 2j + 1.
// A "cell" is one such unit of one sequence: cell q of a lane is unit 2i + q % 2 of sequence 8 (q / 4) + 2j + q / 2 % 2. If one block
// has no more than half of SEQS sequences, they are the even ones (SPREAD), so that a lane has half as many cells.
#pragma once
#include "kernels/cluster.cuh"
#include "resident/kernels/grid.cuh"
#include "kernels/math.cuh"

constexpr bool CLUSTERED = BLOCKS > 1 && !GRID;
constexpr int SEQS = 8 * BATCH_TILES;               // of which SEQUENCES are used: the others are not exchanged
constexpr int UNITS = 16 * UNIT_TILES;              // of a block
constexpr int PADDED = UNITS * BLOCKS;              // of a head, D of them real
constexpr int WARPS = UNIT_TILES * K_SLICES;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_THREADS = 32 * K_SLICES;         // threads that work on one unit tile
constexpr int SPREAD = BLOCKS == 1 && SEQUENCES <= SEQS / 2 ? 2 : 1;
constexpr int LANE_CELLS = 4 * BATCH_TILES / SPREAD;  // cells in a lane's fragment
constexpr int CELL_SLICES = K_SLICES < LANE_CELLS ? K_SLICES : LANE_CELLS;  // warps of a tile that compute its cells
constexpr int CELLS = LANE_CELLS / CELL_SLICES;     // cells whose element-wise step a lane of these computes
constexpr i64 ROW = i64(HEADS) * D;                         // units of all heads
constexpr int BARRIER_BYTES = 64;                           // of the mbarriers for a cluster's exchange
static_assert(SEQUENCES % 2 == 0 && SEQUENCES <= SEQS && PADDED >= D);
static_assert(LANE_CELLS % CELL_SLICES == 0 && (CELLS == 1 || CELLS % 2 == 0));

// Bytes from one time step to the next in each tensor. They are arguments of the kernels because the loop does not recompute
// what is in constant memory.
struct StepStrides {
  i64 x, h, aux, gates, wide;
};

// Return the tile of eight sequences that a cell is in, and whether it is of the second of the lane's two there.
DEVICE constexpr int tile_of(int cell) { return cell / (4 / SPREAD); }
DEVICE constexpr int second_of(int cell) { return SPREAD == 1 ? cell / 2 % 2 : 0; }

// The coordinates of a thread.
struct ThreadCoord {
  int warp, lane, quad, lane_in_quad, unit_tile, k_slice, tile_thread;
  int rank;  // of the block in its group
  i64 head;
  int batch_tile, sequence0, sequences;  // its first sequence and, in the last tile, how many there are
  int tile_unit;                         // first unit of the unit tile, in the head
  DEVICE ThreadCoord(i64 first_group, i64 B) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, lane_in_quad = lane % 4;
    unit_tile = warp / K_SLICES, k_slice = warp % K_SLICES, tile_thread = threadIdx.x % TILE_THREADS;
    int group = static_cast<int>(first_group) + blockIdx.x / BLOCKS;
    rank = CLUSTERED ? cluster_rank() : blockIdx.x % BLOCKS;
    head = group % HEADS, batch_tile = group / HEADS;
    sequence0 = batch_tile * SEQUENCES, sequences = static_cast<int>(B) - sequence0;
    if (SEQUENCES < SEQS) sequences = min(sequences, SEQUENCES);
    tile_unit = rank * UNITS + unit_tile * 16;
  }
  DEVICE bool has_cells() const { return CELL_SLICES == K_SLICES || k_slice < CELL_SLICES; }
  // Return the unit (in the head) and the sequence (in the tile) of the lane's cell q < CELLS.
  DEVICE int unit(int q) const { return tile_unit + 2 * quad + (k_slice * CELLS + q) % 2; }
  DEVICE int sequence(int q) const {
    int cell = k_slice * CELLS + q;
    return tile_of(cell) * 8 + 2 * lane_in_quad + second_of(cell);
  }
  // Return which one of the batch a sequence of the tile is, and whether there is one.
  DEVICE int of_batch(int sequence) const { return sequence0 + sequence / SPREAD; }
  DEVICE bool has_sequence(int sequence) const { return sequence % SPREAD == 0 && sequence / SPREAD < sequences; }
};

// Return the row of a sequence in a tile with one row of 16 units for each. The two sequences of a lane are 4 rows apart, so
// that the lanes of a warp access different banks; where rows have room for 16 bytes more, so they do in order.
DEVICE constexpr int tile_row(int sequence, bool aligned = true) {
  return aligned ? sequence / 8 * 8 + sequence % 8 / 2 + sequence % 2 * 4 : sequence;
}

// The units of a head, and of all, in a row of the gates for the backward.
constexpr int GATE_HEAD = D + D % 2;
constexpr i64 GATE_ROW = i64(HEADS) * GATE_HEAD;

// Return whether rows of heads of `head` units in global memory, with `numbers` elements of `bytes` bytes for each unit, begin at
// multiples of 8 bytes: then they are copied in pieces of as many or more.
DEVICE constexpr bool aligned_rows(int bytes, int numbers, int head = D) { return head * numbers * bytes % 8 == 0; }

// Return how many elements there are between two rows of a tile: an odd multiple of 32 or 64 bytes, for the same reason; where rows
// are not aligned, there is room for 16 bytes more.
DEVICE constexpr int pitch(int bytes, int numbers, int head = D) {
  return 16 * (numbers | 1) + (aligned_rows(bytes, numbers, head) || numbers % 2 == 0 ? 0 : 16 / bytes);
}
constexpr int ROW_BYTES = SEQS * pitch(BYTES, 1) * BYTES;  // 16 units of all sequences

// Return the index of number i of a head in a row [pieces][HEADS][D], from the head's first unit on: gates in format PNDG.
DEVICE constexpr i64 in_pieces(int i) { return i / D * ROW + i % D; }

// Return the index of an element in a tile [units / 8][SEQS][8 units]: the right operand of mma, with k contiguous in eights.
DEVICE int operand_offset(int k, int sequence) { return ((k / 8) * SEQS + sequence) * 8 + k % 8; }

// Copies a tile of every step: ROWS x SEQS rows of the unit tile's 16 units, with NUMBERS of ELEMENT (2 or 4) bytes for each.
// In shared memory it is [ROWS][SEQS in tile_row order][PITCH]; in global memory rows are ROW_STRIDE bytes apart. IN_PIECES:
// there, the head's numbers have the order of `in_pieces`.
template <int ELEMENT, int ROWS, i64 ROW_STRIDE, int NUMBERS = 1, bool IN_PIECES = false, int HEAD = D,
          bool ALIGNED = aligned_rows(ELEMENT, NUMBERS, HEAD)>
struct TileLoader {
  static constexpr int PITCH = pitch(ELEMENT, NUMBERS, HEAD);
  static constexpr int WIDTH = (HEAD * NUMBERS * ELEMENT % 16 == 0 ? 16 : 8) / ELEMENT;  // numbers of a copy
  static constexpr int LENGTH = 16 * NUMBERS;                                           // of a sequence
  static constexpr int PER_ROW = SEQS / SPREAD * LENGTH / WIDTH;                        // copies
  static constexpr int TOGETHER = PER_ROW < TILE_THREADS ? TILE_THREADS / PER_ROW : 1;  // rows
  static constexpr int COPIES = (PER_ROW + TILE_THREADS - 1) / TILE_THREADS;             // of a row, for each thread
  const char* from[COPIES];
  u32 to[COPIES];
  bool valid[COPIES];
  int first_row;

  // first(sequence) points at the first unit of the head in row 0 of the first step.
  template <class First>
  DEVICE void start(u32 tile, const ThreadCoord& coord, First first) {
    first_row = coord.tile_thread / PER_ROW % TOGETHER;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      int copy = (i * TILE_THREADS + coord.tile_thread) % PER_ROW;  // two threads may make the same copy
      int column = copy % (LENGTH / WIDTH) * WIDTH, sequence = copy / (LENGTH / WIDTH) * SPREAD;
      valid[i] = coord.tile_unit * NUMBERS + column < HEAD * NUMBERS && coord.has_sequence(sequence);
      from[i] = reinterpret_cast<const char*>(first(valid[i] ? coord.of_batch(sequence) : 0));
      if (ROWS > 1) from[i] += first_row * ROW_STRIDE;
      const int number = coord.tile_unit * NUMBERS + column;
      from[i] += valid[i] ? (IN_PIECES ? in_pieces(number) : number) * ELEMENT : 0;
      to[i] = tile + ((first_row * SEQS + tile_row(sequence)) * PITCH + column) * ELEMENT;
    }
  }
  // Starts the copies of a step into the stage at `offset` bytes, and moves on by `step` bytes.
  DEVICE void load(u32 offset, i64 step) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
#pragma unroll
      for (int row = 0; row < ROWS; row += TOGETHER)
        if (ROWS % TOGETHER == 0 || row + first_row < ROWS)
          copy_async<WIDTH * ELEMENT>(to[i] + offset + row * SEQS * PITCH * ELEMENT, from[i] + row * ROW_STRIDE, valid[i]);
      from[i] += step;
    }
  }
};

// The same where rows are not aligned. A row in shared memory consists of the vectors that hold the unit tile's numbers, each from
// an aligned address, without what follows the head's. So it begins as many bytes after a vector's as in global memory: RowShifts
// says how many. Where steps are a multiple of 8 bytes apart but not of 16, vectors have 8 bytes, because then each thread's copies
// are the same in all steps.
constexpr int vector_bytes(i64 step_bytes) { return step_bytes % 16 == 8 ? 8 : 16; }

template <int ELEMENT, int ROWS, i64 ROW_STRIDE, int NUMBERS, int HEAD>
struct TileLoader<ELEMENT, ROWS, ROW_STRIDE, NUMBERS, false, HEAD, false> {
  static constexpr int PITCH = pitch(ELEMENT, NUMBERS, HEAD), VECTOR = vector_bytes(ROWS * ROW_STRIDE);
  static constexpr bool CONSTANT = ROWS * ROW_STRIDE % VECTOR == 0;  // over the steps
  static constexpr int VECTORS = 16 * NUMBERS * ELEMENT / VECTOR + 1;  // of a sequence
  static constexpr int ALL = ROWS * (SEQS / SPREAD) * VECTORS, COPIES = (ALL + TILE_THREADS - 1) / TILE_THREADS;
  const char* from[COPIES];
  u32 to[COPIES];
  int left[COPIES];  // bytes of the head's row from there on, if any; CONSTANT: bytes to copy
  bool makes_last;   // of the thread's copies

  template <class First>
  DEVICE void start(u32 tile, const ThreadCoord& coord, First first) {
    makes_last = (COPIES - 1) * TILE_THREADS + coord.tile_thread < ALL;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int copy = i * TILE_THREADS + coord.tile_thread;
      const int vector = copy % VECTORS, sequence = copy / VECTORS % (SEQS / SPREAD) * SPREAD, row = copy / VECTORS / (SEQS / SPREAD) % ROWS;
      const bool exists = coord.has_sequence(sequence) && coord.tile_unit < D;
      const int offset = exists ? coord.tile_unit * NUMBERS * ELEMENT + VECTOR * vector : 0;
      left[i] = exists ? HEAD * NUMBERS * ELEMENT - offset : -VECTOR;
      from[i] = reinterpret_cast<const char*>(first(exists ? coord.of_batch(sequence) : 0)) + row * ROW_STRIDE + offset;
      to[i] = tile + (row * SEQS + tile_row(sequence, false)) * PITCH * ELEMENT + VECTOR * vector;
      if (CONSTANT) left[i] = bytes(i), from[i] -= before(i);
    }
  }
  DEVICE int before(int i) const { return reinterpret_cast<size_t>(from[i]) % VECTOR; }
  DEVICE int bytes(int i) const { return min(max(left[i] + before(i), 0), VECTOR); }
  DEVICE void load(u32 offset, i64 step) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      if (i + 1 < COPIES || ALL % TILE_THREADS == 0 || makes_last)
        copy_async_part<VECTOR>(to[i] + offset, CONSTANT ? from[i] : from[i] - before(i), CONSTANT ? left[i] : bytes(i));
      from[i] += step;
    }
  }
};
