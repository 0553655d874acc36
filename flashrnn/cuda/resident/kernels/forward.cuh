// The forward time loop of one head and batch tile. R stays on the chip; h is exchanged through shared memory.
//
// Every warp multiplies its rows of R (16 units, all recurrent gates) by its slice of h_{t-1}. With K_SLICES > 1, the warps of
// a unit tile reduce their partial sums through shared memory (slice-K), and each of them has CELLS cells per lane. After the
// cell's element-wise step, h_t is sent to all warps: in one block through its shared memory, in a cluster by stores into the
// shared memory of every block, which complete on that block's mbarrier, and with GRID through global memory.
#pragma once
#include "resident/kernels/products.cuh"
#include "resident/kernels/unit_reductions.cuh"

constexpr int K_TILES = PADDED / 16 / K_SLICES;  // k tiles of a warp
static_assert(K_TILES * K_SLICES * 16 == PADDED);
using Weights = Fragments<GR * K_TILES, REGISTER_FRAGMENTS, false>;

// In a cluster, h of the other blocks arrives block by block, and a product of many tiles begins with what has arrived: h is
// stored in the order of arrival, this block's own units first, and each of SEGMENTS segments has an mbarrier.
constexpr bool in_segments(int n) { return BLOCKS % n == 0 && BLOCKS / n * UNIT_TILES % K_SLICES == 0 && K_TILES / n >= 6; }
constexpr int SEGMENTS = !CLUSTERED ? 1 : in_segments(4) ? 4 : in_segments(2) ? 2 : 1;
constexpr int SEGMENT_TILES = K_TILES / SEGMENTS;  // k tiles of a warp in a segment
constexpr int SEGMENT_BLOCKS = BLOCKS / SEGMENTS;
static_assert(2 * SEGMENTS * 8 <= BARRIER_BYTES);
// Return the unit of the head at index k of the operand.
DEVICE int unit_at(int k, const ThreadCoord& coord) {
  return CLUSTERED ? (coord.rank + BLOCKS - k / UNITS) % BLOCKS * UNITS + k % UNITS : k;
}

constexpr int SPLIT_BYTES = PADDED * SEQS * 2;
constexpr int H_BYTES = SPLITS * SPLIT_BYTES;                     // h of a head, for the product
constexpr int INPUT_BYTES = UNIT_TILES * GI * ROW_BYTES;          // one step of x
constexpr int SEND_BYTES = BLOCKS == 1 ? 0 : SPLITS * UNITS * SEQS * 2;
constexpr int SHARED_BYTES =
    2 * H_BYTES + STAGES * INPUT_BYTES + SUM_FLOATS<GR> * 4 + SEND_BYTES + WARPS * Weights::SHARED + BARRIER_BYTES + REDUCTION_BYTES +
    CONSTANT_BYTES;
static_assert(SHARED_BYTES == SHARED_BYTES_EXPECTED, "resident/tiling.py counts the shared memory differently");

constexpr int VECTORS = 2 * SEQS;  // of 16 bytes: a split of h of a unit tile

// Sends h of a unit tile from the send buffer to every block's shared memory, beginning with the next block's.
DEVICE void send_h(const char* send_buffer, u32 state, u32 barriers, const ThreadCoord& coord) {
  constexpr int AT_ONCE = TILE_THREADS / VECTORS;  // blocks
  const u32 vector = coord.tile_thread % VECTORS, first = coord.tile_thread / VECTORS;
#pragma unroll
  for (int split = 0; split < SPLITS; split++) {
    const u32 own = coord.unit_tile * VECTORS + vector;
    const uint4 value = reinterpret_cast<const uint4*>(send_buffer + split * UNITS * SEQS * 2)[own];
#pragma unroll
    for (int i = 0; i < BLOCKS; i += AT_ONCE) {
      const u32 distance = i + first, rank = (coord.rank + distance) % BLOCKS;
      const u32 to = state + split * SPLIT_BYTES + (distance * UNIT_TILES * VECTORS + own) * 16;
      if (distance < BLOCKS && vector % SEQS < SEQUENCES)
        send(remote_address(to, rank), value, remote_address(barriers + distance / SEGMENT_BLOCKS * 8, rank));
    }
  }
}

