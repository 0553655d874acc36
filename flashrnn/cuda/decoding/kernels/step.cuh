// One token of each of a few sequences through a language model of residual recurrent blocks, in one cooperative
// launch.
//
// A residual block, x + norm(h) and x + down(gelu(up(norm(x)))), has three phases, whose results the thread blocks
// exchange: h, from gates and cell; the hidden layer of the MLP; and the residual stream x. A thread block computes
// tiles of eight rows of each matrix for all sequences; in the first phase, all gates of eight units. Every thread
// block reads the whole residual stream and computes its norms itself, which takes less time than another exchange.
#pragma once
#include "decoding/kernels/phases.cuh"

// Slices of the hidden layer that are loaded at once: as many as fit into registers.
constexpr int SLICES_AT_ONCE = WARP_VECTORS <= 3 ? SLICES < 4 ? SLICES : 4 : SLICES < 2 ? 1 : 2;

struct Shared : Products {
  float sums[WARPS][SEQS][TILES][8];       // the sum of tile k for a sequence is at place(k, sequence)
  float stream[SEQS][WIDTH];               // the residual stream
  float residual[SEQS][OUTPUT_TILES * 8];  // the residual stream at the rows of `down` that this block computes
  scalar operand[SEQS * OPERAND_STRIDE];
  float2 moments[2][WARPS];  // see Join
  // A permutation of tiles such that a warp reads the sums of four tiles, and writes those of eight sequences, without
  // bank conflicts.
  DEVICE static int place(int tile, int sequence) { return tile ^ sequence & 3; }
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "decoding/tiling.py counts shared memory differently");

DEVICE int warp_sequence() { return threadIdx.x / 32; }

// Stores this warp's partial sums of a tile.
DEVICE void store_sums(Shared& shared, int tile, const Sums& c) {
  const int sequence = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  float* to = &shared.sums[threadIdx.x / 32][sequence][shared.place(tile, sequence)][column];
  *reinterpret_cast<float2*>(to) = make_float2(c[0][0][0], c[0][0][1]);
}
// Returns the sum over all warps, for a row of a tile and this warp's sequence. The warps must have synchronised.
DEVICE float sum_of_warps(const Shared& shared, int tile, int row) {
  float sum = 0;
  UNROLL for (int warp = 0; warp < WARPS; warp++)
    sum += shared.sums[warp][warp_sequence()][shared.place(tile, warp_sequence())][row];
  return sum;
}

// Multiplies the operand by this block's tiles of a matrix of ROWS rows, applies `scales`, and calls f(row, sum) for
// each result of the warp's sequence, if there is one. All lanes call f, which must ignore rows beyond the matrix.
template <int ROWS, class F>
DEVICE void multiply_rows(Shared& shared, Weights& weights, const Operand& operand, const float* scales, i64 B, F f) {
  for_tiles<(ROWS + 7) / 8, GRID>(blockIdx.x, [&](auto tiles, int first) {
    Sums c[tiles] = {};
    const Scales<tiles> row_scales(scales, first * 8, GRID * 8, ROWS);
    weights.multiply<tiles>([&](auto k) -> Sums& { return c[k]; },
                            [&](int, int i) -> const Vectors& { return operand[i]; }, VECTORS);
    if (first >= TILES * GRID) sync_consumers();  // all threads have read the previous sums
    UNROLL for (int k = 0; k < tiles; k++) row_scales.apply(c[k], k), store_sums(shared, k, c[k]);
    sync_consumers();
    if (warp_sequence() >= B) return;
    for (int i = threadIdx.x % 32; i < (tiles * 8 + 31) / 32 * 32; i += 32)
      f(i < tiles * 8 ? (first + i / 8 * GRID) * 8 + i % 8 : ROWS, sum_of_warps(shared, i / 8, i % 8));
  });
}

// A decoding step. residual and hidden_state [B, WIDTH] and hidden [B, HIDDEN] are written by some blocks and read by
// others.
struct Step {
  Shared& shared;
  const Model& model;
  Weights& weights;
  CountingBarrier& grid;
  const Params params;
  const int unit_tiles;  // of this block
  const u32 earlier;     // number of residual blocks that earlier launches ran

  // Returns the mark of a residual block's results.
  DEVICE u32 mark(int block) const { return earlier + block + 1 & 1; }

