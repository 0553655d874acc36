// The forward time loop of one head and batch tile: R stays on chip, h goes round through shared memory.
//
// Every warp multiplies its rows of R (16 units, all recurrent gates) by its part of h_{t-1}; with K_SPLITS > 1 the
// partial sums of a unit tile's warps meet in shared memory, each warp keeps CELLS cells per lane. Then the cell's
// element-wise step, and h_t goes to everyone: through this block's shared memory, in a cluster by stores into every
// block's that complete on its barrier, and with GRID through global memory.
#pragma once
#include "resident/kernels/products.cuh"

constexpr int K_TILES = PADDED / 16 / K_SPLITS;  // k tiles of a warp
static_assert(K_TILES * K_SPLITS * 16 == PADDED);
using Weights = Fragments<GR * K_TILES, REGISTER_FRAGMENTS, false>;

// In a cluster h of the other blocks arrives one after the other, and a product of many tiles begins with what comes first:
// h lies in the order in which it arrives, this block's own in front, and each of SLICES parts has a barrier.
constexpr bool sliced(int n) { return BLOCKS % n == 0 && BLOCKS / n * UNIT_TILES % K_SPLITS == 0 && K_TILES / n >= 6; }
constexpr int SLICES = !CLUSTERED ? 1 : sliced(4) ? 4 : sliced(2) ? 2 : 1;
constexpr int SLICE_TILES = K_TILES / SLICES;  // k tiles of a warp in a slice
constexpr int SLICE_BLOCKS = BLOCKS / SLICES;
static_assert(2 * SLICES * 8 <= BARRIER_BYTES);
// The unit of the head that stands at place k of the operand.
DEVICE int unit_at(int k, const Place& place) {
  return CLUSTERED ? (place.rank + BLOCKS - k / UNITS) % BLOCKS * UNITS + k % UNITS : k;
}

constexpr int PLANE_BYTES = PADDED * SEQS * 2;
constexpr int STATE_BYTES = PLANES * PLANE_BYTES;                 // h of a head, for the product
constexpr int INPUT_BYTES = UNIT_TILES * GI * ROW_BYTES;          // one step of x
constexpr int OUTBOX_BYTES = BLOCKS == 1 ? 0 : PLANES * UNITS * SEQS * 2;
constexpr int SHARED_BYTES =
    2 * STATE_BYTES + STAGES * INPUT_BYTES + SUM_FLOATS<GR> * 4 + OUTBOX_BYTES + WARPS * Weights::SHARED + BARRIER_BYTES;
static_assert(SHARED_BYTES == SHARED_BYTES_EXPECTED, "resident/tiling.py counts the shared memory differently");

constexpr int VECTORS = 2 * SEQS;  // of 16 bytes: a plane of h of a unit tile

// h of a unit tile, from the outbox into every block's shared memory, the next block's first.
DEVICE void send_state(const char* outbox, u32 state, u32 barriers, const Place& place) {
  constexpr int AT_ONCE = TILE_THREADS / VECTORS;  // blocks
  const u32 vector = place.tile_thread % VECTORS, first = place.tile_thread / VECTORS;
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    const u32 own = place.unit_tile * VECTORS + vector;
    const uint4 value = reinterpret_cast<const uint4*>(outbox + plane * UNITS * SEQS * 2)[own];
#pragma unroll
    for (int i = 0; i < BLOCKS; i += AT_ONCE) {
      const u32 distance = i + first, rank = (place.rank + distance) % BLOCKS;
      const u32 to = state + plane * PLANE_BYTES + (distance * UNIT_TILES * VECTORS + own) * 16;
      if (distance < BLOCKS && vector % SEQS < SEQUENCES)
        send(remote_address(to, rank), value, remote_address(barriers + distance / SLICE_BLOCKS * 8, rank));
    }
  }
}

// The same through global memory: `ring` holds the state tile of three steps, EMPTY where it has not arrived. Who has
// received h of a step from everyone knows that nobody reads that of the step before any more.
constexpr int BLOCK_VECTORS = UNITS / 8 * SEQS, HEAD_VECTORS = BLOCKS * BLOCK_VECTORS;  // of one plane
constexpr int RING_VECTORS = 3 * PLANES * HEAD_VECTORS;
constexpr int OWN = (PLANES * BLOCK_VECTORS + THREADS - 1) / THREADS;  // of the block, per thread