// The same through global memory: a ring buffer of h of three steps, EMPTY where it has not arrived. A block that has received
// h of a step from all blocks knows that none of them still reads h of the step before.
constexpr int BLOCK_VECTORS = UNITS / 8 * SEQS, HEAD_VECTORS = BLOCKS * BLOCK_VECTORS;  // of one split
constexpr int RING_VECTORS = 3 * SPLITS * HEAD_VECTORS;
constexpr int OWN = (SPLITS * BLOCK_VECTORS + THREADS - 1) / THREADS;  // of the block, per thread

struct Ring {
  uint4* slots;  // [3][SPLITS][HEAD_VECTORS]
  int own[OWN];  // indices of the block's vectors that this thread stores; negative: none
  DEVICE Ring(uint4* rings, const ThreadCoord& coord) {
    slots = rings + blockIdx.x / BLOCKS * RING_VECTORS;
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      int i = k * THREADS + threadIdx.x, split = i / BLOCK_VECTORS;
      own[k] = split < SPLITS ? split * HEAD_VECTORS + coord.rank * BLOCK_VECTORS + i % BLOCK_VECTORS : -1;
    }
  }
  DEVICE uint4* slot(int t) const { return slots + t % 3 * (SPLITS * HEAD_VECTORS); }

  // Clears the slot for h of step t, long before it is stored.
  DEVICE void clear(int t) const {
#pragma unroll
    for (int k = 0; k < OWN; k++)
      if (own[k] >= 0) publish(slot(t) + own[k], make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
  }
  // Stores h of step t, which also tells the other blocks that the slot of the next step is clear.
  DEVICE void send(const char* send_buffer, int t) const {
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      if (own[k] < 0) continue;
      uint4 cleared;
      do peek(cleared, slot(t + 1) + own[k]);
      while (arrived(cleared));
      publish(slot(t) + own[k], reinterpret_cast<const uint4*>(send_buffer)[k * THREADS + threadIdx.x]);
    }
  }
  // Copies h of step t to shared memory as it arrives.
  DEVICE void receive(char* state, int t) const {
    constexpr int VECTORS = SPLITS * HEAD_VECTORS, ALL = (VECTORS + THREADS - 1) / THREADS, TOGETHER = ALL < 8 ? ALL : 8;
    for (int first = threadIdx.x; first < VECTORS; first += TOGETHER * THREADS) {
      const uint4* from = slot(t) + first;
      uint4 vectors[TOGETHER];
      bool missing[TOGETHER], any = true;
#pragma unroll
      for (int k = 0; k < TOGETHER; k++) missing[k] = first + k * THREADS < VECTORS;
      while (any) {  // polls all that is missing at once: that takes as long as polling one
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

DEVICE void load_weights(Weights& weights, char* fragments, const scalar* R, const ThreadCoord& coord) {
  weights.load(fragments, R, coord, [&](int i, int row, int column) {
    int gate = i % GR, segment = i / GR / SEGMENT_TILES, unit = coord.tile_unit + row;
    int k = unit_at(((segment * K_SLICES + coord.k_slice) * SEGMENT_TILES + i / GR % SEGMENT_TILES) * 16 + column, coord);
    return unit < D && k < D ? R + ((gate * HEADS + coord.head) * D + unit) * D + k : nullptr;
  });
}

// Stores h before the first step as the product's operand, and zeros into the other buffer, where padding stays zero.
DEVICE void store_initial_h(char* operand, const float* initial, const ThreadCoord& coord) {
  for (int i = threadIdx.x; i < PADDED * SEQS; i += THREADS) {
    int k = unit_at(i % PADDED, coord), n = i / PADDED;
    bool inside = k < D && coord.has_sequence(n);
    PairOf<float> pair{inside ? initial[coord.of_batch(n) * ROW + coord.head * D + k] : 0, 0};
    for (int split = 0; split < SPLITS; split++) {
      char* to = operand + split * SPLIT_BYTES + operand_offset(i % PADDED, n) * 2;
      *reinterpret_cast<u16*>(to) = static_cast<u16>(pair.next_split());
      *reinterpret_cast<u16*>(to + H_BYTES) = 0;
    }
  }
}

// Computes the recurrent sums of this warp's slice of h, which in a cluster may still be arriving.
DEVICE void multiply(float (&c)[GR][BATCH_TILES][4], const Weights& weights, u32 state, u32 barriers, int t,
                     const ThreadCoord& coord) {
  const int now = t & 1;
  Weights::Queue queue;
  weights.start(queue);
  const u32 operand_tile = state + now * H_BYTES + coord.k_slice * SEGMENT_TILES * SEQS * 32;
#pragma unroll
  for (int i = 0; i < SEGMENTS; i++) {
    if (CLUSTERED && t > 0) barrier_wait(barriers + (now * SEGMENTS + i) * 8, (t - 1) >> 1 & 1);
    product<GR, SEGMENT_TILES, SPLIT_BYTES>(c, weights, queue, i * SEGMENT_TILES * GR,
                                          operand_tile + i * K_SLICES * SEGMENT_TILES * SEQS * 32, coord);
  }
}

// Without slice-K, a warp initializes the sums of its cells with the biases, which then cost nothing.
constexpr bool SUM_HAS_BIAS = K_SLICES == 1;
DEVICE void begin_sums(float (&c)[GR][BATCH_TILES][4], const float (&b)[GATES][CELLS]) {
  if constexpr (SUM_HAS_BIAS) {
#pragma unroll
    for (int j = 0; j < GATES; j++)
#pragma unroll
      for (int q = 0; q < CELLS; q++)
        if (RECURRENT_OF[j] >= 0) c[RECURRENT_OF[j] >= 0 ? RECURRENT_OF[j] : 0][tile_of(q)][q % 2 * 2 + second_of(q)] = b[j][q];
  }
}

template <bool>
struct BiasOf { using type = float; };
template <>
struct BiasOf<true> { using type = scalar; };
using bias_number = BiasOf<HALF_BIAS>::type;

// Locates the lane's cells, and loads their states before the first step and their biases.
DEVICE void load_cells(LaneCells& cells, float (&s)[STATES][CELLS], float (&b)[GATES][CELLS], const float* initial,
                       const bias_number* bias, i64 B, const ThreadCoord& coord) {
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
    cells.sequence[q] = coord.of_batch(coord.sequence(q));
    cells.valid[q] = coord.has_cells() && coord.unit(q) < D && coord.has_sequence(coord.sequence(q));
    cells.element[q] = coord.head * D + coord.unit(q);
#pragma unroll
    for (int i = 0; i < STATES; i++) s[i][q] = cells.valid[q] ? initial[cells.state_index(i, q, B)] : 0;
#pragma unroll
    for (int j = 0; j < GATES; j++) b[j][q] = cells.valid[q] ? float(bias[j * ROW + cells.element[q]]) : 0;
  }
}

// One step of the lane's cells, from inputs v, recurrent sums u and biases b: s becomes the new state, `residual` the gates.
#if REDUCES
DEVICE void step_cells(float (&s)[STATES][CELLS], ResidualGates (&residual)[PAIRS], const float (&v)[GI][CELLS],
                       const float (&u)[GR][CELLS], const float (&b)[GATES][CELLS], const float (&constants)[CONSTANTS + 1][PAIR],
                       const ResetMask& reset, const bool (&valid)[CELLS], const UnitReductions& units) {
  float g[GATES][CELLS], old[STATES][CELLS], fresh[STATES][CELLS];
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
    const bool carry = reset.carries(q);
#pragma unroll
    for (int i = 0; i < STATES; i++) old[i][q] = carry ? s[i][q] : 0;
#pragma unroll
    for (int j = 0; j < GATES; j++)  // the first pair has the biases of all
      g[j][q] = assemble_gate<SUM_HAS_BIAS>(j, STORED_OF[j] < 0 ? constants[CONSTANT_OF[j] >= 0 ? CONSTANT_OF[j] : 0][q % PAIR] : b[j][q % PAIR], carry, [&](int k) { return u[k][q]; }, [&](int k) { return v[k][q]; });
  }
  cells_forward(g, old, fresh, units);
#pragma unroll
  for (int q = 0; q < CELLS; q++)
#pragma unroll
    for (int i = 0; i < STATES; i++) s[i][q] = FINITE || valid[q] ? fresh[i][q] : 0;
  if (!STORE_GATES) return;
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    float all[PAIR_GATES];
#pragma unroll
    for (int j = 0; j < GATES; j++)
#pragma unroll
      for (int q = 0; q < PAIR; q++)
        if (STORED_OF[j] >= 0) all[q * STORED + (STORED_OF[j] >= 0 ? STORED_OF[j] : 0)] = g[j][p * PAIR + q];
    residual[p].round(all);
  }
}
#else
DEVICE void step_cells(float (&s)[STATES][CELLS], ResidualGates (&residual)[PAIRS], const float (&v)[GI][CELLS],
                       const float (&u)[GR][CELLS], const float (&b)[GATES][CELLS], const float (&constants)[CONSTANTS + 1][PAIR],
                       const ResetMask& reset, const bool (&valid)[CELLS], const UnitReductions&) {
  float all_gates[PAIRS][PAIR_GATES];
#pragma unroll
  for (int q = 0; q < CELLS; q++) {
    float gates[GATES], old[STATES], fresh[STATES];
    const bool carry = reset.carries(q);
#pragma unroll
    for (int i = 0; i < STATES; i++) old[i] = carry ? s[i][q] : 0;
#pragma unroll
    for (int j = 0; j < GATES; j++) {
      const float bias = STORED_OF[j] < 0 ? constants[CONSTANT_OF[j] >= 0 ? CONSTANT_OF[j] : 0][q % PAIR] : b[j][q];
      gates[j] = assemble_gate<SUM_HAS_BIAS>(j, bias, carry, [&](int k) { return u[k][q]; }, [&](int k) { return v[k][q]; });
      if (STORED_OF[j] >= 0) all_gates[q / PAIR][q % PAIR * STORED + (STORED_OF[j] >= 0 ? STORED_OF[j] : 0)] = gates[j];
    }
    cell_forward(gates, old, fresh);
#pragma unroll
    for (int i = 0; i < STATES; i++) s[i][q] = FINITE || valid[q] ? fresh[i] : 0;
  }
  if (STORE_GATES)
#pragma unroll
    for (int p = 0; p < PAIRS; p++) residual[p].round(all_gates[p]);
}
#endif

