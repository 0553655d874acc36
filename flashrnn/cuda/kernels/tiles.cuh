// How one head is laid over warps and blocks, and the tiles that forward and backward share.
//
// A group of CLUSTER blocks runs one head for a tile of SEQS sequences. A block owns UNIT_TILES tiles of 16 units,
// a tile is worked on by K_SPLITS warps. In the matrix products, row g of a 16-row fragment stands for unit 2g of its
// tile and row g + 8 for unit 2g + 1, so that lane (g, t) holds units 2g, 2g + 1 of sequences 2t, 2t + 1: a "cell" is
// one such unit of one sequence. Cell q of a lane: unit 2g + q % 2, sequence 8 (q / 4) + 2t + q / 2 % 2.
#pragma once
#include "cluster.cuh"
#include "math.cuh"

constexpr int SEQS = 8 * BATCH_TILES;
constexpr int UNITS = 16 * UNIT_TILES;              // of a block
constexpr int PADDED = UNITS * CLUSTER;             // of a head, D of them real
constexpr int WARPS = UNIT_TILES * K_SPLITS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_THREADS = 32 * K_SPLITS;         // threads that work on one unit tile
constexpr int LANE_CELLS = 4 * BATCH_TILES;         // cells in a lane's fragment
constexpr int CELLS = LANE_CELLS / K_SPLITS;        // cells whose element-wise step a lane computes
constexpr int CHUNK = D % 8 == 0 ? 8 : D % 4 == 0 ? 4 : 2;  // units that one asynchronous copy moves
constexpr i64 ROW = i64(HEADS) * D;                         // units of all heads
static_assert(LANE_CELLS % K_SPLITS == 0 && (CELLS == 1 || CELLS % 2 == 0) && D % 2 == 0 && PADDED >= D);

// Where a thread stands.
struct Place {
  int warp, lane, g, t, unit_tile, split, tile_thread;
  int rank;       // block in its cluster
  i64 head, sequence0;
  int tile_unit;  // first unit of the unit tile, in the head
  DEVICE Place() {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unit_tile = warp / K_SPLITS, split = warp % K_SPLITS, tile_thread = threadIdx.x % TILE_THREADS;
    int group = blockIdx.x / CLUSTER;
    rank = CLUSTER == 1 ? 0 : cluster_rank();
    head = group % HEADS, sequence0 = i64(group / HEADS) * SEQS;
    tile_unit = rank * UNITS + unit_tile * 16;
  }
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

// A tile [8 units][SEQS][8 units] of 2-byte elements: the right operand of mma, k contiguous in eights.
DEVICE int operand_offset(int k, int sequence) { return ((k / 8) * SEQS + sequence) * 8 + k % 8; }

// Copies a tile of one step after the other: ROWS x SEQS rows of the unit tile's 16 units, ELEMENT (2 or 4) bytes each.
// In shared memory it is [ROWS][SEQS in tile_row order][16 units]; in global memory rows lie ROW_STRIDE bytes apart.
template <int ELEMENT, int ROWS, i64 ROW_STRIDE>
struct TileLoader {
  static constexpr int WIDTH = ELEMENT == 4 && CHUNK > 4 ? 4 : CHUNK;  // units of a copy
  static constexpr int PER_ROW = SEQS * 16 / WIDTH;                    // copies
  static constexpr int TOGETHER = PER_ROW < TILE_THREADS ? TILE_THREADS / PER_ROW : 1;  // rows
  static constexpr int PARTS = PER_ROW > TILE_THREADS ? PER_ROW / TILE_THREADS : 1;     // of a row, for each thread
  static_assert(PER_ROW % TILE_THREADS == 0 || TILE_THREADS % PER_ROW == 0);
  const char* from[PARTS];
  u32 to[PARTS];
  bool valid[PARTS];
  int first_row;

