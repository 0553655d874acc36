// How one head is laid over warps and blocks, and the tiles that forward and backward share.
//
// A group of BLOCKS blocks runs one head for a tile of SEQS sequences: one block, a cluster, or with GRID blocks anywhere
// on the GPU. A block owns UNIT_TILES tiles of 16 units, a tile is worked on by K_SPLITS warps. In the matrix products,
// row g of a 16-row fragment stands for unit 2g of its tile and row g + 8 for unit 2g + 1, so that lane (g, t) holds units
// 2g, 2g + 1 of sequences 2t, 2t + 1: a "cell" is one such unit of one sequence. Cell q of a lane: unit 2g + q % 2,
// sequence 8 (q / 4) + 2t + q / 2 % 2.
#pragma once
#include "cluster.cuh"
#include "grid.cuh"
#include "math.cuh"

constexpr bool CLUSTERED = BLOCKS > 1 && !GRID;
constexpr int SEQS = 8 * BATCH_TILES;
constexpr int UNITS = 16 * UNIT_TILES;              // of a block
constexpr int PADDED = UNITS * BLOCKS;              // of a head, D of them real
constexpr int WARPS = UNIT_TILES * K_SPLITS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_THREADS = 32 * K_SPLITS;         // threads that work on one unit tile
constexpr int LANE_CELLS = 4 * BATCH_TILES;         // cells in a lane's fragment
constexpr int CELL_SPLITS = K_SPLITS < LANE_CELLS ? K_SPLITS : LANE_CELLS;  // warps of a tile that compute its cells
constexpr int CELLS = LANE_CELLS / CELL_SPLITS;     // cells whose element-wise step a lane of these computes
constexpr i64 ROW = i64(HEADS) * D;                         // units of all heads
constexpr int ROW_BYTES = SEQS * 16 * BYTES;                // 16 units of all sequences
constexpr int BARRIER_BYTES = 64;                           // room for the barriers of a cluster's exchange
static_assert(LANE_CELLS % CELL_SPLITS == 0 && (CELLS == 1 || CELLS % 2 == 0) && D % 2 == 0 && PADDED >= D);

// Bytes from a time step to the next in what has a row for every step. They are arguments of the kernels, because what
// lies in constant memory is not computed anew in the loop.
struct Steps {
  i64 x, h, aux, gates;
};

// Where a thread stands.
struct Place {
  int warp, lane, g, t, unit_tile, split, tile_thread;
  int rank;       // block in its group
  i64 head, sequence0;
  int tile_unit;  // first unit of the unit tile, in the head
  DEVICE Place(i64 first_group) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unit_tile = warp / K_SPLITS, split = warp % K_SPLITS, tile_thread = threadIdx.x % TILE_THREADS;
    int group = static_cast<int>(first_group) + blockIdx.x / BLOCKS;
    rank = CLUSTERED ? cluster_rank() : blockIdx.x % BLOCKS;
    head = group % HEADS, sequence0 = i64(group / HEADS) * SEQS;
    tile_unit = rank * UNITS + unit_tile * 16;
  }
  DEVICE bool has_cells() const { return CELL_SPLITS == K_SPLITS || split < CELL_SPLITS; }
  // The unit (in the head) and the sequence (in the tile) of the lane's cell number q < CELLS.
  DEVICE int unit(int q) const { return tile_unit + 2 * g + (split * CELLS + q) % 2; }
  DEVICE int sequence(int q) const {
    int cell = split * CELLS + q;
    return cell / 4 * 8 + 2 * t + cell / 2 % 2;
  }
};

// Rows of 16 units of a unit tile, one per sequence. Sequences 2t and 2t + 1 of four lanes t lie 4 rows apart, which
// keeps the lanes of a warp on different banks.
DEVICE constexpr int tile_row(int sequence) { return sequence / 8 * 8 + sequence % 8 / 2 + sequence % 2 * 4; }

// Numbers between two such rows, with NUMBERS for each unit: an odd multiple of 32 or 64 bytes, for the same reason.
DEVICE constexpr int pitch(int numbers) { return 16 * (numbers | 1); }

// A tile [units / 8][SEQS][8 units]: the right operand of mma, k contiguous in eights.
DEVICE int operand_offset(int k, int sequence) { return ((k / 8) * SEQS + sequence) * 8 + k % 8; }