DEVICE void store_states(float* last, const float (&s)[STATES][CELLS], const LaneCells& cells, i64 B) {
#pragma unroll
  for (int q = 0; q < CELLS; q++)
#pragma unroll
    for (int i = 0; i < STATES; i++)
      if (cells.valid[q]) last[cells.state_index(i, q, B)] = s[i][q];
}

// Copies of x to shared memory, several steps ahead.
using InputLoader = TileLoader<BYTES, GI, ROW * BYTES>;
DEVICE void load_input(InputLoader& loader, int t, int stage, int steps, i64 step_bytes) {
  if (t < steps) loader.load(stage * INPUT_BYTES, step_bytes);
  copy_commit();
}
DEVICE void read_input(float (&v)[GI][CELLS], const char* stage, const ThreadCoord& coord) {
  const scalar* tile = reinterpret_cast<const scalar*>(stage + coord.unit_tile * GI * ROW_BYTES);
#pragma unroll
  for (int j = 0; j < GI; j++)
    if (coord.has_cells()) read_cells(v[j], tile, j, coord);
}

// Results of a step. They are stored after the next step has begun its product, which waits for nothing but h.
struct Results {
  StoredCells h;
  ResidualGates gates[PAIRS];
  bool to_store[CELLS] = {};  // none before the first step
  scalar* h_to[PAIRS];
  aux_number* aux_to[PAIRS];
  gate* gates_to[PAIRS];
  i64 aux_stride;  // from state to state
  DEVICE void start(scalar* h, aux_number* aux, gate* gates, i64 row_b, i64 row_t, i64 aux_stride_, const LaneCells& cells,
                    const ThreadCoord& coord) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      i64 at = (cells.sequence[p * PAIR] * row_b - row_t) * ROW + cells.element[p * PAIR];  // one step before the first
      h_to[p] = h + at, aux_to[p] = aux + at, gates_to[p] = gates + at * STORED;
      if constexpr (GATES_IN_PIECES) {
        const int number = coord.unit(p * PAIR) * GATES;
        gates_to[p] += in_pieces(number) - (coord.head * D * (GATES - 1) + number);
      }
      asm_fence(h_to[p]), asm_fence(aux_to[p]), asm_fence(gates_to[p]);
    }
    aux_stride = aux_stride_;
    asm_fence(aux_stride);
  }
  DEVICE void store(const float (&s)[STATES][CELLS], const StepStrides& strides) {
    h.store_global(h_to, 0, to_store);
#pragma unroll
    for (int i = 1; i < STATES; i++)
      if (STORE_AUX) store_cells(s[i], aux_to, (i - 1) * aux_stride, to_store);
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (STORE_GATES && to_store[p * PAIR]) gates[p].store(gates_to[p]);
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      advance(h_to[p], strides.h), advance(aux_to[p], strides.aux), advance(gates_to[p], strides.gates);
  }
};