struct Ring {
  uint4* slots;  // [3][PLANES][HEAD_VECTORS]
  int own[OWN];  // this thread's part of the block's vectors; negative: none
  DEVICE Ring(uint4* rings, const Place& place) {
    slots = rings + blockIdx.x / BLOCKS * RING_VECTORS;
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      int i = k * THREADS + threadIdx.x, plane = i / BLOCK_VECTORS;
      own[k] = plane < PLANES ? plane * HEAD_VECTORS + place.rank * BLOCK_VECTORS + i % BLOCK_VECTORS : -1;
    }
  }
  DEVICE uint4* slot(int t) const { return slots + t % 3 * (PLANES * HEAD_VECTORS); }

  // Makes room for h of step t, long before it is there.
  DEVICE void clear(int t) const {
#pragma unroll
    for (int k = 0; k < OWN; k++)
      if (own[k] >= 0) publish(slot(t) + own[k], make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
  }
  // Hands out h of step t, and with it the promise that the room for the next step is clear.
  DEVICE void send(const char* outbox, int t) const {
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      if (own[k] < 0) continue;
      uint4 cleared;
      do peek(cleared, slot(t + 1) + own[k]);
      while (arrived(cleared));
      publish(slot(t) + own[k], reinterpret_cast<const uint4*>(outbox)[k * THREADS + threadIdx.x]);
    }
  }
  // Puts h of step t into the state tile, as it arrives.
  DEVICE void receive(char* state, int t) const {
    constexpr int VECTORS = PLANES * HEAD_VECTORS, ALL = (VECTORS + THREADS - 1) / THREADS, TOGETHER = ALL < 8 ? ALL : 8;
    for (int first = threadIdx.x; first < VECTORS; first += TOGETHER * THREADS) {
      const uint4* from = slot(t) + first;
      uint4 vectors[TOGETHER];
      bool missing[TOGETHER], any = true;
#pragma unroll
      for (int k = 0; k < TOGETHER; k++) missing[k] = first + k * THREADS < VECTORS;
      while (any) {  // all that is missing at once: a look takes as long for one as for many
        any = false;
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
          if (missing[k]) peek(vectors[k], from + k * THREADS);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
          if (!missing[k]) continue;
          missing[k] = !arrived(vectors[k]);
          any |= missing[k];
          if (!missing[k]) reinterpret_cast<uint4*>(state)[first + k * THREADS] = vectors[k];
        }
      }
    }
  }
};

DEVICE void load_weights(Weights& weights, char* fragments, const scalar* R, const Place& place) {
  weights.load(fragments, R, place, [&](int i, int row, int column) {
    int gate = i % GR, slice = i / GR / SLICE_TILES, unit = place.tile_unit + row;
    int k = unit_at(((slice * K_SPLITS + place.split) * SLICE_TILES + i / GR % SLICE_TILES) * 16 + column, place);
    return unit < D && k < D ? R + ((gate * HEADS + place.head) * D + unit) * D + k : nullptr;
  });
}

// The state that the first product sees, and zeros behind it, which padding keeps.
DEVICE void place_initial(char* state, const float* initial, const Place& place) {
  for (int i = threadIdx.x; i < PADDED * SEQS; i += THREADS) {
    int k = unit_at(i % PADDED, place), n = i / PADDED;
    bool inside = k < D && n < place.sequences;
    PairOf<float> pair{inside ? initial[(place.sequence0 + n) * ROW + place.head * D + k] : 0, 0};
    for (int plane = 0; plane < PLANES; plane++) {
      char* to = state + plane * PLANE_BYTES + operand_offset(i % PADDED, n) * 2;
      *reinterpret_cast<u16*>(to) = static_cast<u16>(pair.next_plane());
      *reinterpret_cast<u16*>(to + STATE_BYTES) = 0;
    }
  }
}

// The recurrent sums of this warp's part of h, which in a cluster may still be arriving.
DEVICE void multiply(float (&c)[GR][BATCH_TILES][4], const Weights& weights, u32 state, u32 barriers, int t,
                     const Place& place) {
  const int now = t & 1;
  Weights::Queue queue;
  weights.start(queue);
  const u32 operand_tile = state + now * STATE_BYTES + place.split * SLICE_TILES * SEQS * 32;
#pragma unroll
  for (int i = 0; i < SLICES; i++) {
    if (CLUSTERED && t > 0) barrier_wait(barriers + (now * SLICES + i) * 8, (t - 1) >> 1 & 1);
    product<GR, SLICE_TILES, PLANE_BYTES>(c, weights, queue, i * SLICE_TILES * GR,
                                          operand_tile + i * K_SPLITS * SLICE_TILES * SEQS * 32, place);
  }
}

// One warp that makes the whole sum of its cells begins it with the bias, which then costs nothing.
constexpr bool BIAS_IN_SUM = K_SPLITS == 1;
DEVICE void begin_sums(float (&c)[GR][BATCH_TILES][4], const float (&b)[GATES][CELLS]) {
  if constexpr (BIAS_IN_SUM) {
#pragma unroll
    for (int j = 0; j < GATES; j++)
#pragma unroll
      for (int q = 0; q < CELLS; q++)
        if (RECURRENT_OF[j] >= 0) c[RECURRENT_OF[j] >= 0 ? RECURRENT_OF[j] : 0][q / 4][q % 2 * 2 + q / 2 % 2] = b[j][q];
  }
}

