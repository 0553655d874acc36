// d_R, overlapped with the backward's time loop on multiprocessors that the loop leaves idle: the sum over rows, which are
// steps of sequences, of each gate's gradient times h before the step. A block has TILES tiles of d_R, UNITS of a head's GR * D
// rows times COLUMNS of its D columns, one of them in registers, and adds up all rows, chunk by chunk, as the loop writes them.
#pragma once
#include "resident/kernels/gradient_rows.cuh"

static_assert(THREADS == 2 * UNITS);                        // a warpgroup for every 64
constexpr int SAVED = TILES > 1 ? UNITS * COLUMNS * 4 : 0;  // bytes of the sums that are not in registers
static_assert(TILES <= 2 && STAGES > (BYTES == 2 ? 2 : 1) && SAVED % 1024 == 0);
static_assert(SHARED_BYTES_EXPECTED >= SAVED + STAGES * STAGE + AHEAD * COPIED);

// The sums of a warpgroup.
struct Sums {
  float c[COLUMNS / 2] = {};
  float of_load[COLUMNS / 2];  // for float32: tensor cores truncate their sums, which is not accurate enough for long ones

  DEVICE void add(u32 stage) {
    warpgroup_begin();
    if constexpr (SPLITS == 1) products<true>(c, stage, 0, 0);
    else {
      products<false>(of_load, stage, 0, 0);
#pragma unroll
      for (int sum = 1; sum < SPLITS; sum++)
#pragma unroll
        for (int left = 0; left <= sum; left++) products<true>(of_load, stage, left, sum - left);
    }
    warpgroup_commit();
  }
  // Products of one split of each; if not ADDS, they replace the sums.
  template <bool ADDS>
  DEVICE static void products(float (&sums)[COLUMNS / 2], u32 stage, int left_split, int right_split) {
    const auto left = matrix(stage + left_split * LEFT + threadIdx.x / 128 * BLOCK, BLOCK);
    const auto right = matrix(stage + SPLITS * LEFT + right_split * RIGHT, BLOCK);
    warpgroup_mma<ADDS>(sums, left, right);
#pragma unroll
    for (int row = 16; row < ROWS; row += 16) warpgroup_mma<true>(sums, from_row(left, row), from_row(right, row));
  }
  // Waits for a load's products and adds them with rounding.
  DEVICE void round() {
    warpgroup_wait_for(of_load);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) c[i] += of_load[i];
  }
  // Exchanges the sums with those in `saved`.
  DEVICE void swap(float4* saved) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 4) {
      float4& other = saved[i / 4 * THREADS + threadIdx.x];
      const float4 own = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
      c[i] = other.x, c[i + 1] = other.y, c[i + 2] = other.z, c[i + 3] = other.w;
      other = own;
    }
  }
  DEVICE void store(scalar* d_R, const Tile& tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int unit = tile.unit + threadIdx.x / 32 * 16 + half * 8 + lane / 4, gate = unit / D;
      const i64 row = ((i64(gate) * HEADS + tile.head) * D + unit % D) * D;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        const int column = tile.column + n * 8 + lane % 4 * 2;
        const bool exists = gate < GR && tile.head < HEADS && column < D;
        if (exists) store_pair(d_R + row + column, c[4 * n + 2 * half], c[4 * n + 2 * half + 1]);
      }
    }
  }
  DEVICE static void store_pair(scalar* to, float low, float high) {
    if constexpr (BYTES == 2) *reinterpret_cast<u32*>(to) = pack(low, high);
    else *reinterpret_cast<float2*>(to) = make_float2(low, high);
  }
};