  // source(sequence) points at the first unit of the head in the first step's row 0.
  template <class Source>
  DEVICE void start(u32 tile, const Place& place, i64 sequences, Source source) {
    first_row = place.tile_thread / PER_ROW;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      int copy = (i * TILE_THREADS + place.tile_thread) % PER_ROW;
      int column = copy % (16 / WIDTH) * WIDTH, sequence = copy / (16 / WIDTH);
      valid[i] = place.tile_unit + column < D && place.sequence0 + sequence < sequences;
      from[i] = reinterpret_cast<const char*>(source(valid[i] ? place.sequence0 + sequence : 0)) + first_row * ROW_STRIDE;
      from[i] += valid[i] ? (place.tile_unit + column) * ELEMENT : 0;
      to[i] = tile + ((first_row * SEQS + tile_row(sequence)) * 16 + column) * ELEMENT;
    }
  }
  // Starts the copies of a step into the stage at `offset` bytes, and moves on by `step` bytes.
  DEVICE void load(u32 offset, i64 step) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
#pragma unroll
      for (int row = 0; row < ROWS; row += TOGETHER)
        if (ROWS % TOGETHER == 0 || row + first_row < ROWS)
          copy_async<WIDTH * ELEMENT>(to[i] + offset + row * SEQS * 16 * ELEMENT, from[i] + row * ROW_STRIDE, valid[i]);
      from[i] += step;
    }
  }
};

// One value per cell of the lane from row `row` of a tile that a TileLoader has filled.
DEVICE void read_cells(float (&v)[CELLS], const scalar* tile, int row, const Place& place) {
  if constexpr (CELLS % 2 == 0) {
#pragma unroll
    for (int q = 0; q < CELLS; q += 2) {
      int offset = (row * SEQS + tile_row(place.sequence(q))) * 16 + 2 * place.g;
      float2 pair = unpack(*reinterpret_cast<const u32*>(tile + offset));
      v[q] = pair.x, v[q + 1] = pair.y;
    }
  } else {
    v[0] = to_float(tile[(row * SEQS + tile_row(place.sequence(0))) * 16 + place.unit(0) - place.tile_unit]);
  }
}
DEVICE void read_cells(float (&v)[CELLS], const float* tile, int row, const Place& place) {
#pragma unroll
  for (int q = 0; q < CELLS; q += 2) {
    const float* from = tile + (row * SEQS + tile_row(place.sequence(q))) * 16 + place.unit(q) - place.tile_unit;
    if constexpr (CELLS % 2 == 0) {
      float2 pair = *reinterpret_cast<const float2*>(from);
      v[q] = pair.x, v[q + 1] = pair.y;
    } else {
      v[q] = *from;
    }
  }
}

// Cells are read and written in words: of two units that lie side by side, or of one where a lane has one cell.
constexpr int PER_WORD = CELLS % 2 == 0 ? 2 : 1;
constexpr int WORDS = CELLS / PER_WORD;

// One 2-byte value per cell of the lane.
struct PackedCells {
  u32 words[WORDS];
  DEVICE void pack(const float (&v)[CELLS]) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = ::pack(v[w * PER_WORD], PER_WORD == 2 ? v[w * PER_WORD + PER_WORD - 1] : 0.0f);
  }
  DEVICE void unpack(float (&v)[CELLS]) const {
#pragma unroll
    for (int q = 0; q < CELLS; q++) {
      float2 pair = ::unpack(words[q / PER_WORD]);
      v[q] = q % PER_WORD ? pair.y : pair.x;
    }
  }
  DEVICE void store_global(scalar* const (&to)[WORDS], i64 offset, const bool (&valid)[CELLS]) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      scalar* p = to[w] + offset;
      if constexpr (PER_WORD == 2) {
        if (valid[2 * w]) *reinterpret_cast<u32*>(p) = words[w];
      } else {
        if (valid[w]) *reinterpret_cast<u16*>(p) = static_cast<u16>(words[w]);
      }
    }
  }
  DEVICE void store_operand(const u32 (&to)[WORDS], u32 offset) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if constexpr (PER_WORD == 2) store_shared(to[w] + offset, words[w]);
      else store_shared(to[w] + offset, static_cast<u16>(words[w]));
    }
  }
};

DEVICE void store_cells(const float (&v)[CELLS], float* const (&to)[WORDS], i64 offset, const bool (&valid)[CELLS]) {
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    float* p = to[w] + offset;
    if constexpr (PER_WORD == 2) {
      if (valid[2 * w]) *reinterpret_cast<float2*>(p) = make_float2(v[2 * w], v[2 * w + 1]);
    } else {
      if (valid[w]) *p = v[w];
    }
  }
}

// Where the words of the lane's cells stand in an operand tile at `address` whose first unit is `first`.
DEVICE void operand_addresses(u32 (&to)[WORDS], u32 address, int first, const Place& place) {
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    to[w] = address + operand_offset(place.unit(w * PER_WORD) - first, place.sequence(w * PER_WORD)) * 2;
    keep(to[w]);
  }
}