// Copies a tile of one step after the other: ROWS x SEQS rows of the unit tile's 16 units, NUMBERS of ELEMENT (2 or 4)
// bytes for each. In shared memory it is [ROWS][SEQS in tile_row order][PITCH]; in global memory rows lie ROW_STRIDE bytes
// apart.
template <int ELEMENT, int ROWS, i64 ROW_STRIDE, int NUMBERS = 1>
struct TileLoader {
  static constexpr int PITCH = pitch(NUMBERS);
  static constexpr int ALIGNED = D * NUMBERS % 8 == 0 ? 8 : D * NUMBERS % 4 == 0 ? 4 : 2;
  static constexpr int WIDTH = ELEMENT == 4 && ALIGNED > 4 ? 4 : ALIGNED;               // numbers of a copy
  static constexpr int LENGTH = 16 * NUMBERS;                                           // of a sequence
  static constexpr int PER_ROW = SEQS * LENGTH / WIDTH;                                 // copies
  static constexpr int TOGETHER = PER_ROW < TILE_THREADS ? TILE_THREADS / PER_ROW : 1;  // rows
  static constexpr int PARTS = (PER_ROW + TILE_THREADS - 1) / TILE_THREADS;             // of a row, for each thread
  const char* from[PARTS];
  u32 to[PARTS];
  bool valid[PARTS];
  int first_row;

  // source(sequence) points at the first unit of the head in the first step's row 0.
  template <class Source>
  DEVICE void start(u32 tile, const Place& place, i64 sequences, Source source) {
    first_row = place.tile_thread / PER_ROW % TOGETHER;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      int copy = (i * TILE_THREADS + place.tile_thread) % PER_ROW;  // two threads may make the same
      int column = copy % (LENGTH / WIDTH) * WIDTH, sequence = copy / (LENGTH / WIDTH);
      valid[i] = place.tile_unit * NUMBERS + column < D * NUMBERS && place.sequence0 + sequence < sequences;
      from[i] = reinterpret_cast<const char*>(source(valid[i] ? place.sequence0 + sequence : 0)) + first_row * ROW_STRIDE;
      from[i] += valid[i] ? (place.tile_unit * NUMBERS + column) * ELEMENT : 0;
      to[i] = tile + ((first_row * SEQS + tile_row(sequence)) * PITCH + column) * ELEMENT;
    }
  }
  // Starts the copies of a step into the stage at `offset` bytes, and moves on by `step` bytes.
  DEVICE void load(u32 offset, i64 step) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
#pragma unroll
      for (int row = 0; row < ROWS; row += TOGETHER)
        if (ROWS % TOGETHER == 0 || row + first_row < ROWS)
          copy_async<WIDTH * ELEMENT>(to[i] + offset + row * SEQS * PITCH * ELEMENT, from[i] + row * ROW_STRIDE, valid[i]);
      from[i] += step;
    }
  }
};

// Cells are read and written in pairs of two units that lie side by side, or one by one where a lane has one cell.
constexpr int PAIR = CELLS % 2 == 0 ? 2 : 1;
constexpr int PAIRS = CELLS / PAIR;

DEVICE float2 to_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
DEVICE float2 to_pair(const __half* from) { return unpack_halves(*reinterpret_cast<const u32*>(from)); }
DEVICE float2 to_pair(const __nv_bfloat16* from) { return unpack_bfloats(*reinterpret_cast<const u32*>(from)); }

// One value per cell of the lane from row `row` of a tile that a TileLoader has filled.
template <class T>
DEVICE void read_cells(float (&v)[CELLS], const T* tile, int row, const Place& place) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const T* from = tile + (row * SEQS + tile_row(place.sequence(p * PAIR))) * 16 + place.unit(p * PAIR) - place.tile_unit;
    if constexpr (PAIR == 2) {
      float2 pair = to_pair(from);
      v[2 * p] = pair.x, v[2 * p + 1] = pair.y;
    } else {
      v[p] = float(*from);
    }
  }
}

DEVICE void store_cells(const float (&v)[CELLS], __half* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    __half* at = to[p] + offset;
    if constexpr (PAIR == 2) {
      if (valid[2 * p]) *reinterpret_cast<u32*>(at) = pack_gates(v[2 * p], v[2 * p + 1]);
    } else {
      if (valid[p]) to_gate(*at, v[p]);
    }
  }
}
DEVICE void store_cells(const float (&v)[CELLS], float* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    float* at = to[p] + offset;
    if constexpr (PAIR == 2) {
      if (valid[2 * p]) *reinterpret_cast<float2*>(at) = make_float2(v[2 * p], v[2 * p + 1]);
    } else {
      if (valid[p]) *at = v[p];
    }
  }
}

