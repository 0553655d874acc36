// d_R beside the backward's time loop, on multiprocessors that the loop leaves idle: the sum over rows, which are steps of
// sequences, of each gate's gradient times h before the step. A block holds TILES tiles of d_R, UNITS of a head's GR * D rows
// times COLUMNS of its D columns, one of them in registers, and goes over all rows, part after part, as the loop writes them.
#pragma once
#include "parts.cuh"
#include "warpgroup.cuh"

static_assert(THREADS == 2 * UNITS);        // a warpgroup for each 64
constexpr int AHEAD = STAGES - 2;           // loads on their way; products of two more may be under way
constexpr int TOGETHER = ROWS / PART_UNIT;  // blocks of PART_UNIT rows that a load takes
constexpr int BLOCK = ROWS * BLOCK_ROW, LEFT = UNITS / BLOCK_COLUMNS * BLOCK;  // bytes of the gates' gradients; then comes h
constexpr int STAGE = LEFT + (COLUMNS + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK;
constexpr int SAVED = TILES > 1 ? UNITS * COLUMNS * 4 : 0;  // bytes of the sums that are put aside
constexpr int COLUMN_TILES = (D + COLUMNS - 1) / COLUMNS, UNIT_TILES = (GR * D + UNITS - 1) / UNITS;
constexpr i64 ROW = i64(HEADS) * D;
static_assert(BYTES == 2 && !RESET && D % 8 == 0 && COLUMNS % 8 == 0 && TILES <= 2 && AHEAD > 0);
static_assert(ROWS % PART_UNIT == 0 && SAVED % 1024 == 0 && SHARED_BYTES_EXPECTED >= SAVED + STAGES * STAGE);

// The tile's place in d_R.
struct Tile {
  int head, unit, column;
  DEVICE Tile(int i) : head(i / (COLUMN_TILES * UNIT_TILES)), unit(i / COLUMN_TILES % UNIT_TILES * UNITS),
                       column(i % COLUMN_TILES * COLUMNS) {}
};

// Which rows a load takes: TOGETHER blocks of PART_UNIT rows, of as many blocks as there are sequences. With the batch
// outside, a block is PART_UNIT steps of a sequence; with time outside, blocks are PART_UNIT steps of all sequences in order.
struct Cursor {
  int step, block;  // the first of both; steps before the first one are negative
  DEVICE void advance(int sequences) {
    block += TOGETHER;
    if (block >= sequences) block = 0, step -= PART_UNIT;
  }
};

constexpr int power_of_two(int most) { return most < 2 ? 1 : 2 * power_of_two(most / 2); }  // the largest

// The tensors whose rows a load takes; batch and time may be swapped in memory, row_t rows lie between steps.
struct Rows {
  const scalar *d_x, *d_u, *h, *initial;  // [B, T, GI, N, D], [B, T, GU, N, D], [B, T, N, D], [B, N, D] or null
  int sequences, steps, row_t;
  DEVICE bool batch_outside() const { return row_t == 1; }
};

// Where a thread copies from: 16 bytes of every few rows.
struct Source {
  static constexpr int VECTORS = UNITS / 8, AT_ONCE = THREADS / VECTORS;  // of a row; rows
  static constexpr int H_VECTORS = COLUMNS / 8, H_AT_ONCE = power_of_two(THREADS / H_VECTORS);
  Rows rows;
  const scalar* gradients;  // of the thread's units, in row 0
  i64 stride;               // from row to row
  int of_head;              // the thread's column among all heads' units
  bool has_units, has_column;
  DEVICE Source(const Rows& rows, const Tile& tile) : rows(rows), gradients(rows.d_x), stride(0), of_head(0) {
    const int unit = tile.unit + threadIdx.x % VECTORS * 8, gate = unit / D, column = tile.column + threadIdx.x % H_VECTORS * 8;
    has_units = tile.head < HEADS && gate < GR;
    has_column = tile.head < HEADS && column < D;
    if (has_column) of_head = tile.head * D + column;
    if (!has_units) return;
    const bool from_x = INPUT_OF[gate] >= 0;
    stride = (from_x ? GI : GU) * ROW;
    gradients = (from_x ? rows.d_x + INPUT_OF[gate] * ROW : rows.d_u + ONLY_OF[gate] * ROW) + tile.head * D + unit % D;
  }
  DEVICE void copy(u32 to, const Cursor& at) const {
    const bool batch_outside = rows.batch_outside();
    const i64 first = batch_outside ? i64(at.block) * rows.steps + at.step : i64(at.step) * rows.sequences + at.block * PART_UNIT;
    const int apart = batch_outside ? rows.steps : PART_UNIT;  // rows between blocks
    auto offset = [&](int row) { return i64(row / PART_UNIT) * apart + row % PART_UNIT; };
    const int own = threadIdx.x / VECTORS, own_h = threadIdx.x / H_VECTORS;
    const bool copies_h = own_h < H_AT_ONCE && own_h < ROWS;
    const u32 left_to = to + in_blocks(own, threadIdx.x % VECTORS);
    const u32 right_to = to + LEFT + in_blocks(own_h, threadIdx.x % H_VECTORS);
    if (at.step > 0 && at.block + TOGETHER <= rows.sequences) {  // all rows are there, and none is a first step's
      const scalar* left = gradients + (first + offset(own)) * stride;
      const scalar* right = rows.h + (first + offset(own_h) - rows.row_t) * ROW + of_head;
#pragma unroll
      for (int i = 0; i < ROWS; i += AT_ONCE) copy_async<16>(left_to + i * BLOCK_ROW, left + offset(i) * stride, has_units);
#pragma unroll
      for (int i = 0; i < ROWS; i += H_AT_ONCE)
        if (copies_h) copy_async<16>(right_to + i * BLOCK_ROW, right + offset(i) * ROW, has_column);
    } else {
      auto exists = [&](int row) {
        return at.block + row / PART_UNIT < rows.sequences && (batch_outside ? at.step + row % PART_UNIT : first + row) >= 0;
      };
      auto h_before = [&](int row) -> const scalar* {
        const i64 index = first + offset(row), sequence = batch_outside ? at.block + row / PART_UNIT : index;
        const bool first_step = batch_outside ? at.step + row % PART_UNIT == 0 : index < rows.sequences;
        if (!first_step) return rows.h + (index - rows.row_t) * ROW;
        return rows.initial ? rows.initial + sequence * ROW : nullptr;
      };
#pragma unroll 1
      for (int i = 0; i < ROWS; i += AT_ONCE) {
        const bool valid = has_units && exists(own + i);
        copy_async<16>(left_to + i * BLOCK_ROW, valid ? gradients + (first + offset(own + i)) * stride : gradients, valid);
      }
#pragma unroll 1
      for (int i = 0; i < ROWS && copies_h; i += H_AT_ONCE) {
        const scalar* before = has_column && exists(own_h + i) ? h_before(own_h + i) : nullptr;
        copy_async<16>(right_to + i * BLOCK_ROW, (before ? before : rows.h) + of_head, before);
      }
    }
  }
  DEVICE static u32 in_blocks(int row, int vector) { return vector / 8 * BLOCK + swizzled(row, vector % 8); }
};

// What a warpgroup adds up.
struct Sums {
  float c[COLUMNS / 2] = {};
  DEVICE void add(u32 stage) {
    const auto left = matrix(stage + threadIdx.x / 128 * BLOCK, BLOCK), right = matrix(stage + LEFT, BLOCK);
    warpgroup_begin();
#pragma unroll
    for (int row = 0; row < ROWS; row += 16) warpgroup_mma(c, from_row(left, row), from_row(right, row));
    warpgroup_commit();
  }
  // Takes turns with what the thread has put aside.
  DEVICE void swap(float4* saved) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 4) {
      float4& other = saved[i / 4 * THREADS + threadIdx.x];
      const float4 own = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
      c[i] = other.x, c[i + 1] = other.y, c[i + 2] = other.z, c[i + 3] = other.w;
      other = own;
    }
  }
  DEVICE void store(u32* d_R, const Tile& tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int unit = tile.unit + threadIdx.x / 32 * 16 + half * 8 + lane / 4, gate = unit / D;
      const i64 row = ((i64(gate) * HEADS + tile.head) * D + unit % D) * D;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        const int column = tile.column + n * 8 + lane % 4 * 2;
        const u32 pair = pack(c[4 * n + 2 * half], c[4 * n + 2 * half + 1]);
        if (gate < GR && tile.head < HEADS && column < D) d_R[(row + column) / 2] = pair;
      }
    }
  }
};

