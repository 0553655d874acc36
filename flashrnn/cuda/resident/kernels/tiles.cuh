// How a head is distributed over blocks, warps and lanes, and the tiles that forward and backward share.
//
// A group of BLOCKS blocks runs one head for a tile of SEQS sequences: one block, a cluster or, with GRID, a
// cooperative group of blocks anywhere on the GPU. A block owns UNIT_TILES tiles of 16 units. K_SLICES warps work on a
// tile, each on a slice of the product's inner axis (slice-K). Row i of a 16-row fragment is unit 2i of its tile, and
// row i + 8 is unit 2i + 1. So the lane with quad i (lane / 4) and lane_in_quad j (lane % 4) holds units 2i, 2i + 1 of
// sequences 2j, 2j + 1.
//
// A "cell" is one unit of one sequence. Cell q of a lane is unit 2i + q % 2 of sequence 8 (q / 4) + 2j + q / 2 % 2.
// Special cases:
//
// SPREAD: if at most half of the SEQS columns are used, by one block or by the forward of a cluster with one warp per
// tile, the sequences are the even columns. So a lane has half as many cells.
//
// DENSE (see tiling.py): for clusters whose steps reduce over units and use at most half of the columns. Lanes that
// would have no cells take over some of other lanes' fragments, which they receive through the shared memory of
// slice-K. Two warps of a tile then have its cells, each those of every second sequence, and the lane with quad i and
// lane_in_quad j has unit 2i + j / 2. In a grid whose steps reduce over units and whose lanes have one cell each (also
// BOTH_UNITS), the same holds for every four of the eight sequences. So a warp has all units of a sequence.
//
// IN_ROWS: if the steps of one block reduce over units, cells are redistributed through shared memory: a row of lanes,
// at most a warp, has all units of a sequence and reduces over them by shuffles alone. Lane i of a row has units 2i,
// 2i + 1.
//
// LOADERS: in the backward of a DENSE cluster, so many further warps load the inputs of the block, and multiply.
//
// HELPED: IN_ROWS, if the first half of the warps has all cells. The others load the inputs and compute, a step ahead,
// what a step computes from these alone (EarlyValues), each lane for its partner in the first half.
//
// CENTRED: IN_ROWS, if the step normalises its recurrent sums jointly (cells/centring.py), their mean is a product of
// its own.
//
// SEQUENCES of the SEQS columns are used; the others are not exchanged. With ANY_SEQUENCES (clusters only), their
// number is a kernel argument, so that one binary serves many batch sizes.
#pragma once
#include "kernels/cluster.cuh"
#include "resident/kernels/grid.cuh"
#include "kernels/math.cuh"

