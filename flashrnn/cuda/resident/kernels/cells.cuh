// The cells of a lane: their coordinates, and how their values are loaded and stored.
#pragma once
#include "kernels/gates.cuh"
#include "resident/kernels/tiles.cuh"

// Cells are loaded and stored in pairs of neighbouring units, or one by one if a lane has a single cell.
constexpr int PAIR = CELLS % 2 == 0 ? 2 : 1;
constexpr int PAIRS = CELLS / PAIR;

// Whether cells that are padding of the batch or of the head need no masks, because their new states and gradients are
// finite. In steps that reduce over units, padding must not mix with other units of the head. Nor may lanes without a
// sequence read those of others: there are none if LOADERS have half of the columns.
constexpr bool FINITE = FINITE_AT_ZERO &&
    (!REDUCES ||
     (PADDED == D && CELL_SLICES == K_SLICES &&
      (BLOCKS == 1 || !HAS_UNUSED_COLUMNS || (LOADERS && SEQUENCES == SEQS / 2))));

// The coordinates of the lane's cells: a unit of a sequence each.
struct LaneCells {
  bool valid[CELLS];    // neither padding nor computed by another warp
  int sequence[CELLS];  // in the batch
  i64 element[CELLS];   // in a row [N, D]
  // Returns the index of state i of cell q in [S, B, N, D].
  DEVICE i64 state_index(int i, int q, i64 B) const { return (i * B + sequence[q]) * ROW + element[q]; }
};

DEVICE float2 to_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
DEVICE float2 to_pair(const __half* from) { return unpack_halves(*reinterpret_cast<const u32*>(from)); }
DEVICE float2 to_pair(const __nv_bfloat16* from) { return unpack_bfloats(*reinterpret_cast<const u32*>(from)); }

// Loads a value for each cell of the lane from row `row` of a tile that a TileLoader has filled.
template <class T>
DEVICE void read_cells(float (&v)[CELLS], const T* tile, int row, const ThreadCoord& coord) {
  UNROLL for (int p = 0; p < PAIRS; p++) {
    const T* from = tile + (row * SEQS + tile_row(coord.sequence(p * PAIR))) * 16 +
        coord.unit(p * PAIR) - coord.cell_tile_unit();
    if constexpr (PAIR == 2) {
      float2 pair = to_pair(from);
      v[2 * p] = pair.x, v[2 * p + 1] = pair.y;
    } else {
      v[p] = float(*from);
    }
  }
}