// One value per cell of the lane, rounded to what `scalar` can hold.
template <class S>
struct RoundedCells {
  u32 pairs[PAIRS];
  DEVICE PairOf<S> pair(int p) const { return {pairs[p]}; }
  DEVICE void round(const float (&v)[CELLS]) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) pairs[p] = pack(v[p * PAIR], PAIR == 2 ? v[p * PAIR + PAIR - 1] : 0.0f);
  }
  DEVICE void get(float (&v)[CELLS]) const {
#pragma unroll
    for (int q = 0; q < CELLS; q++) {
      float2 pair = unpack(pairs[q / PAIR]);
      v[q] = q % PAIR ? pair.y : pair.x;
    }
  }
  DEVICE void store_global(S* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) const {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
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
#pragma unroll
    for (int q = 0; q < CELLS; q++) values[q] = v[q];
  }
  DEVICE void get(float (&v)[CELLS]) const {
#pragma unroll
    for (int q = 0; q < CELLS; q++) v[q] = values[q];
  }
  DEVICE void store_global(float* const (&to)[PAIRS], i64 offset, const bool (&valid)[CELLS]) const {
    store_cells(values, to, offset, valid);
  }
};
using StoredCells = RoundedCells<scalar>;

// The gates of a pair of cells as they are kept for the backward: [units of the pair][GATES], moved in one piece if they
// are whole words.
constexpr int PAIR_GATES = PAIR * GATES;
constexpr bool WHOLE_WORDS = PAIR_GATES * sizeof(gate) % 4 == 0;
constexpr int PAIR_WORDS = (PAIR_GATES * sizeof(gate) + 3) / 4;
struct alignas(PAIR_WORDS % 4 == 0 ? 16 : PAIR_WORDS % 2 == 0 ? 8 : 4) KeptGates {
  u32 words[PAIR_WORDS];
  DEVICE void round(const float (&numbers)[PAIR_GATES]) {
#pragma unroll
    for (int i = 0; i < PAIR_WORDS; i++) {
      if constexpr (sizeof(gate) == 4) words[i] = __float_as_uint(numbers[i]);
      else words[i] = pack_gates(numbers[2 * i], 2 * i + 1 < PAIR_GATES ? numbers[2 * i + 1] : 0);
    }
  }
  DEVICE void get(float (&numbers)[PAIR_GATES]) const {
#pragma unroll
    for (int i = 0; i < PAIR_GATES; i++) {
      if constexpr (sizeof(gate) == 4) numbers[i] = __uint_as_float(words[i]);
      else numbers[i] = i % 2 ? unpack_halves(words[i / 2]).y : unpack_halves(words[i / 2]).x;
    }
  }
  DEVICE void store(gate* to) const {
    if constexpr (WHOLE_WORDS) *reinterpret_cast<KeptGates*>(to) = *this;
    else
#pragma unroll
      for (int i = 0; i < PAIR_GATES; i++) reinterpret_cast<u16*>(to)[i] = static_cast<u16>(words[i / 2] >> i % 2 * 16);
  }
  DEVICE void load(const gate* from) {
    if constexpr (WHOLE_WORDS) *this = *reinterpret_cast<const KeptGates*>(from);
    else
#pragma unroll
      for (int i = 0; i < PAIR_WORDS; i++) {
        u32 low = reinterpret_cast<const u16*>(from)[2 * i];
        words[i] = 2 * i + 1 < PAIR_GATES ? low | reinterpret_cast<const u16*>(from)[2 * i + 1] << 16 : low;
      }
  }
};

// Stores values of cells into an operand tile of UNITS_OF_TILE units, `offset` bytes behind `to` of operand_addresses.
template <int UNITS_OF_TILE>
DEVICE void store_operand(const StoredCells& cells, const u32 (&to)[PAIRS], u32 offset) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    Pair pair = cells.pair(p);
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) {
      u32 word = pair.next_plane(), at = to[p] + offset + plane * UNITS_OF_TILE * SEQS * 2;
      if constexpr (PAIR == 2) store_shared(at, word);
      else store_shared(at, static_cast<u16>(word));
    }
  }
}