constexpr bool CLUSTERED = BLOCKS > 1 && !GRID;
constexpr int SEQS = 8 * BATCH_TILES;
constexpr int UNITS = 16 * UNIT_TILES;              // of a block
constexpr int PADDED = UNITS * BLOCKS;              // of a head, D of them real
constexpr int CELL_WARPS = UNIT_TILES * K_SLICES, WARPS = CELL_WARPS + LOADERS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_THREADS = 32 * K_SLICES;         // threads that work on one unit tile
constexpr bool SPREADS = BLOCKS == 1 || (CLUSTERED && K_SLICES == 1 && !ANY_SEQUENCES && !REDUCES);
constexpr int SPREAD = SPREADS && SEQUENCES <= SEQS / 2 ? 2 : 1;
static_assert(!DENSE || (REDUCES && CLUSTERED && K_SLICES > 1 && BATCH_TILES == 1 && SEQUENCES <= SEQS / 2));
constexpr int ROW_LANES = PADDED / 2;                                   // IN_ROWS: lanes of a sequence
constexpr bool IN_ROWS = REDUCES && BLOCKS == 1 && PADDED == D && (D == 16 || D == 32 || D == 64);
constexpr int CELL_THREADS = HELPED ? THREADS / 2 : THREADS;
constexpr int ROWS_AT_ONCE = IN_ROWS ? (HELPED ? SEQUENCES : THREADS / ROW_LANES) : 1;  // sequences
static_assert(!IN_ROWS || SEQUENCES % ROWS_AT_ONCE == 0);
static_assert(!HELPED || (IN_ROWS && K_SLICES == 1 && WARPS % 2 == 0 && CELL_THREADS == ROW_LANES * SEQUENCES));
static_assert(!CENTRED || (IN_ROWS && K_SLICES == 1));
constexpr int LANE_CELLS = DENSE ? 2 : 4 * BATCH_TILES / SPREAD;  // cells of a lane if one warp computed the tile's
constexpr int CELL_SLICES = K_SLICES < LANE_CELLS ? K_SLICES : LANE_CELLS;  // warps of a tile that compute cells
constexpr int CELLS = IN_ROWS ? 2 * SEQUENCES / ROWS_AT_ONCE : LANE_CELLS / CELL_SLICES;  // cells that a lane computes
constexpr bool BOTH_UNITS = DENSE || (REDUCES && GRID && CELLS == 1);
constexpr int HOLDERS = CELLS == 1 && !BOTH_UNITS ? 2 : 1;  // warps of a unit tile with units of the same sequence
constexpr int CONTRIBUTIONS = UNIT_TILES * HOLDERS;    // parts of a block for every sequence
static_assert(!LOADERS || (DENSE && CELL_SLICES == K_SLICES && PADDED == D));
constexpr int LOADED_TILES = LOADERS ? UNIT_TILES : 1;  // unit tiles whose inputs a thread copies, one of LOAD_THREADS
constexpr int LOAD_THREADS = HELPED ? TILE_THREADS / 2 : LOADERS ? 32 * LOADERS : TILE_THREADS;
constexpr int LOADED_SEQUENCES = HELPED || LOADERS ? SEQUENCES : SEQS / SPREAD;
// Steps whose inputs may still be in flight when a step begins. HELPED, a step reads those of the next one.
constexpr int IN_FLIGHT = STAGES - (HELPED ? 3 : 2);
static_assert(IN_FLIGHT >= 0);
constexpr int OPERAND_COLUMNS = SEQS + IN_ROWS;  // one column of padding: the lanes of a row store to different banks
// With DENSE, the second of two splits is in columns that would be unused: column sequence + 4. The sums of both
// columns are added. So a tile of R takes two products, not three.
constexpr bool PACKED = DENSE && SPLITS == 2;
constexpr int OPERANDS = PACKED ? 1 : SPLITS;    // tiles in memory into which a right operand is split
constexpr int TILE_PADDING = IN_ROWS ? 32 : 0;   // bytes between tiles of 16 units, to avoid bank conflicts
constexpr i64 ROW = i64(HEADS) * D;                         // units of all heads
constexpr int ROW_BYTES = SEQS * 16 * BYTES;                // 16 units of all sequences
constexpr int BARRIER_BYTES = 64;                           // mbarriers of a cluster's exchange
constexpr bool HAS_UNUSED_COLUMNS = ANY_SEQUENCES || SEQUENCES < SEQS;
static_assert(!ANY_SEQUENCES || CLUSTERED);
static_assert(SEQUENCES % 2 == 0 && SEQUENCES <= SEQS && D % 2 == 0 && PADDED >= D);
static_assert((IN_ROWS || LANE_CELLS % CELL_SLICES == 0) && (CELLS == 1 || CELLS % 2 == 0));

// BIDIRECTIONAL: the second half of the heads goes backwards in time. For these heads, tensors begin at the row of the
// last step, and all time strides are negative.
static_assert(!BIDIRECTIONAL || (HEADS % 2 == 0 && !RESET && !HAS_D_AUX));
DEVICE bool backwards(i64 head) { return BIDIRECTIONAL && head >= HEADS / 2; }
DEVICE void reverse_strides(Params& params) {
  params.row_t = -params.row_t;
  params.x_step = -params.x_step, params.h_step = -params.h_step, params.aux_step = -params.aux_step,
      params.gates_step = -params.gates_step;
}

// Returns the tile of eight sequences that contains a cell, and whether the cell is of the second of the lane's two
// sequences there.
DEVICE constexpr int tile_of(int cell) { return cell / (4 / SPREAD); }
DEVICE constexpr int second_of(int cell) { return SPREAD == 1 ? cell / 2 % 2 : 0; }

