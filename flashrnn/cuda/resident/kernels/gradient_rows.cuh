// The rows over which d_R is summed (the gradients of the gates, and the previous h), and their loads to shared memory
// while the time loop writes them.
#pragma once
#include "resident/kernels/chunks.cuh"
#include "resident/kernels/warpgroup.cuh"

constexpr int TOGETHER = ROWS / CHUNK_UNIT;  // blocks of CHUNK_UNIT rows in a load
// Bytes of a load in shared memory: all splits of the gates' gradients, then all splits of h.
constexpr int BLOCK = ROWS * BLOCK_ROW;
constexpr int LEFT = UNITS / BLOCK_COLUMNS * BLOCK, RIGHT = (COLUMNS + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK;
constexpr int STAGE = SPLITS * (LEFT + RIGHT);
constexpr int COLUMN_TILES = (D + COLUMNS - 1) / COLUMNS, UNIT_TILES = (GR * D + UNITS - 1) / UNITS;
constexpr i64 ROW = i64(HEADS) * D;
// Elements of a copy: 16 bytes, or as many as the largest power of two that divides the head size.
constexpr int VECTOR = BYTES == 4 ? 4 : D % 8 == 0 ? 8 : D % 4 == 0 ? 4 : 2;
static_assert(D % VECTOR == 0 && COLUMNS % 8 == 0 && ROWS % CHUNK_UNIT == 0);

// The position of a tile in d_R.
struct Tile {
  int head, unit, column;
  DEVICE Tile(int i) : head(i / (COLUMN_TILES * UNIT_TILES)), unit(i / COLUMN_TILES % UNIT_TILES * UNITS),
                       column(i % COLUMN_TILES * COLUMNS) {}
};

// Threads that copy: with half types a warpgroup of their own; in float32, where numbers are split, those that
// multiply.
constexpr int COPYING = BYTES == 2 ? 128 : THREADS;
DEVICE int copier() { return threadIdx.x % COPYING; }
// Returns how many rows, a power of two, all these threads can copy at once with `lanes` threads for a row.
constexpr int rows_at_once(int lanes, int most = 32) {
  return most * lanes <= COPYING ? most : rows_at_once(lanes, most / 2);
}
// A thread copies the same columns of every AT_ONCE-th row of the gradients, and of every H_AT_ONCE-th row of h.
constexpr int VECTORS = UNITS / VECTOR, AT_ONCE = rows_at_once(VECTORS), COPIES = ROWS / AT_ONCE;
constexpr int H_VECTORS = COLUMNS / VECTOR, H_LANES = (H_VECTORS + 7) / 8 * 8, H_AT_ONCE = rows_at_once(H_LANES);
constexpr int H_COPIES = ROWS / H_AT_ONCE;
static_assert(ROWS % 32 == 0);

// The rows of a load: TOGETHER blocks of CHUNK_UNIT rows. There are as many blocks as sequences. In batch-major memory,
// a block is CHUNK_UNIT steps of one sequence; in time-major memory, the blocks are CHUNK_UNIT steps of all sequences,
// in memory order.
struct Cursor {
  int step, block;                             // the first step and block; steps before the beginning are negative
  unsigned char reset[RESET ? ROWS / 32 : 1];  // whether a reset precedes the step of rows lane, lane + 32, ...
  DEVICE void advance(int sequences) {
    block += TOGETHER;
    if (block >= sequences) block = 0, step -= CHUNK_UNIT;
  }
};

// The tensors. Batch and time may be swapped in memory: consecutive steps are row_t rows apart.
struct Rows {
  const scalar *d_x, *d_u, *h, *initial;  // [B, T, GI, N, D], [B, T, GU, N, D], [B, T, N, D], [B, N, D] or null
  const unsigned char* reset;             // [B, T], always batch-major
  int sequences, steps, row_t;
  DEVICE explicit Rows(const Params& params)
      : d_x(params.d_x), d_u(params.d_u), h(params.h), initial(params.initial), reset(params.reset),
        sequences(int(params.B)), steps(int(params.T)), row_t(int(params.row_t)) {}
  DEVICE bool batch_outside() const { return row_t == 1; }
};

// The source addresses of a thread's copies.
struct RowSource {
  Rows rows;
  const scalar* gradients;  // the thread's columns in row 0
  i64 stride;               // between rows
  int head_column;          // the thread's column of h in a row [N, D]
  bool has_units, has_column;
  DEVICE RowSource(const Rows& rows, const Tile& tile) : rows(rows), gradients(rows.d_x), stride(0), head_column(0) {
    const int unit = tile.unit + copier() % VECTORS * VECTOR, gate = unit / D;
    const int column = tile.column + copier() % H_LANES * VECTOR;
    has_units = tile.head < HEADS && gate < GR;
    has_column = tile.head < HEADS && column < D;
    if (has_column) head_column = tile.head * D + column;
    if (!has_units) return;
    const bool from_x = INPUT_OF[gate] >= 0;
    stride = (from_x ? GI : GU) * ROW;
    gradients = (from_x ? rows.d_x + INPUT_OF[gate] * ROW : rows.d_u + RECURRENT_ONLY_OF[gate] * ROW) + tile.head * D +
        unit % D;
  }
  DEVICE static bool copies_gradients() { return copier() < AT_ONCE * VECTORS; }
  DEVICE static bool copies_h() { return copier() < H_AT_ONCE * H_LANES && copier() % H_LANES < H_VECTORS; }

  // Returns the first load from `step` on; advance() moves to the next one.
  DEVICE Cursor first(int step) const {
    Cursor at{step, 0};
    read_resets(at);
    return at;
  }
  DEVICE void advance(Cursor& at) const { at.advance(rows.sequences), read_resets(at); }

  // Calls left(i, from, valid) for each copy i of the thread from the gates' gradients, and right(i, from, valid) for
  // those from h. Copies that are not `valid` write zeros. All lanes of a warp call this.
  template <class Left, class Right>
  DEVICE void each_row(const Cursor& at, Left left, Right right) const {
    const bool batch_outside = rows.batch_outside();
    const i64 first = batch_outside
        ? i64(at.block) * rows.steps + at.step : i64(at.step) * rows.sequences + at.block * CHUNK_UNIT;
    const int apart = batch_outside ? rows.steps : CHUNK_UNIT;  // rows between consecutive blocks
    auto offset = [&](int row) { return i64(row / CHUNK_UNIT) * apart + row % CHUNK_UNIT; };
    const int own = copier() / VECTORS, own_h = copier() / H_LANES;
    u32 resets[ROWS / 32];  // a bit for each row, from the thread's first on: whether a reset precedes its step
    UNROLL for (int i = 0; i < ROWS / 32; i++) resets[i] = RESET ? __ballot_sync(~0u, at.reset[i]) >> own_h : 0;
    const scalar* from = gradients + (first + offset(own)) * stride;
    const scalar* from_h = rows.h + (first + offset(own_h) - rows.row_t) * ROW + head_column;
    auto reset = [&](int i) { return RESET && resets[i * H_AT_ONCE / 32] >> i * H_AT_ONCE % 32 & 1; };
    const int blocks = rows.sequences - at.block;  // that exist, of the load's
    // In batch-major memory, rows of a block, else rows of the load: before the first step, and up to its end.
    const int none = batch_outside ? -at.step : int(max(-first, i64(0)));
    const int initial = batch_outside ? 1 - at.step : int(max(rows.sequences - first, i64(0)));
    if (initial <= 0) {  // no row is a first step
      auto each = [&](auto exists) {
        UNROLL for (int i = 0; i < COPIES; i++)
          if (copies_gradients()) left(i, from + offset(i * AT_ONCE) * stride, has_units && exists(own + i * AT_ONCE));
        UNROLL for (int i = 0; i < H_COPIES; i++)
          if (copies_h())
            right(i, from_h + offset(i * H_AT_ONCE) * ROW, has_column && exists(own_h + i * H_AT_ONCE) && !reset(i));
      };
      if (blocks >= TOGETHER) each([](int) { return true; });
      else each([&](int row) { return row / CHUNK_UNIT < blocks; });
    } else {
      auto in_block = [&](int row) { return batch_outside ? row % CHUNK_UNIT : row; };
      auto exists = [&](int row) { return row / CHUNK_UNIT < blocks && in_block(row) >= none; };
      const scalar* from_initial = rows.initial + (batch_outside ? at.block : first) * ROW + head_column;
      constexpr int UNROLLED = BYTES == 2 ? 4 : AHEAD > 0 ? 1 : ROWS;  // registers cannot be indexed dynamically
#pragma unroll UNROLLED
      for (int i = 0; i < COPIES; i++)
        if (copies_gradients()) left(i, from + offset(i * AT_ONCE) * stride, has_units && exists(own + i * AT_ONCE));
#pragma unroll UNROLLED
      for (int i = 0; i < H_COPIES; i++) {
        const int row = own_h + i * H_AT_ONCE;
        const bool is_first = in_block(row) < initial;
        const scalar* h = is_first
            ? from_initial + (batch_outside ? row / CHUNK_UNIT : row) * ROW : from_h + offset(i * H_AT_ONCE) * ROW;
        if (copies_h()) right(i, h, has_column && exists(row) && !reset(i) && !(is_first && !rows.initial));
      }
    }
  }

  // Reads the resets of a load. Called one load ahead, because copies of h must wait for them.
  DEVICE void read_resets(Cursor& at) const {
    if constexpr (RESET) {
      const u32 sequences = rows.sequences, reciprocal = 0xffffffffu / sequences + 1;
      UNROLL for (int i = 0; i < ROWS / 32; i++) {
        const u32 row = threadIdx.x % 32 + i * 32, in_order = at.block * CHUNK_UNIT + row;
        // Exact for the 2 to 16,383 sequences of a loop that runs in one wave in time-major memory.
        const u32 later = rows.batch_outside() ? row % CHUNK_UNIT : __umulhi(in_order, reciprocal);
        const u32 sequence = rows.batch_outside() ? at.block + row / CHUNK_UNIT : in_order - later * sequences;
        const int step = at.step + int(later);
        const bool exists = at.block + row / CHUNK_UNIT < sequences && step >= 0;
        at.reset[i] = exists ? rows.reset[i64(sequence) * rows.steps + step] : 0;
      }
    }
  }
};

// The destination addresses of a thread's copies in a stage of shared memory.
struct Destination {
  // Returns the offset of an element in a matrix, which is stored in blocks of BLOCK_COLUMNS columns.
  DEVICE static u32 in_blocks(int row, int column) {
    return column / BLOCK_COLUMNS * BLOCK + swizzled(row, column % BLOCK_COLUMNS / 8) + column % 8 * 2;
  }
  // Returns the offset of the same column `rows` rows later. `rows` must be divisible by a power of two greater than
  // the row.
  DEVICE static u32 further(u32 offset, int rows) { return (offset ^ rows % 8 * 16) + rows * BLOCK_ROW; }
  u32 left, right;
  DEVICE Destination(u32 stage)
      : left(stage + in_blocks(copier() / VECTORS, copier() % VECTORS * VECTOR)),
        right(stage + SPLITS * LEFT + in_blocks(copier() / H_LANES, copier() % H_LANES * VECTOR)) {}
  DEVICE u32 left_row(int i) const { return further(left, i * AT_ONCE); }
  DEVICE u32 right_row(int i) const { return further(right, i * H_AT_ONCE); }
};

// Half types: asynchronous copies.
DEVICE void copy_load(u32 stage, const RowSource& source, const Cursor& at) {
  const Destination to(stage);
  source.each_row(
      at, [&](int i, const scalar* from, bool valid) { copy_async<VECTOR * BYTES>(to.left_row(i), from, valid); },
      [&](int i, const scalar* from, bool valid) { copy_async<VECTOR * BYTES>(to.right_row(i), from, valid); });
}

// Stores the splits of four floats, `apart` bytes apart.
DEVICE void store_splits(u32 to, int apart, const uint4& v) {
  PairOf<float> low{__uint_as_float(v.x), __uint_as_float(v.y)}, high{__uint_as_float(v.z), __uint_as_float(v.w)};
  UNROLL for (int p = 0; p < SPLITS; p++) store_shared(to + p * apart, make_uint2(low.next_split(), high.next_split()));
}

// float32: through registers, where floats are split.
struct Floats {
  uint4 left[COPIES], right[H_COPIES];
  DEVICE void load(const RowSource& source, const Cursor& at) {
    auto load_from =
        [](const scalar* from, bool valid) { return load_exchanged(reinterpret_cast<const uint4*>(from), valid); };
    source.each_row(
        at, [&](int i, const scalar* from, bool valid) { left[i] = load_from(from, valid); },
        [&](int i, const scalar* from, bool valid) { right[i] = load_from(from, valid); });
  }
  DEVICE void store(u32 stage) const {
    const Destination to(stage);
    UNROLL for (int i = 0; i < COPIES; i++) store_splits(to.left_row(i), LEFT, left[i]);
    UNROLL for (int i = 0; i < H_COPIES; i++)
      if (RowSource::copies_h()) store_splits(to.right_row(i), RIGHT, right[i]);
  }
};

// TF32, whose two splits leave space in shared memory: asynchronous copies to the thread's own part of it, AHEAD loads
// ahead.
constexpr bool COPIES_FLOATS = BYTES == 4 && AHEAD > 0;
// bytes of a load
constexpr int OWN_COPIES = COPIES + H_COPIES, COPIED = COPIES_FLOATS ? OWN_COPIES * THREADS * 16 : 0;
struct CopiedFloats {
  u32 own;
  DEVICE explicit CopiedFloats(u32 memory) : own(memory + threadIdx.x * 16) {}
  DEVICE u32 at(int load, int copy) const { return own + (load * OWN_COPIES + copy) * (THREADS * 16); }
  DEVICE void copy(int load, const RowSource& source, const Cursor& cursor) const {
    source.each_row(
        cursor, [&](int i, const scalar* from, bool valid) { copy_async<16>(at(load, i), from, valid); },
        [&](int i, const scalar* from, bool valid) { copy_async<16>(at(load, COPIES + i), from, valid); });
  }
  DEVICE void store(int load, u32 stage) const {
    const Destination to(stage);
    UNROLL for (int i = 0; i < COPIES; i++) store_splits(to.left_row(i), LEFT, load_shared(at(load, i)));
    UNROLL for (int i = 0; i < H_COPIES; i++)
      if (RowSource::copies_h()) store_splits(to.right_row(i), RIGHT, load_shared(at(load, COPIES + i)));
  }
};
