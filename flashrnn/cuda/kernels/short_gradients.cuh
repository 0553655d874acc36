// The gradients of all weights after a short sequence, in one launch: of R, of b and, if the layer's input is given, of
// W. Those of R and W are sums over rows (a row is a step of a sequence) of each gate's gradient times the previous h,
// or times the input. A block holds the sums of UNITS units of gates by COLUMNS columns in registers.
#pragma once
#include "kernels/partial_sums.cuh"
#include "kernels/previous_h.cuh"

constexpr int MOST = 16 / BYTES, VECTOR = D % MOST == 0 ? MOST : D % 4 == 0 ? 4 : 2;  // elements of a copy
constexpr int WIDTH = GI * HEADS * D;                        // of d_x
constexpr int UNIT_TILES = (GR * D + UNITS - 1) / UNITS, COLUMN_TILES = (D + COLUMNS - 1) / COLUMNS;  // of a head's d_R
constexpr int TILES_OF_R = HEADS * UNIT_TILES * COLUMN_TILES;
constexpr int LEFT_PITCH = UNITS * BYTES + 16, RIGHT_PITCH = COLUMNS * BYTES + 16;  // eight rows access different banks
constexpr int RIGHT = ROWS * LEFT_PITCH, STAGE = RIGHT + ROWS * RIGHT_PITCH;
constexpr int THREADS = 32 * WARPS, WARP_UNITS = UNITS / WARPS;
static_assert(D % VECTOR == 0 && THREADS * VECTOR >= UNITS && STAGES * STAGE == SHARED_BYTES_EXPECTED);
using Sums = float[WARP_UNITS / 16][COLUMNS / 8][4];

// Starts to copy ROWS rows of COUNT elements. A thread copies the same vector of every (THREADS / VECTORS)-th row, from
// from(row); zeros if that is null.
template <int COUNT, int PITCH, class From>
DEVICE void copy_rows(u32 to, From from) {
  constexpr int VECTORS = COUNT / VECTOR;
  UNROLL for (int first = 0; first < ROWS; first += THREADS / VECTORS) {
    const int row = first + threadIdx.x / VECTORS;
    const scalar* own = from(row);
    copy_async<VECTOR * BYTES>(to + row * PITCH + threadIdx.x % VECTORS * (VECTOR * BYTES), own, own);
  }
}
// Returns the first of the thread's columns in a row of COUNT elements.
template <int COUNT>
DEVICE int own_column() { return threadIdx.x % (COUNT / VECTOR) * VECTOR; }

// Adds the products of a stage's rows, at `from` in shared memory, to c. Rows are the inner axis of the product, so
// both operands are loaded transposed. For ldmatrix, lanes 8 to 15 pass the next columns of the gradients and lanes 16
// to 31 the next rows; for the right operand the other way round.
DEVICE void add_half_products(Sums& c, u32 from) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 left = from + (lane % 8 + lane / 16 * 8) * LEFT_PITCH + (warp * WARP_UNITS + lane / 8 % 2 * 8) * BYTES;
  const u32 right = from + RIGHT + lane % 16 * RIGHT_PITCH + lane / 16 * (8 * BYTES);
  UNROLL for (int k = 0; k < ROWS; k += 16) {
    u32 a[WARP_UNITS / 16][4];
    UNROLL for (int m = 0; m < WARP_UNITS / 16; m++)
      load_four_transposed(a[m], left + k * LEFT_PITCH + m * (16 * BYTES));
    UNROLL for (int n = 0; n < COLUMNS; n += 16) {
      u32 b[4];
      load_four_transposed(b, right + k * RIGHT_PITCH + n * BYTES);
      UNROLL for (int m = 0; m < WARP_UNITS / 16; m++)
        mma(c[m][n / 8], a[m], b[0], b[1]), mma(c[m][n / 8 + 1], a[m], b[2], b[3]);
    }
  }
}

// The same in float32, which the tensor cores do not multiply: for few rows, storing the results takes longer.
DEVICE void add_float_products(Sums& c, const char* from) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const char* left = from + (warp * WARP_UNITS + lane / 4) * BYTES;
  const char* right = from + RIGHT + lane % 4 * (2 * BYTES);
#pragma unroll 4
  for (int k = 0; k < ROWS; k++) {
    float a[WARP_UNITS / 8];
    UNROLL for (int m = 0; m < WARP_UNITS / 8; m++)
      a[m] = *reinterpret_cast<const float*>(left + k * LEFT_PITCH + m * (8 * BYTES));
    UNROLL for (int n = 0; n < COLUMNS; n += 8) {
      const float2 b = *reinterpret_cast<const float2*>(right + k * RIGHT_PITCH + n * BYTES);
      UNROLL for (int m = 0; m < WARP_UNITS / 8; m++) {
        c[m / 2][n / 8][m % 2 * 2] = fmaf(a[m], b.x, c[m / 2][n / 8][m % 2 * 2]);
        c[m / 2][n / 8][m % 2 * 2 + 1] = fmaf(a[m], b.y, c[m / 2][n / 8][m % 2 * 2 + 1]);
      }
    }
  }
}