// The block's dynamic shared memory.
struct SharedMemory {
  char* h;            // two buffers, read and written by turns
  char* inputs;       // STAGES steps of x
  float* sums;        // see reduce_slices
  char* send_buffer;  // h of this block's units
  char* fragments;    // what of R is not in registers
  u32 barriers;       // two buffers of SEGMENTS mbarriers
  char* reductions;   // see UnitReductions
  float* constants;   // see load_constants
  DEVICE SharedMemory(char* memory) {
    h = memory;
    inputs = h + 2 * H_BYTES;
    sums = reinterpret_cast<float*>(inputs + STAGES * INPUT_BYTES);
    send_buffer = reinterpret_cast<char*>(sums + SUM_FLOATS<GR>);
    fragments = send_buffer + SEND_BYTES;
    barriers = shared_address(fragments + WARPS * Weights::SHARED);
    reductions = fragments + WARPS * Weights::SHARED + BARRIER_BYTES;
    constants = reinterpret_cast<float*>(reductions + REDUCTION_BYTES);
  }
};

DEVICE void init_barriers(u32 barriers) {
  if (threadIdx.x == 0)
    for (int i = 0; i < 2 * SEGMENTS; i++) barrier_init(barriers + i * 8);
}
DEVICE void expect_h(u32 barriers, int buffer) {
  if (threadIdx.x == 0)
    for (int i = 0; i < SEGMENTS; i++) barrier_expect(barriers + (buffer * SEGMENTS + i) * 8, H_BYTES / SEGMENTS / SEQS * SEQUENCES);
}

