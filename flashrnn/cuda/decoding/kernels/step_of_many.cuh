// One token of each of many sequences through a language model of residual recurrent blocks, in one cooperative launch.
//
// As in step.cuh, a thread block computes tiles of eight rows of each matrix for all sequences. But here, it would take
// a block longer to read and normalise all rows than to do one more exchange, and the whole hidden layer exceeds its
// shared memory. So a residual block has five phases: h; the norms before the MLP, of one sequence per thread block if
// there are enough; the hidden layer; the products of `down` with slices of it; their sum, and the norm before the next
// residual block.
#pragma once
#include "decoding/kernels/phases.cuh"

constexpr int HIDDEN_BLOCKS = HIDDEN_TILES < GRID ? HIDDEN_TILES : GRID;
constexpr int OUTPUT_BLOCKS = (UNIT_TILES < OUTPUT_STEP ? UNIT_TILES : OUTPUT_STEP) * SLICES;
constexpr int VALUES = 4 / K_SLICES;  // results that a lane has of a tile of rows by a tile of sequences
static_assert(ROW_BLOCKS * STREAM_ROWS >= SEQS && K_SLICES * VALUES == 4 && OUTPUT_STEP > 0);

struct Shared : Products {
  scalar operand[SEQS][OPERAND_STRIDE];  // in the same layout as in memory
  float sums[SEQ_TILES][K_SLICES][TILES][4][32];
  float stream[STREAM_ROWS][WIDTH];  // the residual streams of this block's sequences
  float2 moments[2][2][WARPS];       // see Join
  u64 arrived[SEQ_TILES];            // an mbarrier for each tile of sequences of the operand
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "decoding/tiling.py counts shared memory differently");

// The results of products that a lane has: value v of a tile of rows is that of row column(v) of the tile, for
// `sequence()`.
DEVICE int value_of(int v) { return k_slice() * VALUES + v; }
DEVICE int sequence() { return seq_tile() * 16 + value_of(0) / 2 * 8 + threadIdx.x % 32 / 4; }
DEVICE int column(int v) { return threadIdx.x % 4 * 2 + value_of(v) % 2; }

// Adds up the partial sums of the warps that share a tile of sequences, for K tiles of rows. Each warp gets some of the
// results. All of these warps call this.
template <int K>
DEVICE void reduce_slices(Shared& shared, const Sums (&c)[K], float (&results)[K][VALUES]) {
  const int lane = threadIdx.x % 32;
  auto& tile_sums = shared.sums[seq_tile()];
  auto barrier = [] { named_barrier<32 * K_SLICES>(2 + seq_tile()); };
  barrier();  // all have read the previous sums
  UNROLL for (int k = 0; k < K; k++)
    UNROLL for (int i = 0; i < 4; i++) tile_sums[k_slice()][k][i][lane] = c[k][0][0][i];
  barrier();
  UNROLL for (int k = 0; k < K; k++)
    UNROLL for (int v = 0; v < VALUES; v++) {
      results[k][v] = 0;
      UNROLL for (int other = 0; other < K_SLICES; other++) results[k][v] += tile_sums[other][k][value_of(v)][lane];
    }
}

// The vectors of the operand, read from shared memory when they are multiplied: registers could not hold those of a
// warp besides its weights.
struct VectorsOf {
  Shared& shared;
  DEVICE Vectors operator()(int, int i) const {
    Vectors vectors;
    const int row = seq_tile() * 16 + threadIdx.x % 32 / 4;
    const int at = (i * K_SLICES + k_slice()) * VECTOR + threadIdx.x % 4 * LANE;
    UNROLL for (int half = 0; half < 2; half++)
      vectors.values[0][half] = *reinterpret_cast<const uint4*>(&shared.operand[row + half * 8][at]);
    return vectors;
  }
};

// Multiplies the operand by this block's tiles begin, begin + STEP, ... of a matrix of ROWS rows, applies `scales`, and
// calls f(row, sums) for the lane's values of a tile, whose rows begin at `row`. f must ignore rows beyond the matrix
// and sequences beyond the batch.
template <int ROWS, int STEP, class F>
DEVICE void multiply_rows(Shared& shared, Weights& weights, int begin, const float* scales, F f) {
  for_tiles<(ROWS + 7) / 8, STEP>(begin, [&](auto tiles, int first) {
    Sums c[tiles] = {};
    const Scales<tiles> row_scales(scales, first * 8, STEP * 8, ROWS);
    weights.multiply<tiles>([&](auto k) -> Sums& { return c[k]; }, VectorsOf{shared}, VECTORS);
    UNROLL for (int k = 0; k < tiles; k++) row_scales.apply(c[k], k);
    float sums[tiles][VALUES];
    reduce_slices(shared, c, sums);
    UNROLL for (int k = 0; k < tiles; k++) f((first + k * STEP) * 8 + column(0), sums[k]);
  });
}