// Where the pairs of the lane's cells stand in an operand tile at `address` whose first unit is `first`.
DEVICE void operand_addresses(u32 (&to)[PAIRS], u32 address, int first, const Place& place) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    to[p] = address + operand_offset(place.unit(p * PAIR) - first, place.sequence(p * PAIR)) * 2;
    keep(to[p]);
  }
}

// Left-operand fragments of mma that stay on chip for the whole time loop: some in registers, the rest in shared
// memory. Tile i of a warp is a 16 x 16 tile of R, or of R transposed; row g stands for unit 2g, row g + 8 for 2g + 1. It
// is kept as PLANES fragments, one after the other.
template <int TILES, int IN_REGISTERS, bool TRANSPOSED>
struct Fragments {
  static constexpr int TOTAL = TILES * PLANES;
  static constexpr int SHARED = (TOTAL - IN_REGISTERS) * 32 * 16;  // bytes of shared memory, per warp
  // Both kinds take turns, so that products from registers hide the reading of the others.
  static DEVICE constexpr int register_index(int f) { return f * IN_REGISTERS / TOTAL; }
  static DEVICE constexpr bool in_registers(int f) { return register_index(f + 1) > register_index(f); }
  static DEVICE constexpr int shared_offset(int f) { return (f - register_index(f)) * 512; }
  u32 registers[IN_REGISTERS + 1][4];  // the last is never used: register_index of trailing shared fragments
  u32 shared;  // address of this lane's part

  // tile(i, row, column) points at element (row, column) of R's tile, two elements of a row at a time, null outside R.
  template <class Tile>
  DEVICE void load(char* memory, const Place& place, Tile tile) {
    shared = shared_address(memory) + place.warp * SHARED + place.lane * 16;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      Pair pairs[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {  // columns 2t, 2t + 1 and 2t + 8, 2t + 9 of the fragment
        int column = 2 * place.t + half * 8;
        Pair &even = pairs[2 * half], &odd = pairs[2 * half + 1];
        if constexpr (TRANSPOSED) {
          ::load(even, tile(i, column, 2 * place.g));
          ::load(odd, tile(i, column + 1, 2 * place.g));
          transpose(even, odd);
        } else {
          ::load(even, tile(i, 2 * place.g, column));
          ::load(odd, tile(i, 2 * place.g + 1, column));
        }
      }
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++) put(i * PLANES + plane, pairs);
    }
  }
  DEVICE void put(int f, Pair (&pairs)[4]) {
    u32 value[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      value[r] = pairs[r].next_plane();
      if (in_registers(f)) registers[register_index(f)][r] = value[r];
    }
    if (!in_registers(f)) {
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                   ::"r"(shared + shared_offset(f)), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
                   : "memory");
    }
  }
  // Shared fragments on their way to registers: AHEAD of them, so that their latency hides behind products.
  static constexpr int AHEAD = TOTAL > IN_REGISTERS ? 3 : 0;
  struct Queue {
    u32 words[AHEAD + 1][4];
  };
  DEVICE void fetch(Queue& queue, int shared_fragment) const {
    if (shared_fragment >= TOTAL - IN_REGISTERS) return;
    u32(&a)[4] = queue.words[shared_fragment % (AHEAD + 1)];
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared + shared_fragment * 512));
  }
  DEVICE void start(Queue& queue) const {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(queue, i);
  }
  // c[n] += tile i x b[.][n], half `half` of its k; tiles come in order.
  DEVICE void multiply(Queue& queue, float (&c)[BATCH_TILES][4], int i, const u32 (&b)[PLANES][BATCH_TILES][4], int half) const {
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) {
      const int f = i * PLANES + plane, in_shared = f - register_index(f);
      if (!in_registers(f)) fetch(queue, in_shared + AHEAD);
#pragma unroll
      for (int other = 0; other < PLANES - plane; other++)
#pragma unroll
        for (int n = 0; n < BATCH_TILES; n++) {
          const u32(&right)[4] = b[other][n];
          if (in_registers(f)) mma(c[n], registers[register_index(f)], right[2 * half], right[2 * half + 1]);
          else mma(c[n], queue.words[in_shared % (AHEAD + 1)], right[2 * half], right[2 * half + 1]);
        }
    }
  }
};

