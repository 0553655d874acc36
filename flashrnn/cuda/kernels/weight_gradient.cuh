// d_R of narrow heads after the time loop: the sum over rows (a row is a step of a sequence) of each gate's gradient
// times the previous h. The rows are split between clusters and the CLUSTER blocks of each (split-K). A block holds the
// sums of GATES_AT_ONCE gates and HEADS_AT_ONCE heads in registers; the blocks of a cluster reduce theirs through
// distributed shared memory.
#pragma once
#include "kernels/cluster.cuh"
#include "kernels/previous_h.cuh"

constexpr int PADDED = (D + 15) / 16 * 16, HEAD_TILES = GATES_AT_ONCE * PADDED / 16;  // of 16 units of a gate
constexpr int TILES = HEAD_TILES % 2 ? 1 : 2;                                         // of a warp; all are of one head
constexpr int THREADS = 32 * HEADS_AT_ONCE * HEAD_TILES / TILES;
constexpr int PITCH = HEADS_AT_ONCE * PADDED * BYTES + 16;  // bytes between rows; eight rows access different banks
constexpr int MATRIX = ROWS * PITCH, STAGE = (GATES_AT_ONCE + 1) * MATRIX;  // the gradients of the gates, and h
constexpr int HEAD_GROUPS = (HEADS + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
constexpr int GATE_GROUPS = (GR + GATES_AT_ONCE - 1) / GATES_AT_ONCE;
constexpr int VECTOR = D % 8 == 0 ? 8 : D % 4 == 0 ? 4 : 2;  // elements of a copy
constexpr int ROW_VECTORS = HEADS_AT_ONCE * D / VECTOR, ROWS_AT_ONCE = THREADS / ROW_VECTORS;
constexpr int UNITS = 16 * HEADS_AT_ONCE * HEAD_TILES, RESULTS = PADDED + 8;  // floats between units, in shared memory
constexpr int RESULT_BYTES = CLUSTER == 1 ? 0 : UNITS * RESULTS * 4;
constexpr int SHARED_BYTES = STAGES * STAGE > RESULT_BYTES ? STAGES * STAGE : RESULT_BYTES;
static_assert(D % VECTOR == 0 && BYTES == 2 && ROWS_AT_ONCE > 0 && SHARED_BYTES == SHARED_BYTES_EXPECTED);

// The rows that a thread copies: the same columns of every ROWS_AT_ONCE-th row.
struct RowSource {
  const scalar *d_x, *d_u;
  PreviousRows before;
  int first_gate, first_row;
  bool has_columns;
  u32 offset;  // of the thread's columns in a matrix in shared memory

  DEVICE RowSource(const Params& params, int first_head, int first_gate)
      : before(params, first_head + column() / D, column() % D), first_gate(first_gate) {
    first_row = threadIdx.x / ROW_VECTORS;
    const int head = column() / D, from = first_head * D + column();
    has_columns = first_row < ROWS_AT_ONCE && first_head + head < HEADS;
    offset = first_row * PITCH + (head * PADDED + column() % D) * BYTES;
    d_x = params.d_x + from, d_u = params.d_u + from;
  }
  DEVICE static int column() { return threadIdx.x % ROW_VECTORS * VECTOR; }
  // Starts to copy ROWS rows from `row` on to shared memory; rows from `end` on are zeros.
  DEVICE void copy(u32 to, int row, int end) const {
    UNROLL for (int r = 0; r < ROWS; r += ROWS_AT_ONCE) {
      const int own = row + r + first_row;
      if (r + first_row >= ROWS || first_row >= ROWS_AT_ONCE) continue;
      const bool valid = own < end && has_columns;
      const scalar *x = d_x + i64(own) * (GI * HEADS * D), *u = d_u + i64(own) * (GU * HEADS * D);
      const u32 at = to + offset + r * PITCH;
      UNROLL for (int j = 0; j < GR; j++) {
        const int gate = GATE_GROUPS == 1 ? j : j - first_gate;
        if (gate < 0 || gate >= GATES_AT_ONCE) continue;
        const scalar* from = INPUT_OF[j] >= 0 ? x + INPUT_OF[j] * (HEADS * D) : u + RECURRENT_ONLY_OF[j] * (HEADS * D);
        copy_async<VECTOR * BYTES>(at + gate * MATRIX, from, valid);
      }
      const scalar* before_row = valid ? before(own) : nullptr;
      copy_async<VECTOR * BYTES>(at + GATES_AT_ONCE * MATRIX, before_row, before_row);
    }
    copy_commit();
  }
};

// Maps a block's sums to indices in d_R [GR, HEADS, D, D]; negative for padding.
struct ResultIndices {
  int first_head, first_gate;

  DEVICE i64 operator()(int unit, int column) const {
    const int gate = first_gate + unit / PADDED % GATES_AT_ONCE, row = unit % PADDED;
    const int head = first_head + unit / PADDED / GATES_AT_ONCE;
    return gate < GR && head < HEADS && row < D && column < D
        ? ((i64(gate) * HEADS + head) * D + row) * D + column : -1;
  }
};

// Adds the products of a stage's rows, at `from` in shared memory, to c. Rows are the inner axis of the product, so
// both operands are loaded transposed.
DEVICE void add_products(float (&c)[TILES][PADDED / 8][4], u32 from, const u32 (&left)[TILES], u32 right) {
  UNROLL for (int k = 0; k < ROWS; k += 16) {
    u32 a[TILES][4];
    UNROLL for (int m = 0; m < TILES; m++) load_four_transposed(a[m], from + left[m] + k * PITCH);
    UNROLL for (int n = 0; n < PADDED; n += 16) {
      u32 b[4];
      load_four_transposed(b, from + right + k * PITCH + n * BYTES);
      UNROLL for (int m = 0; m < TILES; m++) mma(c[m][n / 8], a[m], b[0], b[1]), mma(c[m][n / 8 + 1], a[m], b[2], b[3]);
    }
  }
}

// Stores the sums of a block: in its shared memory for the other blocks of the cluster or, without clusters, in a
// partial sum of d_R.
DEVICE void store_sums(const float (&c)[TILES][PADDED / 8][4], char* memory, float* partial,
                       const ResultIndices& index) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, lane_in_quad = lane % 4;
  UNROLL for (int m = 0; m < TILES; m++)
    UNROLL for (int n = 0; n < PADDED; n += 8)
      UNROLL for (int half = 0; half < 2; half++) {
        const int unit = (warp * TILES + m) * 16 + half * 8 + quad, column = n + 2 * lane_in_quad;
        const float2 pair = make_float2(c[m][n / 8][2 * half], c[m][n / 8][2 * half + 1]);
        if (CLUSTER > 1) *reinterpret_cast<float2*>(memory + (unit * RESULTS + column) * 4) = pair;
        else if (index(unit, column) >= 0) *reinterpret_cast<float2*>(partial + index(unit, column)) = pair;
      }
}