  // Calls f(row, sequence, valid), where `row` is an empty Row or Part: what the warp normalises.
  template <class F>
  DEVICE void with_row(F f) const {
    if (params.B == 1) f(Part(), 0, true);
    else f(Row(), warp_sequence(), warp_sequence() < params.B);
  }
  // Loads the residual stream before a residual block.
  template <class R>
  DEVICE void load_stream(R& row, int block, int sequence) const {
    if (block == 0) row.load(params.embedding + params.tokens[sequence] * WIDTH);
    else load_marked(row, params.residual + sequence * WIDTH, mark(block - 1));
  }
  // Sets the operand to the rows that the warps have stored in shared memory; synchronises first.
  DEVICE void load_normalized(Operand& operand) const {
    sync_consumers();
    load_operand(operand, VECTORS, params.B, [&](int sequence, int at) {
      return *reinterpret_cast<const uint4*>(&shared.operand[sequence * OPERAND_STRIDE + at]);
    });
  }
  // Waits for the residual stream before a residual block, and normalises it as the operand of the block's first
  // matrix.
  DEVICE void begin(Operand& operand, int block, const scalar* norm) {
    with_row([&](auto row, int sequence, bool valid) {
      auto weight = row;
      if (valid) weight.load(norm);
      if (block > 0) grid.wait();
      if (!valid) return;
      load_stream(row, block, sequence);
      row.store(shared.stream[sequence]);
      row.template normalize<WIDTH>(Join{shared.moments[1]});
      row.multiply_by(weight);
      row.store(&shared.operand[sequence * OPERAND_STRIDE]);
    });
    load_normalized(operand);
  }

  // First phase: gates and cells of this block's units.
  DEVICE void compute_h(int block) {
    if (unit_tiles == 0) return grid.pass(UNIT_BLOCKS * (1 + HEAD_EXCHANGES));
    Operand operand;
#pragma unroll 1
    for (int i = 0; i < unit_tiles; i++) {
      if (i > 0) sync_consumers();
      compute_h_of(i, block, operand);
    }
    grid.arrive_marked(UNIT_BLOCKS);
  }
  // Computes tile number i of the units. The first one sets the operand for all.
  DEVICE void compute_h_of(int i, int block, Operand& operand) {
    const int lane = threadIdx.x % 32, unit0 = (first_unit_tile() + i * GRID) * 8, unit = unit0 + lane % 8;
    float* state = model.at<float>(block, STATE);
    const scalar* bias = model.at(block, BIAS);
    const int sequence = warp_sequence();
    float old[STATES][1] = {}, b[GATES];
    if (sequence < params.B)
      UNROLL for (int k = 0; k < STATES; k++) old[k][0] = state[(k * params.B + sequence) * WIDTH + unit];
    UNROLL for (int j = 0; j < GATES; j++) b[j] = float(bias[j * WIDTH + unit]);
    const Scales<GI> scales(model.at<const float>(block, GATE_SCALE), unit0, WIDTH, GI * WIDTH);
    Sums c[STORED] = {};
    add_recurrent(weights, state, unit0, params.B, c);  // before the residual stream has arrived
    if (i == 0) begin(operand, block, model.at(block, MIXER_NORM));
    add_input(weights, scales, [&](int, int i) -> const Vectors& { return operand[i]; }, c);
    UNROLL for (int j = 0; j < STORED; j++) store_sums(shared, j, c[j]);
    sync_consumers();
    if (!REDUCES && sequence >= params.B) return;
    // Lane 8j + r sums product j of unit r; then, all lanes of a unit compute its cell.
    float sums[TILES / 4], g[GATES][1], fresh[STATES][1];
    UNROLL for (int j = 0; j < TILES; j += 4) sums[j / 4] = sum_of_warps(shared, j + lane / 8, lane % 8);
    UNROLL for (int j = 0; j < GATES; j++) {
      const int k = STORED_OF[j];
      g[j][0] = b[j] + (k < 0 ? 0 : __shfl_sync(0xffffffffu, sums[max(k, 0) / 4], max(k, 0) % 4 * 8 + lane % 8));
    }
    compute_cells(g, old, fresh, UnitReductions<1, 8>{grid, params.partials, params.B, lane == 0, unit0 / 8, sequence});
    if (lane >= 8 || sequence >= params.B) return;
    store_marked(params.hidden_state + sequence * WIDTH + unit, {float(scalar(fresh[0][0]))}, mark(block));
    UNROLL for (int k = 1; k < STATES; k++) state[(k * params.B + sequence) * WIDTH + unit] = fresh[k][0];
  }

  // Second phase: x + norm(h), and the hidden layer of the MLP.
  DEVICE void compute_hidden(int block) {
    Operand operand;
    with_row([&](auto x, int sequence, bool valid) {
      auto h = x, head_weight = x, mlp_weight = x;
      if (valid) head_weight.load(model.at(block, HEAD_NORM)), mlp_weight.load(model.at(block, MLP_NORM));
      grid.wait();
      if (!valid) return;
      if (unit_tiles > 0) x.load(shared.stream[sequence]);
      else load_stream(x, block, sequence);
      load_marked(h, params.hidden_state + sequence * WIDTH, mark(block));
      h.template normalize<D>(Join{shared.moments[0]});
      h.multiply_by(head_weight);
      x.add(h);
      x.for_each([&](float (&v)[4], int at) {
        const int place = at / 8 - first_output_tile();
        if (place >= 0 && place % GRID == 0) store_four(&shared.residual[sequence][place / GRID * 8 + at % 8], v);
      });
      x.template normalize<WIDTH>(Join{shared.moments[1]});
      x.multiply_by(mlp_weight);
      x.store(&shared.operand[sequence * OPERAND_STRIDE]);
    });
    load_normalized(operand);
    multiply_rows<HIDDEN>(shared, weights, operand, model.at<const float>(block, UP_SCALE), params.B, [&](int row, float sum) {
      store_together(params.hidden + warp_sequence() * HIDDEN + row, scalar(gelu(sum)), row < HIDDEN, mark(block));
    });
  }