// Left-operand fragments of mma that stay on chip for the whole time loop: some in registers, the rest in shared
// memory. Fragment f of a warp is a 16 x 16 tile of R, or of R transposed; row g stands for unit 2g, row g + 8 for 2g + 1.
template <int TOTAL, int IN_REGISTERS, bool TRANSPOSED>
struct Fragments {
  static constexpr int BYTES = (TOTAL - IN_REGISTERS) * 32 * 16;  // of shared memory, per warp
  // Both kinds take turns, so that products from registers hide the reading of the others.
  static DEVICE constexpr int register_index(int f) { return f * IN_REGISTERS / TOTAL; }
  static DEVICE constexpr bool in_registers(int f) { return register_index(f + 1) > register_index(f); }
  static DEVICE constexpr int shared_offset(int f) { return (f - register_index(f)) * 512; }
  u32 registers[IN_REGISTERS + 1][4];  // the last is never used: register_index of trailing shared fragments
  u32 shared;  // address of this lane's part

  // tile(f, row, column) points at element (row, column) of R's tile, two elements of a row at a time, null outside R.
  template <class Tile>
  DEVICE void load(char* memory, const Place& place, Tile tile) {
    shared = shared_address(memory) + place.warp * BYTES + place.lane * 16;
    auto word = [&](int f, int row, int column) { return load_word(tile(f, row, column)); };
#pragma unroll
    for (int f = 0; f < TOTAL; f++) {
      u32 value[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {  // columns 2t, 2t + 1 and 2t + 8, 2t + 9 of the fragment
        int column = 2 * place.t + half * 8;
        if constexpr (TRANSPOSED) {
          u32 first = word(f, column, 2 * place.g), second = word(f, column + 1, 2 * place.g);
          value[2 * half] = __byte_perm(first, second, 0x5410), value[2 * half + 1] = __byte_perm(first, second, 0x7632);
        } else {
          value[2 * half] = word(f, 2 * place.g, column), value[2 * half + 1] = word(f, 2 * place.g + 1, column);
        }
      }
#pragma unroll
      for (int r = 0; r < 4; r++)
        if (in_registers(f)) registers[register_index(f)][r] = value[r];
      if (!in_registers(f)) {
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                     ::"r"(shared + shared_offset(f)), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
                     : "memory");
      }
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
  // c[n] += fragment f x b[n]; fragments come in order.
  DEVICE void multiply(Queue& queue, float (&c)[BATCH_TILES][4], int f, const u32 (&b)[BATCH_TILES][4], int half) const {
    const int in_shared = f - register_index(f);
    if (!in_registers(f)) fetch(queue, in_shared + AHEAD);
#pragma unroll
    for (int n = 0; n < BATCH_TILES; n++) {
      if (in_registers(f)) mma(c[n], registers[register_index(f)], b[n][2 * half], b[n][2 * half + 1]);
      else mma(c[n], queue.words[in_shared % (AHEAD + 1)], b[n][2 * half], b[n][2 * half + 1]);
    }
  }
};

// c[m][n] += fragments (m, k) x operand tile (k, n) for K_TILES tiles of 16 rows of the operand, from `address` on.
// Fragment k * M + m. SPLIT chains of mma per result keep the tensor cores busy where M is small.
template <int M, int K_TILES, class F>
DEVICE void product(float (&c)[M][BATCH_TILES][4], const F& fragments, u32 address, const Place& place) {
  constexpr int SPLIT = M * BATCH_TILES >= 4 || K_TILES < 2 ? 1 : 4 / (M * BATCH_TILES);
  float part[SPLIT][M][BATCH_TILES][4] = {};
  const u32 row = address + ((place.lane / 8) * SEQS + place.lane % 8) * 16;
  typename F::Queue queue;
  fragments.start(queue);
#pragma unroll
  for (int k = 0; k < K_TILES; k += 2) {
    u32 b[BATCH_TILES][4];
#pragma unroll
    for (int n = 0; n < BATCH_TILES; n++) {
      if (k + 1 == K_TILES) load_two_matrices(b[n][0], b[n][1], row + (k * 2 * SEQS + n * 8) * 16);
      else load_four_matrices(b[n], row + (k * 2 * SEQS + n * 8) * 16);
    }
#pragma unroll
    for (int half = 0; half < 2 && k + half < K_TILES; half++)
#pragma unroll
      for (int m = 0; m < M; m++) fragments.multiply(queue, part[(k + half) % SPLIT][m], (k + half) * M + m, b, half);
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