// One time step: the product with h of the step before, the element-wise step, and h to all warps that need it next.
// `stage` holds the step's inputs. `h_operand`: where the lane's h goes in shared memory, or in the send buffer.
DEVICE void step_forward(int t, int& stage, int steps, const SharedMemory& shared, const Weights& weights, const LaneCells& cells,
                         float (&s)[STATES][CELLS], const float (&b)[GATES][CELLS], ResetMask& resets, InputLoader& loader,
                         Results& results, const u32 (&h_operand)[PAIRS], const Ring& ring, const UnitReductions& units,
                         const StepStrides& strides, const ThreadCoord& coord) {
  const int next = t + 1 & 1;
  const bool exchange = BLOCKS > 1 && t + 1 < steps;
  if (GRID && exchange) ring.clear(t + 1);
  if (CLUSTERED && exchange) expect_h(shared.barriers, next);

  float c[GR][BATCH_TILES][4] = {}, u[GR][CELLS];
  begin_sums(c, b);
  multiply(c, weights, shared_address(shared.h), shared.barriers, t, coord);
  float v[GI][CELLS];
  read_input(v, shared.inputs + stage * INPUT_BYTES, coord);
  results.store(s, strides);
  load_input(loader, t + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1, steps, strides.x);
  reduce_slices<GR>(u, c, shared.sums, coord);
  stage = stage + 1 == STAGES ? 0 : stage + 1;

  if constexpr (CLUSTERED && K_SLICES == 1) __syncwarp();  // the send buffer has been read; else reduce_slices ensures it
  float constants[CONSTANTS + 1][PAIR];
  read_constants(constants, shared.constants, coord);
  if constexpr (REDUCES) step_cells(s, results.gates, v, u, b, constants, resets, cells.valid, units);
  if (coord.has_cells()) {
    if constexpr (!REDUCES) step_cells(s, results.gates, v, u, b, constants, resets, cells.valid, units);
    if (t + 1 < steps) resets.load(t + 1, cells.valid);
    results.h.round(s[0]);
    results.h.get(s[0]);
    store_operand<BLOCKS == 1 ? PADDED : UNITS>(results.h, h_operand, BLOCKS == 1 ? next * H_BYTES : 0);
  }
#pragma unroll
  for (int q = 0; q < CELLS; q++) results.to_store[q] = cells.valid[q];
  copy_wait<STAGES - 2>();
  if constexpr (BLOCKS == 1) {
    __syncthreads();
  } else if constexpr (CLUSTERED) {
    named_barrier<TILE_THREADS>(1 + coord.unit_tile);
    if (exchange) send_h(shared.send_buffer, shared_address(shared.h) + next * H_BYTES, shared.barriers + next * SEGMENTS * 8, coord);
  } else {
    __syncthreads();
    if (exchange) {
      ring.send(shared.send_buffer, t);
      ring.receive(shared.h + next * H_BYTES, t);
    }
    __syncthreads();
  }
}