// A decoding step. Rows of `normalized` [2, B, OPERAND_STRIDE] (the operands of the gates and of the hidden layer) and
// of `hidden` [2, SLICES, B, OPERAND_STRIDE] (of this residual block and the previous one) have the same layout as in
// shared memory, with WIDTH numbers. These, hidden_state [B, WIDTH] and parts [SLICES, B, WIDTH] are written by some
// blocks and read by others. Exchanges of marked results release nothing, so a row may be overwritten only after
// another exchange, which does; hence two of each.
struct Step {
  Shared& shared;
  const Model& model;
  Weights& weights;
  CountingBarrier& grid;
  const Params params;
  const u32 earlier;  // number of residual blocks that earlier launches ran
  u32 parity = 0;     // of the mbarriers for copies of the operand

  DEVICE u32 mark(int block) const { return earlier + block + 1 & 1; }

  DEVICE static int row_block() { return GRID - 1 - blockIdx.x; }  // blocks without units come first

  // Updates the residual stream of each of the block's sequences (number n) by f(stream, sequence, n), and normalises
  // it as the `operand` of the next product.
  template <class F>
  DEVICE void normalize_stream(const scalar* norm, scalar* operand, F f) {
    if (!has_rows()) return grid.pass(ROW_BLOCKS);
    Part weight;
    weight.load(norm);
    grid.wait();
#pragma unroll 1
    for (int n = 0; n < STREAM_ROWS; n++) {
      const int row = row_block() + n * ROW_BLOCKS;
      if (row >= params.B) break;
      Part x;
      f(x, row, n);
      x.store(shared.stream[n]);
      x.normalize<WIDTH>(Join{shared.moments[n % 2][1]});
      x.multiply_by(weight);
      x.store(operand + row * OPERAND_STRIDE);
    }
    grid.arrive(ROW_BLOCKS);
  }
  DEVICE static bool has_rows() { return row_block() < ROW_BLOCKS; }

  DEVICE void begin() {
    auto load_embedding = [&](Part& x, int row, int) { x.load(params.embedding + params.tokens[row] * WIDTH); };
    normalize_stream(model.at(0, MIXER_NORM), params.normalized, load_embedding);
  }

  // Waits for rows [B, OPERAND_STRIDE] and copies them to the operand. Bulk copies to shared memory take a third of the
  // time of loads, each of which would be of eight rows.
  DEVICE void load(const scalar* rows) {
    if (threadIdx.x == CountingBarrier::THREAD) {
      grid.wait_alone();
      fence_async_global();
      UNROLL for (int m = 0; m < SEQ_TILES; m++) {
        const u32 barrier = shared_address(shared.arrived + m), count = min(max(int(params.B) - m * 16, 0), 16);
        barrier_expect(barrier, count * sizeof(shared.operand[0]));
        if (count)
          copy_bulk(shared_address(shared.operand[m * 16]), rows + m * 16 * OPERAND_STRIDE,
                    count * sizeof(shared.operand[0]), barrier);
      }
    }
    __syncwarp();
    barrier_wait(shared_address(shared.arrived + seq_tile()), parity);
    parity ^= 1;
  }

  // First phase: gates and cells of this block's units.
  DEVICE void compute_h(int block) {
    if (first_unit_tile() >= UNIT_TILES) return grid.pass(UNIT_BLOCKS * (1 + HEAD_EXCHANGES));
#pragma unroll 1
    for (int tile = first_unit_tile(); tile < UNIT_TILES; tile += GRID) compute_h_of(tile, block);
    grid.arrive_marked(UNIT_BLOCKS);
  }
  // Computes a tile of units. The first one loads the operand for all.
  DEVICE void compute_h_of(int tile, int block) {
    const int row = sequence();
    float* state = model.at<float>(block, STATE);
    const scalar* bias = model.at(block, BIAS);
    float old[STATES][VALUES], g[GATES][VALUES], fresh[STATES][VALUES];
    UNROLL for (int v = 0; v < VALUES; v++) {
      const int unit = tile * 8 + column(v);
      UNROLL for (int k = 0; k < STATES; k++)
        old[k][v] = row < params.B ? state[(k * params.B + row) * WIDTH + unit] : 0;
      UNROLL for (int j = 0; j < GATES; j++) g[j][v] = float(bias[j * WIDTH + unit]);
    }
    const Scales<GI> scales(model.at<const float>(block, GATE_SCALE), tile * 8, WIDTH, GI * WIDTH);
    Sums c[STORED] = {};
    add_recurrent(weights, state, tile * 8, params.B, c);  // before the input has arrived
    if (tile == first_unit_tile()) load(params.normalized);
    add_input(weights, scales, VectorsOf{shared}, c);
    float sums[STORED][VALUES];
    reduce_slices(shared, c, sums);
    UNROLL for (int j = 0; j < GATES; j++)
      UNROLL for (int v = 0; v < VALUES; v++)
        if (STORED_OF[j] >= 0) g[j][v] += sums[max(STORED_OF[j], 0)][v];
    using Units = UnitReductions<VALUES, 4>;
    const int contribution = tile * Units::OF_TILE + k_slice() % Units::OF_TILE;
    compute_cells(g, old, fresh, Units{grid, params.partials, params.B, threadIdx.x % 4 == 0, contribution, row});
    if (row >= params.B) return;
    UNROLL for (int v = 0; v < VALUES; v++) {
      fresh[0][v] = float(scalar(fresh[0][v]));
      UNROLL for (int k = 1; k < STATES; k++) state[(k * params.B + row) * WIDTH + tile * 8 + column(v)] = fresh[k][v];
    }
    store_marked(params.hidden_state + row * WIDTH + tile * 8 + column(0), fresh[0], mark(block));
  }

