// One token of each of many sequences through a language model of residual recurrent blocks, in one cooperative launch.
//
// As in step.cuh, a block computes tiles of eight rows of each matrix for all sequences. But here every block would take longer
// to read and normalize all rows than one more exchange takes, and all of the hidden layer is more than it can hold. So a
// residual block has five phases: h; the norms before the MLP, with a sequence for each warp of a few blocks; the hidden layer;
// products of `down` with slices of it; their sum, and the norm before the next residual block.
#pragma once
#include "decoding/kernels/phases.cuh"

constexpr int UNIT_BLOCKS = UNIT_TILES < GRID ? UNIT_TILES : GRID;
constexpr int HIDDEN_BLOCKS = HIDDEN_TILES < GRID ? HIDDEN_TILES : GRID;
constexpr int OUTPUT_BLOCKS = (UNIT_TILES < OUTPUT_STEP ? UNIT_TILES : OUTPUT_STEP) * SLICES;
static_assert(ROW_BLOCKS * WARPS >= SEQS && SEQS % 32 == 0 && OUTPUT_STEP > 0);

struct Shared : Products {
  float stream[STREAM_ROWS][WIDTH];  // the residual streams of this block's sequences, one of each warp
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "decoding/tiling.py counts shared memory differently");

// normalized and hidden_state [B, WIDTH], hidden [B, HIDDEN] and parts [SLICES, B, WIDTH] are written by some blocks and read by
// others.
struct Step {
  Shared& shared;
  const Model& model;
  Weights& weights;
  CountingBarrier& grid;
  scalar* normalized;
  float* hidden_state;
  scalar* hidden;
  float* parts;
  const i64 B;

  DEVICE static int row_block() { return GRID - 1 - blockIdx.x; }  // blocks without units come first

  // Lets each sequence's warp change its residual stream by f(stream, sequence), and normalizes it as the operand of the next
  // product.
  template <class F>
  DEVICE void normalize_stream(const scalar* norm, F f) {
    if (row_block() >= ROW_BLOCKS) return grid.pass(ROW_BLOCKS);
    const int place = threadIdx.x / 32, sequence = row_block() + place * ROW_BLOCKS;
    weights.refill();
    Row weight;
    if (sequence < B) weight.load(norm);
    grid.wait();
    if (sequence < B) {
      Row x;
      f(x, sequence);
      x.store(shared.stream[place]);
      x.normalize<WIDTH>();
      x.multiply_by(weight);
      x.store(normalized + sequence * WIDTH);
    }
    grid.arrive(ROW_BLOCKS);
  }
  DEVICE void load_stream(Row& x) const { x.load(shared.stream[threadIdx.x / 32]); }

  DEVICE void begin(const scalar* embedding, const i64* tokens) {
    normalize_stream(model.at(0, MIXER_NORM), [&](Row& x, int sequence) { x.load(embedding + tokens[sequence] * WIDTH); });
  }

  // Sets the operand to columns `first` to first + WIDTH of rows of `stride` numbers.
  DEVICE void load(Operand& operand, const scalar* from, int stride) const {
    grid.wait();
    load_operand(operand, VECTORS, B, [&](int sequence, int at) {
      return load_exchanged(reinterpret_cast<const uint4*>(from + i64(sequence) * stride + at), true);
    });
  }

  DEVICE void compute_h(int block) {
    if (first_unit_tile() >= UNIT_TILES) return grid.pass(UNIT_BLOCKS);
    Operand operand;
#pragma unroll 1
    for (int tile = first_unit_tile(); tile < UNIT_TILES; tile += GRID) {
      if (tile != first_unit_tile()) __syncthreads();
      compute_h_of(tile, block, operand);
    }
    grid.arrive(UNIT_BLOCKS);
  }
  // Of a tile of units; the first one sets the operand for all. A lane computes a unit of every 32nd sequence.
  DEVICE void compute_h_of(int tile, int block, Operand& operand) {
    constexpr int LANE_SEQS = SEQS / 32;
    const int unit = tile * 8 + threadIdx.x % 8;
    float* state = model.at<float>(block, STATE);
    const scalar* bias = model.at(block, BIAS);
    float old[LANE_SEQS][STATES], b[GATES];
#pragma unroll
    for (int n = 0; n < LANE_SEQS; n++)
#pragma unroll
      for (int k = 0; k < STATES; k++) {
        const int sequence = n * 32 + threadIdx.x / 8;
        old[n][k] = sequence < B ? state[(k * B + sequence) * WIDTH + unit] : 0;
      }
#pragma unroll
    for (int j = 0; j < GATES; j++) b[j] = float(bias[j * WIDTH + unit]);
    weights.refill();
    {
      Sums c[GATES] = {};
      add_recurrent(weights, state, tile * 8, B, c);  // before the input arrives
#pragma unroll
      for (int j = 0; j < GATES; j++) store_sums(shared, j, c[j]);
    }
    if constexpr (SLOTS < GR + GI) {
      __syncthreads();
      weights.refill();
    }
    if (tile == first_unit_tile()) load(operand, normalized, WIDTH);
    each<GI>([&](auto k) {
      Sums c = {};
      weights.multiply<1>([&](int) -> Sums& { return c; }, [&](int) -> const Operand& { return operand; }, VECTORS);
      store_sums<true>(shared, gate_of(INPUT_OF, k), c);
    });
    __syncthreads();
#pragma unroll
    for (int n = 0; n < LANE_SEQS; n++) {
      const int sequence = n * 32 + threadIdx.x / 8;
      float g[GATES], fresh[STATES];
#pragma unroll
      for (int j = 0; j < GATES; j++) g[j] = b[j] + sum_of_warps(shared, j, sequence, threadIdx.x % 8);
      cell_forward(g, old[n], fresh);
      if (sequence >= B) continue;
      hidden_state[sequence * WIDTH + unit] = float(scalar(fresh[0]));
#pragma unroll
      for (int k = 1; k < STATES; k++) state[(k * B + sequence) * WIDTH + unit] = fresh[k];
    }
  }