DEVICE void store_pair(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
DEVICE void store_pair(__half* to, float a, float b) { *reinterpret_cast<u32*>(to) = pack_gates(a, b); }

// Stores a value for each valid cell of the lane, `offset` elements after the addresses of its pairs.
template <class T>
DEVICE void store_cells(const float (&v)[CELLS], T* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) {
  UNROLL for (int p = 0; p < PAIRS; p++) {
    T* at = to[p] + offset;
    if constexpr (PAIR == 2) {
      if (valid[2 * p]) store_pair(at, v[2 * p], v[2 * p + 1]);
    } else {
      if (valid[p]) to_gate(*at, v[p]);
    }
  }
}

DEVICE float masked(float v, u32 mask) { return RESET ? __uint_as_float(__float_as_uint(v) & mask) : v; }

// A value for each cell of the lane, rounded to `scalar`.
template <class S>
struct RoundedCells {
  u32 pairs[PAIRS];
  DEVICE PairOf<S> pair(int p) const { return {pairs[p]}; }
  DEVICE void round(const float (&v)[CELLS]) {
    UNROLL for (int p = 0; p < PAIRS; p++) pairs[p] = pack(v[p * PAIR], PAIR == 2 ? v[p * PAIR + PAIR - 1] : 0.0f);
  }
  DEVICE void mask(const u32 (&masks)[PAIRS]) {
    UNROLL for (int p = 0; p < PAIRS; p++) pairs[p] &= masks[p];
  }
  DEVICE void multiply(const float (&)[PAIRS]) {}  // only floats are SCALED
  DEVICE void get(float (&v)[CELLS]) const {
    UNROLL for (int q = 0; q < CELLS; q++) {
      float2 pair = unpack(pairs[q / PAIR]);
      v[q] = q % PAIR ? pair.y : pair.x;
    }
  }
  DEVICE void store_global(S* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) const {
    UNROLL for (int p = 0; p < PAIRS; p++) {
      S* at = to[p] + offset;
      if constexpr (PAIR == 2) {
        if (valid[2 * p]) *reinterpret_cast<u32*>(at) = pairs[p];
      } else {
        if (valid[p]) *reinterpret_cast<u16*>(at) = static_cast<u16>(pairs[p]);
      }
    }
  }
};
template <>
struct RoundedCells<float> {
  float values[CELLS];
  DEVICE PairOf<float> pair(int p) const { return {values[p * PAIR], PAIR == 2 ? values[p * PAIR + PAIR - 1] : 0.0f}; }
  DEVICE void round(const float (&v)[CELLS]) {
    UNROLL for (int q = 0; q < CELLS; q++) values[q] = v[q];
  }
  DEVICE void mask(const u32 (&masks)[PAIRS]) {
    UNROLL for (int q = 0; q < CELLS; q++) values[q] = masked(values[q], masks[q / PAIR]);
  }
  DEVICE void multiply(const float (&factors)[PAIRS]) {
    UNROLL for (int q = 0; q < CELLS; q++) values[q] *= factors[q / PAIR];
  }
  DEVICE void get(float (&v)[CELLS]) const {
    UNROLL for (int q = 0; q < CELLS; q++) v[q] = values[q];
  }
  DEVICE void store_global(float* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) const {
    store_cells(values, to, offset, valid);
  }
};
using StoredCells = RoundedCells<scalar>;

// The stored gates of a pair of cells, [units of the pair][STORED]: one access if they are whole words. A row of gates
// is [HEADS][D][STORED] (format NDG or NDV of residual.py); with STATISTICS, those of a head follow its gates (NDV+).
//
// With GATES_IN_PIECES (format PNDG), the [D][GATES] gates of a head are split into GATES pieces of D numbers. Each
// piece has the memory of the head's part of [GATES][HEADS][D], so that the gradients of the inputs may overwrite the
// gates: when a block writes the gradients of a step, all blocks of its cluster have loaded the gates of that step. (So
// have the blocks of a grid, but nothing orders their reads before this block's writes.)
constexpr int PAIR_GATES = PAIR * STORED;
static_assert(!GATES_IN_PIECES || (D % 8 == 0 && D % PAIR_GATES == 0 && GATES == GI));
constexpr bool WHOLE_WORDS = PAIR_GATES * sizeof(gate) % 4 == 0;
constexpr int PAIR_WORDS = (PAIR_GATES * sizeof(gate) + 3) / 4;
struct alignas(PAIR_WORDS % 4 == 0 ? 16 : PAIR_WORDS % 2 == 0 ? 8 : 4) ResidualGates {
  u32 words[PAIR_WORDS];
  DEVICE void round(const float (&numbers)[PAIR_GATES]) {
    UNROLL for (int i = 0; i < PAIR_WORDS; i++) {
      if constexpr (sizeof(gate) == 4) words[i] = __float_as_uint(numbers[i]);
      else words[i] = pack_gates(numbers[2 * i], 2 * i + 1 < PAIR_GATES ? numbers[2 * i + 1] : 0);
    }
  }
  DEVICE void get(float (&numbers)[PAIR_GATES]) const {
    UNROLL for (int i = 0; i < PAIR_GATES; i++) {
      if constexpr (sizeof(gate) == 4) numbers[i] = __uint_as_float(words[i]);
      else numbers[i] = i % 2 ? unpack_halves(words[i / 2]).y : unpack_halves(words[i / 2]).x;
    }
  }
  DEVICE void store(gate* to) const {
    if constexpr (WHOLE_WORDS) *reinterpret_cast<ResidualGates*>(to) = *this;
    else
      UNROLL for (int i = 0; i < PAIR_GATES; i++)
        reinterpret_cast<u16*>(to)[i] = static_cast<u16>(words[i / 2] >> i % 2 * 16);
  }
  DEVICE void load(const gate* from) {
    if constexpr (WHOLE_WORDS) *this = *reinterpret_cast<const ResidualGates*>(from);
    else
      UNROLL for (int i = 0; i < PAIR_WORDS; i++) {
        u32 low = reinterpret_cast<const u16*>(from)[2 * i];
        words[i] = 2 * i + 1 < PAIR_GATES ? low | reinterpret_cast<const u16*>(from)[2 * i + 1] << 16 : low;
      }
  }
};

// The statistics of a head: floats that are equal for all of its units (cells/statistics.py), in whole vectors of four.
constexpr int NEEDED_FLOATS = (STATISTICS_NEEDED + 3) / 4 * 4;  // those that the backward needs
using StatisticCells = float[STATISTICS > 0 ? STATISTICS : 1][CELLS];
using NeededCells = float[STATISTICS_NEEDED > 0 ? STATISTICS_NEEDED : 1][CELLS];
constexpr int STATISTIC_ALIGNMENT = D * STORED * sizeof(gate) % 16 == 0
    ? 16 : D * STORED * sizeof(gate) % 8 == 0 ? 8 : 4;
static_assert(!GATES_IN_PIECES || STATISTICS == 0);

// Stores the statistics of the lane's sequences, if its first unit is the first of the head. `to`: the addresses of
// each pair's gates.
DEVICE void store_statistics(const StatisticCells& statistics, gate* const (&to)[PAIRS], const bool (&valid)[CELLS],
                             const ThreadCoord& coord) {
  if (STATISTICS == 0 || coord.unit(0) != 0) return;
  UNROLL for (int p = 0; p < PAIRS; p++) {
    if (!valid[p * PAIR]) continue;
    float* at = reinterpret_cast<float*>(to[p] + D * STORED);
    auto number = [&](int k) { return k < STATISTICS ? statistics[k < STATISTICS ? k : 0][p * PAIR] : 0.0f; };
    UNROLL for (int k = 0; k < STATISTIC_FLOATS; k += STATISTIC_ALIGNMENT / 4) {
      if constexpr (STATISTIC_ALIGNMENT == 16)
        *reinterpret_cast<float4*>(at + k) = make_float4(number(k), number(k + 1), number(k + 2), number(k + 3));
      else if constexpr (STATISTIC_ALIGNMENT == 8)
        *reinterpret_cast<float2*>(at + k) = make_float2(number(k), number(k + 1));
      else at[k] = number(k);
    }
  }
}

// HELPED: the early values of a lane's cells (cells/printers/early.py), which its partner in the other half of the
// block computes, in shared memory: [2 steps][pairs of values][lanes][2 values][2 cells]. They are stored after the
// first barrier of the step before, and loaded after that of the step.
struct EarlyValues {
  static constexpr int LANES = THREADS / 2, PAIRS = (EARLY_VALUES + 1) / 2;
  static constexpr int SIZE = HELPED ? 2 * PAIRS * LANES * 16 : 0;  // bytes
  using Cells = float[EARLY_VALUES > 0 ? EARLY_VALUES : 1][CELLS];
  float4* own;
  DEVICE EarlyValues(char* memory, int step)
      : own(reinterpret_cast<float4*>(memory) + (step & 1) * (PAIRS * LANES) + threadIdx.x % LANES) {}
  DEVICE void store(const Cells& v) const {
    UNROLL for (int i = 0; i < EARLY_VALUES; i += 2) {
      const int next = i + 1 < EARLY_VALUES ? i + 1 : i;
      own[i / 2 * LANES] = make_float4(v[i][0], v[i][1], v[next][0], v[next][1]);
    }
  }
  DEVICE void load(Cells& v) const {
    UNROLL for (int i = 0; i < EARLY_VALUES; i += 2) {
      const float4 two = own[i / 2 * LANES];
      v[i][0] = two.x, v[i][1] = two.y;
      if (i + 1 < EARLY_VALUES) v[i + 1][0] = two.z, v[i + 1][1] = two.w;
    }
  }
};

// The biases of gates that are a bias alone, which are not stored: [CONSTANTS][UNITS] of the block, in shared memory.
constexpr int CONSTANTS = GATES - STORED, CONSTANT_BYTES = CONSTANTS * UNITS * 4;
template <class P>  // Params, which has no bias in a backward without such gates
DEVICE void load_constants(float* constants, const P& params, const ThreadCoord& coord) {
  if constexpr (CONSTANTS > 0)
    UNROLL for (int j = 0; j < GATES; j++)
      for (int i = threadIdx.x; CONSTANT_OF[j] >= 0 && i < UNITS; i += THREADS) {
        const int unit = coord.rank * UNITS + i;
        constants[CONSTANT_OF[j] * UNITS + i] = unit < D ? float(params.bias[j * ROW + coord.head * D + unit]) : 0;
      }
}
// Reads the constants of the lane's units. The block must have synchronised since load_constants.
DEVICE void read_constants(float (&values)[CONSTANTS + 1][PAIR], const float* constants, const ThreadCoord& coord) {
  UNROLL for (int k = 0; k < CONSTANTS; k++) {
    const float* from = constants + k * UNITS + coord.unit(0) - coord.rank * UNITS;
    if constexpr (PAIR == 2) {
      const float2 pair = to_pair(from);
      values[k][0] = pair.x, values[k][1] = pair.y;
    } else {
      values[k][0] = *from;
    }
  }
}

// The resets of the sequences of the lane's pairs, one bit per step in words of 32 steps. The next word is loaded while
// the steps of the current one run, because a load waits for all asynchronous copies that were started before it.
constexpr int WORD = 32;  // steps
struct Resets {
  const u32* words;  // [B][ceil(T / WORD)]
  u32 row[PAIRS], now[PAIRS], next[PAIRS];
  int last_word;
  // Loads the words of step t, and starts to load those of step t + `step`, which is WORD or -WORD.
  DEVICE void start(const Params& params, const LaneCells& cells, int t, int step) {
    if (!RESET) return;
    words = params.resets, last_word = static_cast<int>((params.T - 1) / WORD);
    UNROLL for (int p = 0; p < PAIRS; p++)
      row[p] = cells.valid[p * PAIR] ? cells.sequence[p * PAIR] * (last_word + 1) : 0;
    load(t), move_on(t + step);
  }
  // Loads the words that contain step t.
  DEVICE void load(int t) {
    UNROLL for (int p = 0; p < PAIRS; p++) next[p] = words[row[p] + min(max(t, 0) / WORD, last_word)];
  }
  // Moves on to the words loaded last, and loads those that contain step t.
  DEVICE void move_on(int t) {
    UNROLL for (int p = 0; p < PAIRS; p++) now[p] = next[p];
    load(t);
  }
  // Returns masks for step t: all bits set, or none where the states before the step are reset.
  DEVICE void masks(u32 (&masks)[PAIRS], int t) const {
    UNROLL for (int p = 0; p < PAIRS; p++) masks[p] = RESET ? (now[p] >> t % WORD & 1) - 1 : ~0u;
  }
};

// Stores values of the lane's cells, split into operands, into an operand tile of UNITS_OF_TILE units, `offset` bytes
// after the addresses `to` from operand_addresses.
template <int UNITS_OF_TILE>
DEVICE void store_operand(const StoredCells& cells, const u32 (&to)[PAIRS], u32 offset) {
  UNROLL for (int p = 0; p < PAIRS; p++) {
    Pair pair = cells.pair(p);
    UNROLL for (int split = 0; split < SPLITS; split++) {
      u32 word = pair.next_split(), at = to[p] + offset + split_offset(split, UNITS_OF_TILE);
      if constexpr (PAIR == 2) store_shared(at, word);
      else store_shared(at, static_cast<u16>(word));
    }
  }
}

// Computes the addresses of the lane's pairs in an operand tile at `address` whose first unit is `first`.
DEVICE void operand_addresses(u32 (&to)[PAIRS], u32 address, int first, const ThreadCoord& coord) {
  UNROLL for (int p = 0; p < PAIRS; p++) {
    to[p] = address + operand_offset(coord.unit(p * PAIR) - first, coord.sequence(p * PAIR)) * 2;
    asm_fence(to[p]);
  }
}