// Adds up `loads` loads of rows. Copies of half types and TF32 are AHEAD loads ahead, and products of two more may be in flight.
DEVICE void add_rows(Sums& sums, const RowSource& source, Cursor at, int loads, u32 shared) {
  if constexpr (BYTES == 2) {
    for (int load = 0; load < AHEAD; load++) {
      if (load < loads) copy_load(shared + load * STAGE, source, at);
      copy_commit(), source.advance(at);
    }
    for (int load = 0, stage = 0; load < loads; load++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
      copy_wait<AHEAD - 1>();
      copies_before_products();
      __syncthreads();
      sums.add(shared + stage * STAGE);
      if (load + AHEAD < loads) copy_load(shared + (stage + AHEAD < STAGES ? stage + AHEAD : stage - 2) * STAGE, source, at);
      copy_commit(), source.advance(at);
      warpgroup_wait<1>();  // for the load before
    }
    warpgroup_wait<0>();
  } else if constexpr (COPIES_FLOATS) {
    const CopiedFloats floats(shared + STAGES * STAGE);
    for (int load = 0; load < AHEAD; load++) {
      if (load < loads) floats.copy(load, source, at);
      copy_commit(), source.advance(at);
    }
    for (int load = 0, copied = 0; load < loads; load++, copied = copied + 1 == AHEAD ? 0 : copied + 1) {
      const u32 stage = shared + load % STAGES * STAGE;
      copy_wait<AHEAD - 1>();  // for the thread's own: nobody else reads them
      floats.store(copied, stage);  // while the products of the load before are in flight
      copies_before_products();
      if (load + AHEAD < loads) floats.copy(copied, source, at);
      copy_commit(), source.advance(at);
      if (load > 0) sums.round();
      __syncthreads();
      sums.add(stage);
    }
    sums.round();
  } else {
    Floats floats;
    floats.load(source, at);
    for (int load = 0; load < loads; load++) {  // which is split while the products of the one before it are in flight
      const u32 stage = shared + load % 2 * STAGE;
      floats.store(stage);
      copies_before_products();
      source.advance(at);
      if (load + 1 < loads) floats.load(source, at);
      if (load > 0) sums.round();
      __syncthreads();
      sums.add(stage);
    }
    sums.round();
  }
  __syncthreads();
}

// Params: types and shapes are in parameters.py. d_x, d_u, h, initial h or null, reset -> d_R. Batch and time of d_x, d_u
// and h may be swapped in memory: steps are row_t rows apart. Each of the loop's `producers` blocks adds one to the word in
// `progress` of each finished chunk except the last.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_concurrent_gradient(PARAMETERS) {
  extern __shared__ __align__(1024) char memory[];
  const Params params{PARAMETER_NAMES};
  const Rows rows(params);
  const int steps = rows.steps;
  const u32 shared = shared_address(memory) + SAVED;
  float4* saved = reinterpret_cast<float4*>(memory);

  Sums sums;
  if (TILES > 1)
    for (int i = threadIdx.x; i < SAVED / 16; i += THREADS) saved[i] = make_float4(0, 0, 0, 0);
  int held = 0;  // the tile that is in registers
  for (int done = 0, chunk = 0, count; done < steps; done += count, chunk++) {
    count = chunk_steps(done, steps - done);
    if (done + count < steps) {
      if (threadIdx.x == 0) await(params.progress + chunk, u32(params.producers));
    } else {
      wait_for_primary();
      if (VECTOR * BYTES < 16) forget_cached();  // copies of 16 bytes bypass L1
    }
    __syncthreads();
    const int loads = (count + CHUNK_UNIT - 1) / CHUNK_UNIT * ((rows.sequences + TOGETHER - 1) / TOGETHER);
    for (int turn = 1;; turn++) {
      const RowSource source(rows, Tile(blockIdx.x * TILES + held));
      add_rows(sums, source, source.first(steps - done - CHUNK_UNIT), loads, shared);
      if (turn == TILES) break;
      sums.swap(saved), held ^= 1;
    }
  }
  for (int turn = 0; turn < TILES; turn++) {
    if (turn > 0) sums.swap(saved), held ^= 1;
    sums.store(params.d_R, Tile(blockIdx.x * TILES + held));
  }
}