  // Second phase: adds norm(h) to the residual stream, and normalises it as the operand of the MLP.
  DEVICE void add_h(int block) {
    Part head_weight;
    if (has_rows()) head_weight.load(model.at(block, HEAD_NORM));
    normalize_stream(model.at(block, MLP_NORM), params.normalized + params.B * OPERAND_STRIDE, [&](Part& x, int row, int n) {
      Part h;
      load_marked(h, params.hidden_state + row * WIDTH, mark(block));
      x.load(shared.stream[n]);
      h.normalize<D>(Join{shared.moments[n % 2][0]});
      h.multiply_by(head_weight);
      x.add(h);
    });
  }

  DEVICE scalar* slice(int block, int index) const {
    return params.hidden + (block % 2 * SLICES + index) * params.B * OPERAND_STRIDE;
  }
  // Third phase: the hidden layer of the MLP.
  DEVICE void compute_hidden(int block) {
    if (blockIdx.x >= HIDDEN_BLOCKS) return grid.pass(HIDDEN_BLOCKS);
    load(params.normalized + params.B * OPERAND_STRIDE);
    multiply_rows<HIDDEN, GRID>(shared, weights, blockIdx.x, model.at<const float>(block, UP_SCALE), [&](int at, const float (&sums)[VALUES]) {
      if (at >= HIDDEN || sequence() >= params.B) return;
      scalar* to = slice(block, at / WIDTH) + sequence() * OPERAND_STRIDE + at % WIDTH;
      if constexpr (VALUES == 1) *to = scalar(gelu(sums[0]));
      else *reinterpret_cast<u32*>(to) = pack(gelu(sums[0]), gelu(sums[1]));
    });
    grid.arrive(HIDDEN_BLOCKS);
  }

  // Fourth phase: the products of `down` with a slice of the hidden layer.
  DEVICE void compute_parts(int block) {
    if (blockIdx.x >= OUTPUT_BLOCKS) return grid.pass(OUTPUT_BLOCKS);
    load(slice(block, output_slice()));
    const float* scales = model.at<const float>(block, DOWN_SCALE);
    float* part = params.parts + (output_slice() * params.B + sequence()) * WIDTH;
    multiply_rows<WIDTH, OUTPUT_STEP>(shared, weights, first_output_tile(), scales, [&](int at, const float (&sums)[VALUES]) {
      if (at < WIDTH && sequence() < params.B) store_marked(part + at, sums, mark(block));
    });
    grid.arrive_marked(OUTPUT_BLOCKS);
  }

  // Fifth phase: adds these products to the residual stream, and normalises it by `norm`, that of the next residual
  // block or of the output.
  DEVICE void add_mlp(int block, const scalar* norm) {
    normalize_stream(norm, params.normalized, [&](Part& x, int row, int n) {
      Part part[SLICES];
      load_marked(part, params.parts + row * WIDTH, params.B * WIDTH, mark(block));
      x.load(shared.stream[n]);
      UNROLL for (int k = 0; k < SLICES; k++) x.add(part[k]);
    });
  }
};

// Params: see step.cuh. normalized, hidden_state, hidden and parts: see `Step`.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
flashrnn_step_of_many(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  Shared& shared = *shared_memory;
  if (threadIdx.x == 0)
    for (int m = 0; m < SEQ_TILES; m++) barrier_init(shared_address(shared.arrived + m));
  const Params params{PARAMETER_NAMES};
  begin(shared, params.table);
  const Model model{params.base, shared.table};
  if (is_producer()) {
    if (threadIdx.x < THREADS + 8) WeightProducer(model, params.head, shared.chunks, shared.slots).run();
    return;
  }
  Weights weights(shared.chunks, shared.slots);
  CountingBarrier grid(params.counters);
  Step step{shared, model, weights, grid, params, params.counters[2]};

  step.begin();
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    step.compute_h(block);
    step.add_h(block);
    step.compute_hidden(block);
    store_h(model.at<float>(block, STATE), params.hidden_state, params.B);
    step.compute_parts(block);
    step.add_mlp(block, block + 1 < BLOCKS ? model.at(block + 1, MIXER_NORM) : params.norm);
  }
  step.load(params.normalized);
  const Choice choice(params);
  u64 largest = 0;
  multiply_rows<CLASSES, GRID>(shared, weights, blockIdx.x, params.head_scale, [&](int row, const float (&sums)[VALUES]) {
    UNROLL for (int v = 0; v < VALUES; v++)
      if (row + v < CLASSES && sequence() < params.B) largest = max(largest, choice.rate(sequence(), row + v, sums[v]));
  });
  choice.raise<4>(sequence(), largest);
  choice.finish(shared.before);
}