// PARAMETERS: types and shapes are in parameters.py. x, R, bias, initial, reset -> h, aux, last, gates (see cells.cuh).
// With GRID, `workspace` has a Ring for every group of the launch, and after them the words of their GridBarrier.
// Row (b, t) of x, h, aux and gates is row b * row_b + t * row_t: batch and time may be swapped in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_forward(PARAMETERS) {
  extern __shared__ __align__(128) char memory[];
  const SharedMemory shared(memory);
  const ThreadCoord coord(first_group, B);
  const int steps = static_cast<int>(T);
  const StepStrides strides{x_step, h_step, aux_step, gates_step};
  const Ring ring(workspace, coord);
  const GridBarrier<BLOCKS> grid_barrier(workspace + gridDim.x / BLOCKS * RING_VECTORS, launch);

  // Prologue: R, initial states and the first inputs are loaded; then all blocks of the group are ready.
  UnitReductions units(shared.reductions, grid_barrier.words_of_all + gridDim.x, coord);
  const bool meets = GRID && (REDUCES || steps > 1);
  if (meets) {
    units.clear();
    for (int i = 0; i < 3; i++) ring.clear(i);
    grid_barrier.arrive();
  }
  Weights weights;
  load_weights(weights, shared.fragments, R, coord);
  LaneCells cells;
  float s[STATES][CELLS], b[GATES][CELLS];
  load_cells(cells, s, b, initial, bias, B, coord);
  store_initial_h(shared.h, initial, coord);
  load_constants(shared.constants, bias, coord);
  Results results;
  results.h.round(s[0]);  // as h of every step
  results.h.get(s[0]);
  InputLoader loader;
  loader.start(shared_address(shared.inputs) + coord.unit_tile * GI * ROW_BYTES, coord,
               [&](i64 n) { return x + n * row_b * GI * ROW + coord.head * D; });
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load_input(loader, i, i, steps, strides.x);
  copy_wait<STAGES - 2>();
  if constexpr (CLUSTERED) {
    init_barriers(shared.barriers);
    units.init();
    cluster_sync();
  }
  if (meets) grid_barrier.wait();
  __syncthreads();
  results.start(h, aux, gates, row_b, row_t, B * T * ROW, cells, coord);
  u32 h_operand[PAIRS];
  operand_addresses(h_operand, shared_address(BLOCKS == 1 ? shared.h : shared.send_buffer),
                    BLOCKS == 1 ? 0 : coord.rank * UNITS, coord);
  ResetMask resets(reset, T, cells.sequence);
  resets.load(0, cells.valid);

  int stage = 0;
  for (int t = 0; t < steps; t++, units.step++)
    step_forward(t, stage, steps, shared, weights, cells, s, b, resets, loader, results, h_operand, ring, units, strides, coord);

  // Epilogue: the last results; no block ends while others may still send to it.
  results.store(s, strides);
  store_states(last, s, cells, B);
  if constexpr (CLUSTERED) cluster_sync();
  if (meets) grid_barrier.reset();
}