  // Third phase: the residual stream after the MLP.
  DEVICE void compute_stream(int block) {
    if (first_output_tile() >= UNIT_TILES) return grid.pass(UNIT_BLOCKS);
    grid.wait();
#pragma unroll 1
    for (int tile = first_output_tile(), place = 0; tile < UNIT_TILES; tile += GRID, place++) {
      const Scales<1> scales(model.at<const float>(block, DOWN_SCALE), tile * 8, 0, WIDTH);
      Sums c[SLICES_AT_ONCE] = {};
      UNROLL for (int first = 0; first < SLICES; first += SLICES_AT_ONCE) {
        Operand slices[SLICES_AT_ONCE];
        load_slices(slices, first, mark(block));
        weights.multiply<SLICES_AT_ONCE>([&](auto k) -> Sums& { return c[k]; },
                                         [&](auto k, int i) -> const Vectors& { return slices[k][i]; }, VECTORS,
                                         SLICES - first);
      }
      UNROLL for (int k = 1; k < SLICES_AT_ONCE; k++)
        UNROLL for (int r = 0; r < 4; r++) c[0][0][0][r] += c[k][0][0][r];
      sync_consumers();  // all threads have read the previous sums
      scales.apply(c[0], 0);
      store_sums(shared, 0, c[0]);
      sync_consumers();
      const int lane = threadIdx.x % 32, sequence = warp_sequence();
      if (lane >= 8 || sequence >= params.B) continue;
      const float sum = shared.residual[sequence][place * 8 + lane] + sum_of_warps(shared, 0, lane);
      store_marked(params.residual + sequence * WIDTH + tile * 8 + lane, {sum}, mark(block));
    }
    grid.arrive_marked(UNIT_BLOCKS);
  }
  // Loads slices of the hidden layer, from `first` on. Lanes that hold no numbers load those of others.
  DEVICE void load_slices(Operand (&slices)[SLICES_AT_ONCE], int first, u32 mark) const {
    const int sequence = threadIdx.x % 32 / 4;
    auto vector = [](int k) { return k % WARP_VECTORS * K_SLICES + k_slice(); };
    uint4 words[SLICES_AT_ONCE * WARP_VECTORS];
    load_marked<false>(words, mark, [&](int k) {
      const int at = min(first + k / WARP_VECTORS, SLICES - 1) * WIDTH + min(vector(k), VECTORS - 1) * VECTOR;
      return params.hidden + min(i64(sequence), params.B - 1) * HIDDEN + at + threadIdx.x % 4 * LANE;
    });
    UNROLL for (int k = 0; k < SLICES_AT_ONCE * WARP_VECTORS; k++) {
      auto& values = slices[k / WARP_VECTORS][k % WARP_VECTORS].values[0];
      values[0] = sequence < params.B && vector(k) < VECTORS ? words[k] : make_uint4(0, 0, 0, 0),
          values[1] = make_uint4(0, 0, 0, 0);
    }
  }
};

// Params: types and shapes are in step.py. tokens (at most SEQS) -> logits and chosen tokens (see `Choice`). table: see
// `Model`. residual, hidden_state and hidden: see `Step`. The first two counters are zero before and after; the third
// is `Step.earlier`.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
flashrnn_step(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  Shared& shared = *shared_memory;
  const Params params{PARAMETER_NAMES};
  begin(shared, params.table);
  const Model model{params.base, shared.table};
  if (is_producer()) {
    if (threadIdx.x < THREADS + 8) WeightProducer(model, params.head, shared.chunks, shared.slots).run();
    return;
  }
  Weights weights(shared.chunks, shared.slots);
  CountingBarrier grid(params.counters);
  Step step{shared, model, weights, grid, params, tiles_from(first_unit_tile(), UNIT_TILES), params.counters[2]};
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    step.compute_h(block);
    step.compute_hidden(block);
    grid.arrive_marked();
    store_h(model.at<float>(block, STATE), params.hidden_state, params.B);
    step.compute_stream(block);
  }
  Operand operand;
  step.begin(operand, BLOCKS, params.norm);
  const Choice choice(params);
  u64 largest = 0;
  multiply_rows<CLASSES>(shared, weights, operand, params.head_scale, params.B, [&](int row, float sum) {
    if (row < CLASSES) largest = max(largest, choice.rate(warp_sequence(), row, sum));
  });
  if (warp_sequence() < params.B) choice.raise<32>(warp_sequence(), largest);
  choice.finish(shared.before);
}