// d_x [B, T, GI, N, D], d_u [B, T, GU, N, D] (gradients of the gates without input), h [B, T, N, D], initial h [B, N, D] or
// null -> d_R [GR, N, D, D]. Batch and time may be swapped in memory; row_t rows lie between steps. Each of the loop's
// `producers` blocks adds one to the word in `progress` of each part that it is done with, but the last.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_concurrent_gradient(const scalar* d_x, const scalar* d_u, const scalar* h, const scalar* initial,
                             u32* __restrict__ d_R, const u32* progress, i64 producers, i64 B, i64 T, i64 row_t) {
  extern __shared__ __align__(1024) char memory[];
  const int steps = int(T), sequences = int(B);
  const Rows rows{d_x, d_u, h, initial, sequences, steps, int(row_t)};
  const u32 shared = shared_address(memory) + SAVED;
  float4* saved = reinterpret_cast<float4*>(memory);

  Sums sums;
  if (TILES > 1)
    for (int i = threadIdx.x; i < SAVED / 16; i += THREADS) saved[i] = make_float4(0, 0, 0, 0);
  int held = 0;  // which of the tiles is in registers
  for (int done = 0, part = 0, count; done < steps; done += count, part++) {
    count = part_steps(done, steps - done);
    if (done + count == steps) wait_for_primary();
    else if (threadIdx.x == 0) await(progress + part, u32(producers));
    __syncthreads();
    const int loads = (count + PART_UNIT - 1) / PART_UNIT * ((sequences + TOGETHER - 1) / TOGETHER);
    for (int turn = 1;; turn++) {
      const Source source(rows, Tile(blockIdx.x * TILES + held));
      Cursor cursor{steps - done - PART_UNIT, 0};
      for (int load = 0; load < AHEAD; load++) {
        if (load < loads) source.copy(shared + load * STAGE, cursor);
        copy_commit(), cursor.advance(sequences);
      }
      for (int load = 0, stage = 0; load < loads; load++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        copy_wait<AHEAD - 1>();
        copies_before_products();
        __syncthreads();
        sums.add(shared + stage * STAGE);
        if (load + AHEAD < loads) source.copy(shared + (stage + AHEAD < STAGES ? stage + AHEAD : stage - 2) * STAGE, cursor);
        copy_commit(), cursor.advance(sequences);
        warpgroup_wait<1>();  // for the load before
      }
      warpgroup_wait<0>();
      __syncthreads();
      if (turn == TILES) break;
      sums.swap(saved), held ^= 1;
    }
  }
  for (int turn = 0; turn < TILES; turn++) {
    if (turn > 0) sums.swap(saved), held ^= 1;
    sums.store(d_R, Tile(blockIdx.x * TILES + held));
  }
}