// The coordinates of a thread in the grid and in the tiles.
struct ThreadCoord {
  int warp, lane, quad, lane_in_quad, unit_tile, k_slice, tile_thread;
  int cell_slice;  // the warps of a tile with cell_slice < CELL_SLICES compute its cells
  int rank;  // of the block in its group
  i64 head;
  int batch_tile, sequence0, sequences;  // the group's first sequence, and their number (fewer in the last group)
  int tile_unit;                         // first unit of the unit tile, in the head
  int used_sequences;                    // the kernel argument
  DEVICE explicit ThreadCoord(const Params& params) {
    used_sequences = static_cast<int>(params.used_sequences);
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, lane_in_quad = lane % 4;
    unit_tile = warp / K_SLICES, k_slice = warp % K_SLICES, tile_thread = threadIdx.x % TILE_THREADS;
    if (LOADERS) unit_tile = min(unit_tile, UNIT_TILES - 1);
    cell_slice = DENSE ? (k_slice + unit_tile * CELL_SLICES) % K_SLICES : k_slice;  // spread over all schedulers
    int group = static_cast<int>(params.first_group) + blockIdx.x / BLOCKS;
    rank = CLUSTERED ? cluster_rank() : blockIdx.x % BLOCKS;
    head = group % HEADS, batch_tile = group / HEADS;
    sequence0 = batch_tile * used_columns(), sequences = static_cast<int>(params.B) - sequence0;
    if (HAS_UNUSED_COLUMNS) sequences = min(sequences, used_columns());
    tile_unit = rank * UNITS + unit_tile * 16;
  }
  // Returns how many of the SEQS columns are used.
  DEVICE int used_columns() const { return ANY_SEQUENCES ? used_sequences : SEQUENCES; }
  // Returns the index of the warp among the CONTRIBUTIONS of the block to a sequence.
  DEVICE int contribution() const { return unit_tile * HOLDERS + (HOLDERS == 2 ? k_slice % 2 : 0); }
  DEVICE bool has_cells() const {
    if (HELPED || LOADERS) return warp < (HELPED ? WARPS / 2 : CELL_WARPS);
    return CELL_SLICES == K_SLICES || cell_slice < CELL_SLICES;
  }
  DEVICE bool reads_cells() const { return HELPED || LOADERS || has_cells(); }
  // In the element-wise step: whether the warp has cells. DENSE, other warps skip it.
  DEVICE bool computes_cells() const { return DENSE || has_cells(); }
  // The same for all lanes, as the compiler knows: shuffles in a branch that lanes might not share take much longer.
  DEVICE bool warp_has_cells() const { return __any_sync(~0u, has_cells()); }
  // Return the first unit tile whose inputs the thread copies, its first unit, and its index among LOAD_THREADS.
  DEVICE int load_tile() const { return HELPED ? threadIdx.x % CELL_THREADS / LOAD_THREADS : LOADERS ? 0 : unit_tile; }
  DEVICE int load_unit() const { return HELPED ? load_tile() * 16 : LOADERS ? rank * UNITS : tile_unit; }
  DEVICE int load_thread() const {
    return HELPED ? threadIdx.x % LOAD_THREADS : LOADERS ? threadIdx.x - 32 * CELL_WARPS : tile_thread;
  }
  DEVICE bool helps() const { return (HELPED || LOADERS) && !has_cells(); }
  DEVICE bool loads_inputs() const { return !(HELPED || LOADERS) || helps(); }
  // Return the unit (in the head) and the sequence (in the tile) of the lane's cell q < CELLS.
  DEVICE int unit(int q) const {
    if constexpr (IN_ROWS) return row_lane() * 2 + q % 2;
    return tile_unit + 2 * quad + (BOTH_UNITS ? lane_in_quad / 2 : (cell_slice * CELLS + q) % 2);
  }
  DEVICE int sequence(int q) const {
    if constexpr (IN_ROWS)
      return (static_cast<int>(threadIdx.x) / ROW_LANES % ROWS_AT_ONCE + q / 2 * ROWS_AT_ONCE) * SPREAD;
    if constexpr (DENSE) return lane_in_quad % 2 * 2 + cell_slice % 2;
    if constexpr (BOTH_UNITS) return cell_slice / 2 * 4 + lane_in_quad % 2 * 2 + cell_slice % 2;
    int cell = cell_slice * CELLS + q;
    return tile_of(cell) * 8 + 2 * lane_in_quad + second_of(cell);
  }
  DEVICE int row_lane() const { return lane % ROW_LANES; }
  // Return the unit tile (in the block) that contains the lane's cells, and its first unit (in the head).
  DEVICE int cell_tile() const { return IN_ROWS ? row_lane() / 8 : unit_tile; }
  DEVICE int cell_tile_unit() const { return IN_ROWS ? row_lane() / 8 * 16 : tile_unit; }
  // Return the index in the batch of a sequence of the tile, and whether it exists.
  DEVICE int batch_index(int sequence) const { return sequence0 + sequence / SPREAD; }
  DEVICE bool has_sequence(int sequence) const { return sequence % SPREAD == 0 && sequence / SPREAD < sequences; }
};

// Returns the row of a sequence in a tile that has one row of 16 units per sequence. The two sequences of a lane are 4
// rows apart, so that the lanes of a warp access different banks.
DEVICE constexpr int tile_row(int sequence) { return sequence / 8 * 8 + sequence % 8 / 2 + sequence % 2 * 4; }

// Returns the distance between two such rows with `numbers` numbers per unit: an odd multiple of 32 or 64 bytes, also
// to avoid bank conflicts.
DEVICE constexpr int pitch(int numbers) { return 16 * (numbers | 1); }

// Returns the index of number i of a head in a row [pieces][HEADS][D], relative to the head's first unit (format PNDG).
DEVICE constexpr i64 in_pieces(int i) { return i / D * ROW + i % D; }