// One step of the lane's cells: inputs v, recurrent sums u, biases b; s becomes the new state, `kept` the gates.
DEVICE void step_cells(float (&s)[STATES][CELLS], KeptGates (&kept)[PAIRS], const float (&v)[GI][CELLS],
                       const float (&u)[GR][CELLS], const float (&b)[GATES][CELLS], const ResetMask& reset,
                       const bool (&valid)[CELLS]) {
  float all_gates[PAIRS][PAIR_GATES];
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
    float gates[GATES], old[STATES], fresh[STATES];
    const bool keep = reset.keep(q);
#pragma unroll
    for (int i = 0; i < STATES; i++) old[i] = keep ? s[i][q] : 0;
#pragma unroll
    for (int j = 0; j < GATES; j++) {
      const bool recurrent = RECURRENT_OF[j] >= 0;
      const float sum = recurrent ? u[recurrent ? RECURRENT_OF[j] : 0][q] : 0;
      gates[j] = recurrent && BIAS_IN_SUM ? (keep ? sum : b[j][q]) : b[j][q] + (keep ? sum : 0);
      if (INPUT_OF[j] >= 0) gates[j] += v[INPUT_OF[j] >= 0 ? INPUT_OF[j] : 0][q];
      all_gates[q / PAIR][q % PAIR * GATES + j] = gates[j];
    }
    cell_forward(gates, old, fresh);
#pragma unroll
    for (int i = 0; i < STATES; i++) s[i][q] = FINITE_AT_ZERO || valid[q] ? fresh[i] : 0;
  }
  if (KEEP_GATES)
#pragma unroll
    for (int p = 0; p < PAIRS; p++) kept[p].round(all_gates[p]);
}

template <bool>
struct BiasOf { using type = float; };
template <>
struct BiasOf<true> { using type = scalar; };
using bias_number = BiasOf<HALF_BIAS>::type;

// PARAMETERS: types and shapes are in parameters.py. x, R, bias, initial, reset -> h, aux, last, gates (cells.cuh).
// With GRID, `workspace` has room for a Ring for every group of the launch, and behind them for a Meeting's words.
// Row (b, t) of x, h, aux and gates is row b * row_b + t * row_t: batch and time may be swapped in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_forward(PARAMETERS) {
  extern __shared__ __align__(128) char memory[];
  char* state = memory;
  char* inputs = memory + 2 * STATE_BYTES;
  float* sums = reinterpret_cast<float*>(inputs + STAGES * INPUT_BYTES);
  char* outbox = reinterpret_cast<char*>(sums + SUM_FLOATS<GR>);
  char* fragments = outbox + OUTBOX_BYTES;
  const u32 barriers = shared_address(fragments + WARPS * Weights::SHARED);
  const Place place(first_group, B);
  const int steps = static_cast<int>(T);
  const Steps step{x_step, h_step, aux_step, gates_step};
  const Ring ring(workspace, place);
  const Meeting<BLOCKS> meeting(workspace + gridDim.x / BLOCKS * RING_VECTORS, launch);
  if (GRID && steps > 1) {
    for (int i = 0; i < 3; i++) ring.clear(i);
    meeting.arrive();
  }

  Weights weights;
  load_weights(weights, fragments, R, place);

  bool valid[CELLS];
  int sequence[CELLS];
  i64 element[CELLS];  // where the lane's cells stand in [.., B, N, D]
  float s[STATES][CELLS], b[GATES][CELLS];
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
    sequence[q] = place.sequence0 + place.sequence(q);
    valid[q] = place.has_cells() && place.unit(q) < D && place.sequence(q) < place.sequences;
    element[q] = place.head * D + place.unit(q);
#pragma unroll
    for (int i = 0; i < STATES; i++) s[i][q] = valid[q] ? initial[(i * B + sequence[q]) * ROW + element[q]] : 0;
