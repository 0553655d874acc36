// d_R of narrow heads: the sum over rows, which are steps of sequences, of each gate's gradient times h before the step. A
// block holds the results of GATES_AT_ONCE gates and HEADS_AT_ONCE heads in registers and goes over a part of the rows.
#pragma once
#include "common.cuh"

constexpr int PADDED = (D + 15) / 16 * 16, HEAD_TILES = GATES_AT_ONCE * PADDED / 16;  // of 16 units of a gate
constexpr int TILES = HEAD_TILES % 2 ? 1 : 2;                                         // of a warp, all of one head
constexpr int THREADS = 32 * HEADS_AT_ONCE * HEAD_TILES / TILES;
constexpr int PITCH = HEADS_AT_ONCE * PADDED * BYTES + 16;  // bytes between rows: eight of them never share a bank
constexpr int MATRIX = ROWS * PITCH, STAGE = (GATES_AT_ONCE + 1) * MATRIX;  // the gates' gradients, and h
constexpr int HEAD_GROUPS = (HEADS + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, GATE_GROUPS = (GR + GATES_AT_ONCE - 1) / GATES_AT_ONCE;
constexpr int VECTOR = 16 / BYTES, ROW_VECTORS = HEADS_AT_ONCE * D / VECTOR;
static_assert(D % VECTOR == 0 && BYTES == 2 && STAGES * STAGE == SHARED_BYTES_EXPECTED);

// What a block reads; row r of all tensors is step t(r) of sequence b(r).
struct Source {
  const scalar *d_x, *d_u, *h, *initial;
  const unsigned char* reset;
  int T, row_b, row_t, first_head, first_gate;

  DEVICE int t(int row) const { return row_t == 1 ? row % T : row / row_t; }
  DEVICE int b(int row) const { return row_t == 1 ? row / T : row % row_t; }

  // Where `gate` of a row begins; null for a gate that is not there.
  DEVICE const scalar* gradient(int row, int gate) const {
    const scalar* from = nullptr;
#pragma unroll
    for (int j = 0; j < GR; j++) {
      if (j != first_gate + gate) continue;
      from = INPUT_OF[j] >= 0 ? d_x + (i64(row) * GI + INPUT_OF[j]) * HEADS * D : d_u + (i64(row) * GU + ONLY_OF[j]) * HEADS * D;
    }
    return from;
  }
  // Where h before a row begins; null for zeros.
  DEVICE const scalar* before(int row) const {
    const int step = t(row);
    if (RESET && reset[i64(b(row)) * T + step]) return nullptr;
    if (step) return h + i64(row - row_t) * HEADS * D;
    return initial ? initial + i64(b(row)) * HEADS * D : nullptr;
  }
  // Rows from `row` to before `end` on their way to shared memory, zeros behind them.
  DEVICE void copy(u32 to, int row, int end) const {
    for (int i = threadIdx.x; i < (GATES_AT_ONCE + 1) * ROWS * ROW_VECTORS; i += THREADS) {
      const int column = i % ROW_VECTORS * VECTOR, r = i / ROW_VECTORS % ROWS, gate = i / ROW_VECTORS / ROWS;
      const int head = column / D, place = r * PITCH + (head * PADDED + column % D) * BYTES;
      const scalar* from = nullptr;
      if (row + r < end && first_head + head < HEADS) from = gate < GATES_AT_ONCE ? gradient(row + r, gate) : before(row + r);
      copy_async<16>(to + gate * MATRIX + place, from + (from ? first_head * D + column : 0), from);
    }
    copy_commit();
  }
};

// d_x [B, T, GI, N, D], d_u [B, T, GU, N, D] (gradients of the gates without input), h [B, T, N, D], initial h [B, N, D] or
// null, reset [B, T] -> partial [parts, GR, N, D, D]. Batch and time may be swapped in memory, as row_b and row_t say. Blocks
// are parts of `part_rows` rows x gate groups x head groups.
extern "C" __global__ void __launch_bounds__(THREADS)
flashrnn_weight_gradient(const scalar* d_x, const scalar* d_u, const scalar* h, const scalar* initial, const unsigned char* reset,
                         float* __restrict__ partial, i64 B, i64 T, i64 row_b, i64 row_t, i64 part_rows) {
  extern __shared__ __align__(16) char memory[];
  const int first_head = blockIdx.x % HEAD_GROUPS * HEADS_AT_ONCE;
  const int first_gate = blockIdx.x / HEAD_GROUPS % GATE_GROUPS * GATES_AT_ONCE, part = blockIdx.x / HEAD_GROUPS / GATE_GROUPS;
  const Source source{d_x, d_u, h, initial, reset, int(T), int(row_b), int(row_t), first_head, first_gate};
  const int begin = int(part * part_rows), end = int(min(B * T, (part + 1) * part_rows));
  if (D < PADDED) {  // copies leave the padding as it is
    for (int i = threadIdx.x; i < STAGES * STAGE / 16; i += THREADS) reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  const u32 shared = shared_address(memory);
  for (int s = 0; s < STAGES - 1; s++) source.copy(shared + s * STAGE, begin + s * ROWS, end);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = warp * TILES / HEAD_TILES, first_tile = warp * TILES % HEAD_TILES;
  // Rows of a transposed matrix are the product's inner axis: lanes 8 to 15 give the next columns, 16 to 31 the next rows.
  const u32 lane_left = (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16, lane_right = lane % 16 * PITCH + lane / 16 * 16;
  float c[TILES][PADDED / 8][4] = {};
  for (int row = begin, stage = 0; row < end; row += ROWS, stage = (stage + 1) % STAGES) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    source.copy(shared + (stage + STAGES - 1) % STAGES * STAGE, row + (STAGES - 1) * ROWS, end);
    const u32 left = shared + stage * STAGE + head * PADDED * BYTES + lane_left;
    const u32 right = shared + stage * STAGE + GATES_AT_ONCE * MATRIX + head * PADDED * BYTES + lane_right;
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) {
      u32 a[TILES][4];
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        const int tile = first_tile + m, gate = tile / (PADDED / 16), unit = tile % (PADDED / 16) * 16;
        load_four_transposed(a[m], left + gate * MATRIX + k * PITCH + unit * BYTES);
      }
#pragma unroll
      for (int n = 0; n < PADDED; n += 16) {
        u32 b[4];
        load_four_transposed(b, right + k * PITCH + n * BYTES);
#pragma unroll
        for (int m = 0; m < TILES; m++) mma(c[m][n / 8], a[m], b[0], b[1]), mma(c[m][n / 8 + 1], a[m], b[2], b[3]);
      }
    }
  }

  if (first_head + head >= HEADS) return;
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    const int tile = first_tile + m, gate = first_gate + tile / (PADDED / 16), unit = tile % (PADDED / 16) * 16 + g;
    if (gate >= GR) continue;
    float* to = partial + ((i64(part) * GR + gate) * HEADS + first_head + head) * D * D;
#pragma unroll
    for (int n = 0; n < PADDED; n += 8)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (unit + 8 * half < D && n + 2 * t < D)
          *reinterpret_cast<float2*>(to + (unit + 8 * half) * D + n + 2 * t) = make_float2(c[m][n / 8][2 * half], c[m][n / 8][2 * half + 1]);
  }
}