// Stores two neighbouring sums: in float32 in `partial` or, if that is null, rounded in d_R.
DEVICE void store_pair(float* partial, u32* d_R, i64 to, float low, float high) {
  if (partial) *reinterpret_cast<float2*>(partial + to) = make_float2(low, high);
  else d_R[to / 2] = pack(low, high);
}

// Adds up the sums that the blocks of the cluster have stored, each block for its share of the results. All of them
// must have synchronised since store_sums.
DEVICE void reduce_scatter(u32 shared, int rank, float* partial, u32* d_R, const ResultIndices& index) {
  for (int i = rank * THREADS + threadIdx.x; i < UNITS * PADDED / 4; i += CLUSTER * THREADS) {
    const int unit = i / (PADDED / 4), column = i % (PADDED / 4) * 4;
    float4 sum = make_float4(0, 0, 0, 0);
    UNROLL for (int block = 0; block < CLUSTER; block++) {
      const float4 more = load_remote(remote_address(shared + (unit * RESULTS + column) * 4, block));
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    const i64 to = index(unit, column);
    if constexpr (D % 4 == 0) {
      if (to < 0) continue;
      if (partial) *reinterpret_cast<float4*>(partial + to) = sum;
      else *reinterpret_cast<uint2*>(d_R + to / 2) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
    } else {
      if (to >= 0) store_pair(partial, d_R, to, sum.x, sum.y);
      if (const i64 second = index(unit, column + 2); second >= 0) store_pair(partial, d_R, second, sum.z, sum.w);
    }
  }
}

// Params: types and shapes are in weight_gradient.py. d_x, d_u, h, initial h or null, reset -> partial [K splits, GR,
// N, D, D] or, if that is null because there is one split, d_R. Batch and time may be swapped in memory: consecutive
// steps are row_t rows apart. There are K splits x gate groups x head groups clusters; each block of a cluster sums
// `block_rows` rows.
extern "C" __global__ void __launch_bounds__(THREADS)
flashrnn_weight_gradient(PARAMETERS) {
  extern __shared__ __align__(16) char memory[];
  const Params params{PARAMETER_NAMES};
  const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int first_head = cluster % HEAD_GROUPS * HEADS_AT_ONCE;
  const int first_gate = cluster / HEAD_GROUPS % GATE_GROUPS * GATES_AT_ONCE;
  const int k_split = cluster / HEAD_GROUPS / GATE_GROUPS;
  const RowSource source(params, first_head, first_gate);
  const int begin = int((k_split * CLUSTER + rank) * params.block_rows);
  const int end = int(min(params.B * params.T, begin + params.block_rows));
  if (D < PADDED || GR % GATES_AT_ONCE) {  // no copy writes to padding or to gates that do not exist
    for (int i = threadIdx.x; i < STAGES * STAGE / 16; i += THREADS)
      reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  const u32 shared = shared_address(memory);
  for (int s = 0; s < STAGES - 1; s++) source.copy(shared + s * STAGE, begin + s * ROWS, end);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = warp * TILES / HEAD_TILES, first_tile = warp * TILES % HEAD_TILES;
  // For ldmatrix, lanes 8 to 15 pass the next columns of the gradients and lanes 16 to 31 the next rows; for h the
  // other way round.
  u32 left[TILES];
  UNROLL for (int m = 0; m < TILES; m++) {
    const int gate = (first_tile + m) / (PADDED / 16), unit = (first_tile + m) % (PADDED / 16) * 16;
    left[m] = gate * MATRIX + (lane % 8 + lane / 16 * 8) * PITCH + (head * PADDED + unit + lane / 8 % 2 * 8) * BYTES;
  }
  const u32 right = GATES_AT_ONCE * MATRIX + lane % 16 * PITCH + (head * PADDED + lane / 16 * 8) * BYTES;
  float c[TILES][PADDED / 8][4] = {};
  for (int row = begin, stage = 0; row < end; row += ROWS, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    source.copy(shared + (stage ? stage - 1 : STAGES - 1) * STAGE, row + (STAGES - 1) * ROWS, end);
    add_products(c, shared + stage * STAGE, left, right);
  }

  const ResultIndices index{first_head, first_gate};
  float* partial = params.partial;
  if (partial) partial += k_split * (i64(GR) * HEADS * D * D);
  if constexpr (CLUSTER == 1) {
    store_sums(c, memory, partial, index);
  } else {
    copy_wait<0>();
    __syncthreads();  // sums reuse the memory of the inputs
    store_sums(c, memory, partial, index);
    cluster_sync();
    reduce_scatter(shared, rank, partial, params.d_R, index);
    cluster_sync();  // no block exits while others read its shared memory
  }
}