  DEVICE void add_h(int block) {
    Row head_weight;
    head_weight.load(model.at(block, HEAD_NORM));
    normalize_stream(model.at(block, MLP_NORM), [&](Row& x, int sequence) {
      Row h;
      load_exchanged(h, hidden_state + sequence * WIDTH);
      load_stream(x);
      h.normalize<D>();
      h.multiply_by(head_weight);
      x.add(h);
    });
  }

  DEVICE void compute_hidden(int block) {
    if (blockIdx.x >= HIDDEN_BLOCKS) return grid.pass(HIDDEN_BLOCKS);
    weights.refill();
    Operand operand;
    load(operand, normalized, WIDTH);
    multiply_rows(shared, weights, operand, blockIdx.x, HIDDEN_TILES, B, [&](int sequence, int, int row, float sum) {
      if (row < HIDDEN) hidden[sequence * HIDDEN + row] = scalar(gelu(sum));
    });
    grid.arrive(HIDDEN_BLOCKS);
  }

  DEVICE void compute_parts() {
    if (blockIdx.x >= OUTPUT_BLOCKS) return grid.pass(OUTPUT_BLOCKS);
    weights.refill();
    Operand operand;
    load(operand, hidden + output_slice() * WIDTH, HIDDEN);
    float* part = parts + output_slice() * B * WIDTH;
    multiply_rows<OUTPUT_STEP>(shared, weights, operand, first_output_tile(), UNIT_TILES, B, [&](int sequence, int, int row, float sum) {
      if (row < WIDTH) part[sequence * WIDTH + row] = sum;
    });
    grid.arrive(OUTPUT_BLOCKS);
  }

  // norm: of what comes after the block.
  DEVICE void add_parts(const scalar* norm) {
    normalize_stream(norm, [&](Row& x, int sequence) {
      Row part[SLICES];
#pragma unroll
      for (int k = 0; k < SLICES; k++) load_exchanged(part[k], parts + (k * B + sequence) * WIDTH);
      load_stream(x);
#pragma unroll
      for (int k = 0; k < SLICES; k++) x.add(part[k]);
    });
  }
};

// PARAMETERS: as those of step.cuh. normalized, hidden_state, hidden and parts: as in `Step`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_step_of_many(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  Shared& shared = *shared_memory;
  for (int i = threadIdx.x; i < BLOCKS * ENTRIES; i += THREADS) shared.table[i] = table[i];
  const Model model{base, shared.table};
  Weights weights(model, head, shared.slots, shared.barriers);
  CountingBarrier grid(counters);
  const Choice choice{logits, best, chosen, history, cursor, keys, temperature};
  Step step{shared, model, weights, grid, normalized, hidden_state, hidden, parts, B};
  __syncthreads();

  step.begin(embedding, tokens);
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    step.compute_h(block);
    step.add_h(block);
    step.compute_hidden(block);
    store_h(model.at<float>(block, STATE), hidden_state, B);
    step.compute_parts();
    step.add_parts(block + 1 < BLOCKS ? model.at(block + 1, MIXER_NORM) : norm);
  }
  weights.refill();
  Operand operand;
  step.load(operand, normalized, WIDTH);
  choice.compute(shared, weights, operand, B);

  if (last_of_grid(counters + 1)) {
    choice.finish(B);
    if (threadIdx.x == 0) counters[0] = counters[1] = 0;
  }
}