// Returns the index of an element in an operand tile [units / 8][OPERAND_COLUMNS][8 units]: the right operand of mma, k
// contiguous in groups of eight.
DEVICE int operand_offset(int k, int sequence) { return ((k / 8) * OPERAND_COLUMNS + sequence) * 8 + k % 8; }

// Returns the offset in bytes of a split in operand tiles of `units` units.
DEVICE constexpr int split_offset(int split, int units) {
  return split * (PACKED ? 4 * 16 : units * OPERAND_COLUMNS * 2);
}

// Copies a tile of every step to shared memory: ROWS x SEQS rows of the unit tile's 16 units, with NUMBERS numbers of
// ELEMENT (2 or 4) bytes per unit. In shared memory it is [ROWS][SEQS in tile_row order][PITCH]. In global memory, rows
// are ROW_STRIDE bytes apart; IN_PIECES, the head's numbers are in the order of `in_pieces`.
template <int ELEMENT, int ROWS, i64 ROW_STRIDE, int NUMBERS = 1, bool IN_PIECES = false>
struct TileLoader {
  static constexpr int PITCH = pitch(NUMBERS);
  static constexpr int ALIGNED = D * NUMBERS % 8 == 0 ? 8 : D * NUMBERS % 4 == 0 ? 4 : 2;
  static constexpr int WIDTH = ELEMENT == 4 && ALIGNED > 4 ? 4 : ALIGNED;               // numbers per copy
  static constexpr int LENGTH = 16 * NUMBERS;                                           // numbers per sequence
  static constexpr int PER_ROW = LOADED_SEQUENCES * LENGTH / WIDTH;                     // copies
  static constexpr int TOGETHER = PER_ROW < LOAD_THREADS ? LOAD_THREADS / PER_ROW : 1;  // rows
  static constexpr int COPIES = (PER_ROW + LOAD_THREADS - 1) / LOAD_THREADS;             // of a row, per thread
  static constexpr bool ALL_COPY = COPIES * LOAD_THREADS == PER_ROW * TOGETHER;  // else the last threads have fewer
  const char* from[COPIES];
  u32 to[COPIES];
  u32 valid[COPIES];
  int first_row;
  u32 left;  // copies from the thread's first one on

  // first(sequence) is the address of the first unit of the head in row 0 of the first step.
  template <class First>
  DEVICE void start(u32 tile, const ThreadCoord& coord, First first) {
    first_row = coord.load_thread() / PER_ROW % TOGETHER, left = PER_ROW * TOGETHER - coord.load_thread();
    UNROLL for (int i = 0; i < COPIES; i++) {
      int copy = (i * LOAD_THREADS + coord.load_thread()) % PER_ROW;
      int column = copy % (LENGTH / WIDTH) * WIDTH, sequence = copy / (LENGTH / WIDTH) * SPREAD;
      valid[i] = coord.load_unit() * NUMBERS + column < D * NUMBERS && coord.has_sequence(sequence);
      from[i] = reinterpret_cast<const char*>(first(valid[i] ? coord.batch_index(sequence) : 0)) +
          first_row * ROW_STRIDE;
      const int number = coord.load_unit() * NUMBERS + column;
      from[i] += valid[i] ? (IN_PIECES ? in_pieces(number) : number) * ELEMENT : 0;
      to[i] = tile + ((first_row * SEQS + tile_row(sequence)) * PITCH + column) * ELEMENT;
      if (IN_ROWS) asm_fence(to[i]);
    }
  }
  // Starts the copies of a step into the stage at offset `offset` (zeros unless `exists`), and advances by `step`
  // bytes. `tile_bytes`: between the unit tiles of a stage.
  DEVICE void load(u32 offset, i64 step, bool exists = true, u32 tile_bytes = 0) {
    UNROLL for (int i = 0; i < COPIES; i++) {
      UNROLL for (int row = 0; row < ROWS; row += TOGETHER)
        if ((ROWS % TOGETHER == 0 || row + first_row < ROWS) && (ALL_COPY || i * LOAD_THREADS < int(left)))
          UNROLL for (int tile = 0; tile < LOADED_TILES; tile++)
            copy_async<WIDTH * ELEMENT>(to[i] + offset + tile * tile_bytes + row * SEQS * PITCH * ELEMENT,
                                        from[i] + tile * 16 * NUMBERS * ELEMENT + row * ROW_STRIDE, valid[i] && exists);
      from[i] += step;
    }
  }
  // Prevents the compiler from recomputing the addresses in every step.
  DEVICE void fence_addresses() {
    UNROLL for (int i = 0; i < COPIES; i++) asm_fence(to[i]), asm_fence(valid[i]);
    asm_fence(left);
  }
};