// c[m][n] += tiles (m, k) x operand tile (k, n) for K_TILES tiles of 16 rows of the operand, from `address` on; planes of
// the operand lie PLANE_BYTES apart. Tile first + k * M + m. SPLIT chains of mma per result keep the tensor cores busy
// where M is small.
template <int M, int K_TILES, int PLANE_BYTES, class F>
DEVICE void product(float (&c)[M][BATCH_TILES][4], const F& fragments, typename F::Queue& queue, int first, u32 address,
                    const Place& place) {
  constexpr int SPLIT = M * BATCH_TILES >= 4 || K_TILES < 2 ? 1 : 4 / (M * BATCH_TILES);
  float part[SPLIT][M][BATCH_TILES][4] = {};
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < BATCH_TILES; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) part[0][m][n][r] = c[m][n][r];
  const u32 row = address + ((place.lane / 8) * SEQS + place.lane % 8) * 16;
#pragma unroll
  for (int k = 0; k < K_TILES; k += 2) {
    u32 b[PLANES][BATCH_TILES][4];
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++)
#pragma unroll
      for (int n = 0; n < BATCH_TILES; n++) {
        u32 from = row + plane * PLANE_BYTES + (k * 2 * SEQS + n * 8) * 16;
        if (k + 1 == K_TILES) load_two_matrices(b[plane][n][0], b[plane][n][1], from);
        else load_four_matrices(b[plane][n], from);
      }
#pragma unroll
    for (int half = 0; half < 2 && k + half < K_TILES; half++)
#pragma unroll
      for (int m = 0; m < M; m++) fragments.multiply(queue, part[(k + half) % SPLIT][m], first + (k + half) * M + m, b, half);
  }
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < BATCH_TILES; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float sum = part[0][m][n][r];
#pragma unroll
        for (int s = 1; s < SPLIT; s++) sum += part[s][m][n][r];
        c[m][n][r] = sum;
      }
}

// The sums of the K_SPLITS warps of a unit tile: c (this warp's part of all of the lane's cells) -> u, complete, for
// the lane's own cells, if it has any. Room for them: SUM_FLOATS<ROWS>.
template <int ROWS>
constexpr int SUM_FLOATS = K_SPLITS == 1 ? 0 : WARPS * CELL_SPLITS * CELLS * 32 * ROWS;

template <int ROWS>
DEVICE void reduce_splits(float (&u)[ROWS][CELLS], const float (&c)[ROWS][BATCH_TILES][4], float* sums, const Place& place) {
  auto part = [&](int cell, int row) { return c[row][cell / 4][cell % 2 * 2 + cell / 2 % 2]; };
  auto slot = [&](int to, int from, int q) {
    return sums + ((((place.unit_tile * CELL_SPLITS + to) * K_SPLITS + from) * CELLS + q) * 32 + place.lane) * ROWS;
  };
  if constexpr (K_SPLITS == 1) {
#pragma unroll
    for (int q = 0; q < CELLS; q++)
#pragma unroll
      for (int j = 0; j < ROWS; j++) u[j][q] = part(q, j);
    return;
  }
#pragma unroll
  for (int to = 0; to < CELL_SPLITS; to++)
#pragma unroll
    for (int q = 0; q < CELLS; q++) {
      if (to == place.split) continue;
      if constexpr (ROWS == 4) {
        *reinterpret_cast<float4*>(slot(to, place.split, q)) =
            make_float4(part(to * CELLS + q, 0), part(to * CELLS + q, 1), part(to * CELLS + q, 2), part(to * CELLS + q, 3));
      } else {
#pragma unroll
        for (int j = 0; j < ROWS; j++) slot(to, place.split, q)[j] = part(to * CELLS + q, j);
      }
    }
  group_barrier<TILE_THREADS>(1 + place.unit_tile);
  if (!place.has_cells()) return;
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      u[j][q] = part(q, j);
#pragma unroll
      for (int own = 1; own < CELL_SPLITS; own++) {
        float value = part(own * CELLS + q, j);  // read in any case, or the compiler makes an array in memory of c
        u[j][q] = own == place.split ? value : u[j][q];
      }
    }
#pragma unroll
    for (int other = 1; other < K_SPLITS; other++) {
      const int from = (place.split + other) % K_SPLITS;
      float v[ROWS];
      if constexpr (ROWS == 4) *reinterpret_cast<float4*>(v) = *reinterpret_cast<float4*>(slot(place.split, from, q));
      else
#pragma unroll
        for (int j = 0; j < ROWS; j++) v[j] = slot(place.split, from, q)[j];
#pragma unroll
      for (int j = 0; j < ROWS; j++) u[j][q] += v[j];
    }
  }
}