#pragma unroll
    for (int j = 0; j < GATES; j++) b[j][q] = valid[q] ? float(bias[j * ROW + element[q]]) : 0;
  }
  place_initial(state, initial, place);
  StoredCells h_now;
  h_now.round(s[0]);  // as h of every step
  h_now.get(s[0]);

  TileLoader<BYTES, GI, ROW * BYTES> loader;
  loader.start(shared_address(inputs) + place.unit_tile * GI * ROW_BYTES, place,
               [&](i64 n) { return x + n * row_b * GI * ROW + place.head * D; });
  auto load_input = [&](int t, int stage) {
    if (t < steps) loader.load(stage * INPUT_BYTES, step.x);
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load_input(i, i);
  copy_wait<STAGES - 2>();
  if constexpr (CLUSTERED) {
    if (threadIdx.x == 0)
      for (int i = 0; i < 2 * SLICES; i++) barrier_init(barriers + i * 8);
    cluster_sync();
  }
  if (GRID && steps > 1) meeting.wait();
  __syncthreads();

  // Results of a step leave once the next one has begun its product, which has to wait for nothing but h.
  KeptGates gates_now[PAIRS];
  bool to_store[CELLS] = {};  // not before there was a step
  scalar* h_to[PAIRS];
  aux_number* aux_to[PAIRS];
  gate* gates_to[PAIRS];
  u32 h_operand[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    i64 at = (sequence[p * PAIR] * row_b - row_t) * ROW + element[p * PAIR];  // one step before the first
    h_to[p] = h + at, aux_to[p] = aux + at, gates_to[p] = gates + at * GATES;
    if constexpr (GATES_IN_PIECES) {
      const int number = place.unit(p * PAIR) * GATES;
      gates_to[p] += in_pieces(number) - (place.head * D * (GATES - 1) + number);
    }
    keep(h_to[p]), keep(aux_to[p]), keep(gates_to[p]);
  }
  i64 aux_plane = B * T * ROW;  // of one state
  keep(aux_plane);
  operand_addresses(h_operand, shared_address(BLOCKS == 1 ? state : outbox), BLOCKS == 1 ? 0 : place.rank * UNITS, place);
  auto store_results = [&] {
    h_now.store_global(h_to, 0, to_store);
#pragma unroll
    for (int i = 1; i < STATES; i++)
      if (KEEP_AUX) store_cells(s[i], aux_to, (i - 1) * aux_plane, to_store);
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (KEEP_GATES && to_store[p * PAIR]) gates_now[p].store(gates_to[p]);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) advance(h_to[p], step.h), advance(aux_to[p], step.aux), advance(gates_to[p], step.gates);
  };
  ResetMask resets(reset, T, sequence);
  resets.load(0, valid);
  int stage = 0;
  for (int t = 0; t < steps; t++) {
    const int next = t + 1 & 1;
    const bool exchange = BLOCKS > 1 && t + 1 < steps;
    if (GRID && exchange) ring.clear(t + 1);
    if (CLUSTERED && exchange && threadIdx.x == 0)
      for (int i = 0; i < SLICES; i++) barrier_expect(barriers + (next * SLICES + i) * 8, STATE_BYTES / SLICES / SEQS * SEQUENCES);

    float c[GR][BATCH_TILES][4] = {}, u[GR][CELLS];
    begin_sums(c, b);
    multiply(c, weights, shared_address(state), barriers, t, place);
    const scalar* tile = reinterpret_cast<const scalar*>(inputs + stage * INPUT_BYTES + place.unit_tile * GI * ROW_BYTES);
    float v[GI][CELLS];
#pragma unroll
    for (int j = 0; j < GI; j++)
      if (place.has_cells()) read_cells(v[j], tile, j, place);
    store_results();
    load_input(t + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    reduce_splits<GR>(u, c, sums, place);
    stage = stage + 1 == STAGES ? 0 : stage + 1;

    if constexpr (CLUSTERED && K_SPLITS == 1) __syncwarp();  // the outbox has been read; else reduce_splits says so
    if (place.has_cells()) {
      step_cells(s, gates_now, v, u, b, resets, valid);
      if (t + 1 < steps) resets.load(t + 1, valid);
      h_now.round(s[0]);
      h_now.get(s[0]);
      store_operand<BLOCKS == 1 ? PADDED : UNITS>(h_now, h_operand, BLOCKS == 1 ? next * STATE_BYTES : 0);
    }
#pragma unroll
    for (int q = 0; q < CELLS; q++) to_store[q] = valid[q];
    copy_wait<STAGES - 2>();
    if constexpr (BLOCKS == 1) {
      __syncthreads();
    } else if constexpr (CLUSTERED) {
      group_barrier<TILE_THREADS>(1 + place.unit_tile);
      if (exchange) send_state(outbox, shared_address(state) + next * STATE_BYTES, barriers + next * SLICES * 8, place);
    } else {
      __syncthreads();
      if (exchange) {
        ring.send(outbox, t);
        ring.receive(state + next * STATE_BYTES, t);
      }
      __syncthreads();
    }
  }
  store_results();
#pragma unroll
  for (int q = 0; q < CELLS; q++)
#pragma unroll
    for (int i = 0; i < STATES; i++)
      if (valid[q]) last[(i * B + sequence[q]) * ROW + element[q]] = s[i][q];
  if constexpr (CLUSTERED) cluster_sync();
  if (GRID && steps > 1) meeting.end();
}
