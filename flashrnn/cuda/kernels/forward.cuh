// The forward time loop of one head and batch tile: R stays on chip, h goes round through shared memory.
//
// Every warp multiplies its rows of R (16 units, all recurrent gates) by its part of h_{t-1}; with K_SPLITS > 1 the
// partial sums of a unit tile's warps meet in shared memory, each warp keeps CELLS cells per lane. Then the cell's
// element-wise step, and h_t goes to everyone: through this block's shared memory, or with CLUSTER > 1 by stores into
// every block's that complete on its barrier.
#pragma once
#include "tiles.cuh"

constexpr int K_TILES = PADDED / 16 / K_SPLITS;  // k tiles of a warp
static_assert(K_TILES * K_SPLITS * 16 == PADDED);
using Weights = Fragments<GR * K_TILES, REGISTER_FRAGMENTS, false>;

constexpr int STATE_BYTES = PADDED * SEQS * 2;                    // h of a head, for the product
constexpr int INPUT_BYTES = UNIT_TILES * GI * SEQS * 32;          // one step of x
constexpr int SUM_FLOATS = K_SPLITS == 1 ? 0 : WARPS * K_SPLITS * CELLS * 32 * GR;
constexpr int OUTBOX_BYTES = CLUSTER == 1 ? 0 : UNITS * SEQS * 2;
constexpr int SHARED_BYTES =
    2 * STATE_BYTES + STAGES * INPUT_BYTES + SUM_FLOATS * 4 + OUTBOX_BYTES + WARPS * Weights::BYTES + 16;
static_assert(SHARED_BYTES == SHARED_BYTES_EXPECTED, "tiling.py counts the shared memory differently");

// The sums of the K_SPLITS warps of a unit tile: c (this warp's part of all of the lane's cells) -> u, complete, for
// the lane's own cells.
DEVICE void reduce_splits(float (&u)[GR][CELLS], const float (&c)[GR][BATCH_TILES][4], float* sums, const Place& place) {
  auto part = [&](int cell, int gate) { return c[gate][cell / 4][cell % 2 * 2 + cell / 2 % 2]; };
  auto slot = [&](int to, int from, int q) {
    return sums + ((((place.unit_tile * K_SPLITS + to) * K_SPLITS + from) * CELLS + q) * 32 + place.lane) * GR;
  };
#pragma unroll
  for (int to = 0; to < K_SPLITS; to++)
#pragma unroll
    for (int q = 0; q < CELLS; q++) {
      if constexpr (K_SPLITS > 1) {
        if (to == place.split) continue;
        if constexpr (GR == 4) {
          *reinterpret_cast<float4*>(slot(to, place.split, q)) =
              make_float4(part(to * CELLS + q, 0), part(to * CELLS + q, 1), part(to * CELLS + q, 2), part(to * CELLS + q, 3));
        } else {
#pragma unroll
          for (int j = 0; j < GR; j++) slot(to, place.split, q)[j] = part(to * CELLS + q, j);
        }
      } else {
#pragma unroll
        for (int j = 0; j < GR; j++) u[j][q] = part(q, j);
      }
    }
  if constexpr (K_SPLITS > 1) {
    group_barrier<TILE_THREADS>(1 + place.unit_tile);
#pragma unroll
    for (int q = 0; q < CELLS; q++) {
#pragma unroll
      for (int j = 0; j < GR; j++) {
#pragma unroll
        for (int own = 0; own < K_SPLITS; own++)
          if (own == place.split) u[j][q] = part(own * CELLS + q, j);
      }
#pragma unroll
      for (int other = 1; other < K_SPLITS; other++) {
        const int from = (place.split + other) % K_SPLITS;
        float v[GR];
        if constexpr (GR == 4) *reinterpret_cast<float4*>(v) = *reinterpret_cast<float4*>(slot(place.split, from, q));
        else
#pragma unroll
          for (int j = 0; j < GR; j++) v[j] = slot(place.split, from, q)[j];
#pragma unroll
        for (int j = 0; j < GR; j++) u[j][q] += v[j];
      }
    }
  }
}