// Computes and stores a block's tile of the sum over `rows` rows of left(row) times right(row), the addresses of the
// columns that this thread copies (null: zeros). The sum of (unit, column) is stored at index(unit, column) of
// `result`, unless that is negative (padding).
template <class Left, class Right, class Index>
DEVICE void store_product(char* memory, int rows, Left left, Right right, Pair* result, Index index) {
  auto copy = [&](int stage, int row) {
    const u32 to = shared_address(memory) + stage * STAGE;
    copy_rows<UNITS, LEFT_PITCH>(to, [&](int i) { return row + i < rows ? left(row + i) : nullptr; });
    copy_rows<COLUMNS, RIGHT_PITCH>(to + RIGHT, [&](int i) { return row + i < rows ? right(row + i) : nullptr; });
    copy_commit();
  };
  Sums c = {};
  UNROLL for (int s = 0; s < STAGES - 1; s++) copy(s, s * ROWS);
  for (int row = 0, stage = 0; row < rows; row += ROWS, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    copy(stage ? stage - 1 : STAGES - 1, row + (STAGES - 1) * ROWS);
    if constexpr (BYTES == 4) add_float_products(c, memory + stage * STAGE);
    else add_half_products(c, shared_address(memory) + stage * STAGE);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  UNROLL for (int m = 0; m < WARP_UNITS / 16; m++)
    UNROLL for (int n = 0; n < COLUMNS; n += 8)
      UNROLL for (int half = 0; half < 2; half++) {
        const i64 to = index(warp * WARP_UNITS + m * 16 + half * 8 + lane / 4, n + lane % 4 * 2);
        if (to >= 0) result[to / 2].round(c[m][n / 8][2 * half], c[m][n / 8][2 * half + 1]);
      }
}

// Computes tile number `tile` of d_R. Its units are those of a head's recurrent gates, gate after gate.
DEVICE void store_d_R(const Params& params, char* memory, int rows, int tile) {
  const int head = tile / (UNIT_TILES * COLUMN_TILES), first_column = tile % COLUMN_TILES * COLUMNS;
  const int first_unit = tile / COLUMN_TILES % UNIT_TILES * UNITS, unit = first_unit + own_column<UNITS>();
  const scalar* gradient = nullptr;
  int width = 0;
  UNROLL for (int gate = 0; gate < GR; gate++) {
    if (unit / D != gate) continue;
    const bool has_input = INPUT_OF[gate] >= 0;
    gradient = (has_input ? params.d_x : params.d_u) +
        ((has_input ? INPUT_OF[gate] : RECURRENT_ONLY_OF[gate]) * HEADS + head) * D + unit % D;
    width = (has_input ? GI : GU) * (HEADS * D);
  }
  const int column = first_column + own_column<COLUMNS>();
  const PreviousRows before(params, head, column);
  store_product(
      memory, rows, [&](int row) { return gradient ? gradient + i64(row) * width : nullptr; },
      [&](int row) { return column < D ? before(row) : nullptr; }, params.d_R,
      [&](int unit, int column) -> i64 {
        unit += first_unit, column += first_column;
        return unit < GR * D && column < D ? ((i64(unit / D) * HEADS + head) * D + unit % D) * D + column : -1;
      });
}

// Computes tile number `tile` of d_W. Its units are the columns of d_x.
DEVICE void store_d_W(const Params& params, char* memory, int rows, int tile) {
  const int features = int(params.features), column_tiles = (features + COLUMNS - 1) / COLUMNS;
  const int first_unit = tile / column_tiles * UNITS, first_column = tile % column_tiles * COLUMNS;
  const int unit = first_unit + own_column<UNITS>(), column = first_column + own_column<COLUMNS>();
  store_product(
      memory, rows, [&](int row) { return unit < WIDTH ? params.d_x + i64(row) * WIDTH + unit : nullptr; },
      [&](int row) { return column < features ? params.input + i64(row) * features + column : nullptr; }, params.d_W,
      [&](int unit, int column) -> i64 {
        unit += first_unit, column += first_column;
        return unit < WIDTH && column < features ? i64(unit) * features + column : -1;
      });
}

// Params: types and shapes are in short_gradients.py. d_x, d_u, h, initial h or null, reset -> d_R; d_x, input -> d_W
// (features = 0 without it); partial -> d_b, the sum over its first axis, in the dtype of h if half_bias, else in
// float32. The grid has the tiles of d_R, then those of d_W, then the blocks of d_b.
extern "C" __global__ void __launch_bounds__(THREADS)
flashrnn_short_gradients(PARAMETERS) {
  extern __shared__ __align__(16) char memory[];
  const Params params{PARAMETER_NAMES};
  const int rows = int(params.B * params.T);
  const int tiles_of_W = int((params.features + COLUMNS - 1) / COLUMNS) * ((WIDTH + UNITS - 1) / UNITS);
  int block = blockIdx.x;
  if (block < TILES_OF_R) return store_d_R(params, memory, rows, block);
  block -= TILES_OF_R;
  if (block < tiles_of_W) return store_d_W(params, memory, rows, block);
  block -= tiles_of_W;
  const i64 pair = i64(block) * THREADS + threadIdx.x;
  if (pair >= params.pairs) return;
  const float2 sum = sum_of_pair(params.partial, params.partials, params.pairs, pair);
  if (params.half_bias) reinterpret_cast<Pair*>(params.d_b)[pair].round(sum.x, sum.y);
  else reinterpret_cast<PairOf<float>*>(params.d_b)[pair].round(sum.x, sum.y);
}