// x [B, T, GI, N, D], R [GR, N, D, D], b [GATES, N, D], initial [STATES, B, N, D], reset [B, T] ->
// h [B, T, N, D], aux [STATES - 1, B, T, N, D], last [STATES, B, N, D].
// Row (b, t) of x, h and aux is row b * row_b + t * row_t: batch and time may be swapped in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_forward(const scalar* __restrict__ x, const scalar* __restrict__ R, const float* __restrict__ bias,
                 const float* __restrict__ initial, const unsigned char* __restrict__ reset, scalar* __restrict__ h,
                 float* __restrict__ aux, float* __restrict__ last, i64 B, i64 T, i64 row_b, i64 row_t) {
  extern __shared__ __align__(128) char memory[];
  scalar* state = reinterpret_cast<scalar*>(memory);
  char* inputs = memory + 2 * STATE_BYTES;
  float* sums = reinterpret_cast<float*>(inputs + STAGES * INPUT_BYTES);
  scalar* outbox = reinterpret_cast<scalar*>(sums + SUM_FLOATS);
  char* fragments = reinterpret_cast<char*>(outbox) + OUTBOX_BYTES;
  const u32 barriers = shared_address(fragments + WARPS * Weights::BYTES);
  const Place place;

  Weights weights;
  weights.load(fragments, place, [&](int f, int row, int column) {
    int gate = f % GR, unit = place.tile_unit + row, k = (place.split * K_TILES + f / GR) * 16 + column;
    return unit < D && k < D ? R + ((gate * HEADS + place.head) * D + unit) * D + k : nullptr;
  });

  bool valid[CELLS];
  i64 sequence[CELLS], element[CELLS];  // where the lane's cells stand in [.., B, N, D]
  float s[STATES][CELLS], b[GATES][CELLS];
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
    sequence[q] = place.sequence0 + place.sequence(q);
    valid[q] = place.unit(q) < D && sequence[q] < B;
    element[q] = place.head * D + place.unit(q);
#pragma unroll
    for (int i = 0; i < STATES; i++) s[i][q] = valid[q] ? initial[(i * B + sequence[q]) * ROW + element[q]] : 0;
#pragma unroll
    for (int j = 0; j < GATES; j++) b[j][q] = valid[q] ? bias[j * ROW + element[q]] : 0;
  }
  for (int i = threadIdx.x; i < PADDED * SEQS; i += THREADS) {
    int k = i % PADDED, n = i / PADDED;
    bool inside = k < D && place.sequence0 + n < B;
    state[operand_offset(k, n)] = to_scalar(inside ? initial[(place.sequence0 + n) * ROW + place.head * D + k] : 0);
  }

  TileLoader<2, GI, ROW * 2> loader;
  loader.start(shared_address(inputs) + place.unit_tile * GI * SEQS * 32, place, B,
               [&](i64 n) { return x + n * row_b * GI * ROW + place.head * D; });
  i64 x_step = row_t * GI * ROW * 2;
  keep(x_step);
  auto load_input = [&](i64 t, int stage) {
    if (t < T) loader.load(stage * INPUT_BYTES, x_step);
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load_input(i, i);
  copy_wait<STAGES - 2>();
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) barrier_init(barriers), barrier_init(barriers + 8);
    cluster_sync();
  }
  __syncthreads();

  constexpr int VECTORS = 2 * SEQS;  // of 16 bytes: h of a unit tile
  constexpr int SENDS = (VECTORS * CLUSTER + TILE_THREADS - 1) / TILE_THREADS;
  // Results of a step leave once the next one has begun its product, which has to wait for nothing but h.
  PackedCells h_now = {};
  scalar* h_to[WORDS];
  float* aux_to[WORDS];
  u32 h_operand[WORDS];
  i64 h_step = row_t * ROW, aux_step = B * T * ROW;
  keep(h_step), keep(aux_step);
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    i64 at = sequence[w * PER_WORD] * row_b * ROW + element[w * PER_WORD];
    h_to[w] = h + at, aux_to[w] = aux + at;
  }
  operand_addresses(h_operand, shared_address(CLUSTER == 1 ? state : outbox), CLUSTER == 1 ? 0 : place.rank * UNITS, place);
  auto store_results = [&](i64 t) {
    h_now.store_global(h_to, 0, valid);
#pragma unroll
    for (int i = 1; i < STATES; i++)
      if (ALL_STATES) store_cells(s[i], aux_to, (i - 1) * aux_step, valid);
    if (t > 0) {
#pragma unroll
      for (int w = 0; w < WORDS; w++) h_to[w] += h_step, aux_to[w] += h_step;
    }
  };
  int stage = 0;
  for (i64 t = 0; t < T; t++) {
    const int now = t & 1, next = now ^ 1;
    const bool exchange = CLUSTER > 1 && t + 1 < T;
    if (exchange && threadIdx.x == 0) barrier_expect(barriers + next * 8, STATE_BYTES);

    float c[GR][BATCH_TILES][4], u[GR][CELLS];
    product<GR, K_TILES>(c, weights, shared_address(state) + now * STATE_BYTES + place.split * K_TILES * SEQS * 32, place);
    const scalar* tile = reinterpret_cast<const scalar*>(inputs + stage * INPUT_BYTES) + place.unit_tile * GI * SEQS * 16;
    float v[GI][CELLS];
#pragma unroll
    for (int j = 0; j < GI; j++) read_cells(v[j], tile, j, place);
    store_results(t);  // at the first step, into the place of the first results
    load_input(t + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    reduce_splits(u, c, sums, place);
    stage = stage + 1 == STAGES ? 0 : stage + 1;

#pragma unroll
    for (int q = 0; q < CELLS; q++) {
      float gates[GATES], old[STATES], fresh[STATES];
      const bool keep = !RESET || !valid[q] || !reset[sequence[q] * T + t];
#pragma unroll
      for (int i = 0; i < STATES; i++) old[i] = keep ? s[i][q] : 0;
#pragma unroll
      for (int j = 0; j < GATES; j++) {
        gates[j] = b[j][q];
        if (INPUT_OF[j] >= 0) gates[j] += v[INPUT_OF[j] >= 0 ? INPUT_OF[j] : 0][q];
        if (RECURRENT_OF[j] >= 0) gates[j] += keep ? u[RECURRENT_OF[j] >= 0 ? RECURRENT_OF[j] : 0][q] : 0;
      }
      cell_forward(gates, old, fresh);
#pragma unroll
      for (int i = 0; i < STATES; i++) s[i][q] = FINITE_AT_ZERO || valid[q] ? fresh[i] : 0;
    }

    h_now.pack(s[0]);
    h_now.unpack(s[0]);
    h_now.store_operand(h_operand, CLUSTER == 1 ? next * STATE_BYTES : 0);
    copy_wait<STAGES - 2>();
    if constexpr (CLUSTER == 1) {
      __syncthreads();
    } else {
      group_barrier<TILE_THREADS>(1 + place.unit_tile);
      if (exchange) {
        const uint4* vectors = reinterpret_cast<const uint4*>(outbox + place.unit_tile * VECTORS * 8);
        const u32 place_in_state = shared_address(state) + next * STATE_BYTES + place.tile_unit / 8 * SEQS * 16;
#pragma unroll
        for (int i = 0; i < SENDS; i++) {
          int index = i * TILE_THREADS + place.tile_thread, rank = index / VECTORS, vector = index % VECTORS;
          if (rank < CLUSTER)
            send(remote_address(place_in_state + vector * 16, rank), vectors[vector],
                 remote_address(barriers + next * 8, rank));
        }
      }
    }
    if (exchange) barrier_wait(barriers + next * 8, (t >> 1) & 1);
  }
  store_results(T);
#pragma unroll
  for (int q = 0; q < CELLS; q++)
#pragma unroll
    for (int i = 0; i < STATES; i++)
      if (valid[q]) last[(i * B + sequence[q]) * ROW + element[q]] = s[i][q];
  if constexpr (CLUSTER > 1) cluster_sync();
}
