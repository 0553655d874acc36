// One token of each of few sequences through a language model of residual recurrent blocks, in one cooperative launch.
//
// The residual blocks, x + norm(h) and x + down(gelu(up(norm(x)))), are three phases, whose results the blocks of the grid
// exchange: h, from gates and cell; the hidden layer of the MLP; the residual stream x. A block computes tiles of eight rows of
// each matrix, for all sequences, and in the first phase all gates of eight units. Every block reads the whole residual stream
// and computes norms of it by itself: that is less than another exchange takes.
#pragma once
#include "decoding/kernels/phases.cuh"

constexpr int WARP_SEQS = (SEQS + WARPS - 1) / WARPS;
constexpr int SHARED_ROWS = 2;  // sequences at most whose rows all warps normalize together
// Slices of the hidden layer that are loaded at once: as many as registers hold.
constexpr int SLICES_AT_ONCE = WARP_VECTORS * SEQS <= 24 ? SLICES < 4 ? SLICES : 4 : SLICES < 2 ? 1 : 2;

struct Shared : Products {
  float sums[WARPS][SEQS][TILES][8];       // of tile k of a sequence at place(k, sequence)
  float stream[SEQS][WIDTH];               // the residual stream
  float residual[SEQS][OUTPUT_TILES * 8];  // of the rows of `down` that the block computes
  scalar operand[SEQS * OPERAND_STRIDE];
  // So that a warp reads sums of four tiles, and writes those of eight sequences, from all banks.
  DEVICE static int place(int tile, int sequence) { return tile ^ sequence & 3; }
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "decoding/tiling.py counts shared memory differently");

// Calls f(sequence, n) for each sequence of the warp, number n of WARP_SEQS.
template <class F>
DEVICE void for_each_sequence(i64 B, F f) {
#pragma unroll
  for (int n = 0; n < WARP_SEQS; n++) {
    const int sequence = n * WARPS + threadIdx.x / 32;
    if (sequence < B) f(sequence, n);
  }
}

// Calls f(sequence) for each sequence of which the warp has a row, or a part of one.
template <class R, class F>
DEVICE void for_each_row(i64 B, F f) {
  if constexpr (R::WHOLE_ROW) for_each_sequence(B, [&](int sequence, int) { f(sequence); });
  else
#pragma unroll 1
    for (int sequence = 0; sequence < B; sequence++) f(sequence);
}

DEVICE void store_sums(Shared& shared, int tile, const Sums& c) {
  const int quad = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < (SEQS > 8 ? 2 : 1); half++) {
    const int sequence = half * 8 + quad;
    *reinterpret_cast<float2*>(&shared.sums[threadIdx.x / 32][sequence][shared.place(tile, sequence)][column]) =
        make_float2(c[0][0][2 * half], c[0][0][2 * half + 1]);
  }
}
DEVICE float sum_of_warps(const Shared& shared, int tile, int sequence, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += shared.sums[warp][sequence][shared.place(tile, sequence)][row];
  return sum;
}

// Multiplies the operand by this block's tiles of a matrix of ALL tiles, and calls f(sequence, n, row, sum) for each result, n as
// in for_each_sequence; f has to leave out rows beyond the matrix.
template <int ALL, class F>
DEVICE void multiply_rows(Shared& shared, Weights& weights, const Operand& operand, i64 B, F f) {
  for_tiles<ALL, GRID>(blockIdx.x, [&](auto tiles, int first) {
    Sums c[tiles] = {};
    weights.multiply<tiles>([&](auto k) -> Sums& { return c[k]; }, [&](int, int i) -> const Vectors& { return operand[i]; }, VECTORS);
    if (first >= TILES * GRID) sync();  // all threads have read the previous sums
#pragma unroll
    for (int k = 0; k < tiles; k++) store_sums(shared, k, c[k]);
    sync();
    for_each_sequence(B, [&](int sequence, int n) {
      for (int i = threadIdx.x % 32; i < tiles * 8; i += 32)
        f(sequence, n, (first + i / 8 * GRID) * 8 + i % 8, sum_of_warps(shared, i / 8, sequence, i % 8));
    });
  });
}

// residual and hidden_state [B, WIDTH] and hidden [B, HIDDEN] are written by some blocks and read by others.
struct Step {
  Shared& shared;
  const Model& model;
  Weights& weights;
  CountingBarrier& grid;
  const scalar* embedding;
  const i64* tokens;
  float *residual, *hidden_state;
  scalar* hidden;
  float* partials;  // as in `UnitReductions`
  const i64 B;
  const int unit_tiles;  // of this block

  // Calls f<Row or Part>(): by which the rows of so many sequences are normalized.
  template <class F>
  DEVICE void with_rows(F f) const {
    if (B <= SHARED_ROWS) f(Part());
    else f(Row());
  }
  // The residual stream before a block.
  template <class R>
  DEVICE void load_stream(R& row, int block, int sequence) const {
    if (block == 0) row.load(embedding + tokens[sequence] * WIDTH);
    else load_exchanged(row, residual + sequence * WIDTH);
  }
  DEVICE void load_normalized(Operand& operand) const {
    sync();
    load_operand(operand, VECTORS, B, [&](int sequence, int at) {
      return *reinterpret_cast<const uint4*>(&shared.operand[sequence * OPERAND_STRIDE + at]);
    });
  }
  // Normalizes the residual stream before a block, as the operand of its first matrix.
  DEVICE void begin(Operand& operand, int block, const scalar* norm) {
    with_rows([&](auto row) {
      auto weight = row;
      if (!row.WHOLE_ROW || threadIdx.x / 32 < B) weight.load(norm);
      if (block > 0) grid.wait();
      for_each_row<decltype(row)>(B, [&](int sequence) {
        load_stream(row, block, sequence);
        row.store(shared.stream[sequence]);
        row.template normalize<WIDTH>(Join(shared, sequence, 1));
        row.multiply_by(weight);
        row.store(&shared.operand[sequence * OPERAND_STRIDE]);
      });
    });
    load_normalized(operand);
  }

  // First phase: gates and cell of this block's units.
  DEVICE void compute_h(int block) {
    if (unit_tiles == 0) return grid.pass(UNIT_BLOCKS * (1 + HEAD_EXCHANGES));
    Operand operand;
#pragma unroll 1
    for (int i = 0; i < unit_tiles; i++) {
      if (i > 0) sync();
      compute_h_of(i, block, operand);
    }
    grid.arrive(UNIT_BLOCKS);
  }
  // Of a tile of units; the first one sets the operand for all.
  DEVICE void compute_h_of(int i, int block, Operand& operand) {
    const int lane = threadIdx.x % 32, unit0 = (first_unit_tile() + i * GRID) * 8, unit = unit0 + lane % 8;
    float* state = model.at<float>(block, STATE);
    const scalar* bias = model.at(block, BIAS);
    float old[STATES][WARP_SEQS] = {}, b[GATES];
    for_each_sequence(B, [&](int sequence, int n) {
#pragma unroll
      for (int k = 0; k < STATES; k++) old[k][n] = state[(k * B + sequence) * WIDTH + unit];
    });
#pragma unroll
    for (int j = 0; j < GATES; j++) b[j] = float(bias[j * WIDTH + unit]);
    Sums c[STORED] = {};
    add_recurrent(weights, state, unit0, B, c);  // before the residual stream arrives
    if (i == 0) begin(operand, block, model.at(block, MIXER_NORM));
    auto of_input = [&](auto k) -> Sums& { constexpr int product = product_of(INPUT_OF, k); return c[product]; };
    weights.multiply<GI>(of_input, [&](int, int i) -> const Vectors& { return operand[i]; }, VECTORS);
#pragma unroll
    for (int j = 0; j < STORED; j++) store_sums(shared, j, c[j]);
    sync();
    float g[GATES][WARP_SEQS], fresh[STATES][WARP_SEQS];
    // Lane 8 j + r sums product j of unit r; then all lanes of a unit compute the cell.
#pragma unroll
    for (int n = 0; n < WARP_SEQS; n++) {
      const int sequence = n * WARPS + threadIdx.x / 32;
      if (!REDUCES && sequence >= B) continue;
      float sums[TILES / 4];
#pragma unroll
      for (int j = 0; j < TILES; j += 4) sums[j / 4] = sum_of_warps(shared, j + lane / 8, sequence, lane % 8);
#pragma unroll
      for (int j = 0; j < GATES; j++) {
        const int k = STORED_OF[j];
        g[j][n] = b[j] + (k < 0 ? 0 : __shfl_sync(0xffffffffu, sums[max(k, 0) / 4], max(k, 0) % 4 * 8 + lane % 8));
      }
    }
    if (!REDUCES && threadIdx.x / 32 >= B) return;
    const int tile = unit0 / 8;
    compute_cells(g, old, fresh, UnitReductions<1, 8>{grid, partials, B, lane == 0, tile, int(threadIdx.x) / 32, WARPS});
    for_each_sequence(B, [&](int sequence, int n) {
      if (lane >= 8) return;
      hidden_state[sequence * WIDTH + unit] = float(scalar(fresh[0][n]));
#pragma unroll
      for (int k = 1; k < STATES; k++) state[(k * B + sequence) * WIDTH + unit] = fresh[k][n];
    });
  }

  // Second phase: x + norm(h), and the hidden layer of the MLP.
  DEVICE void compute_hidden(int block) {
    Operand operand;
    with_rows([&](auto x) {
      auto h = x, head_weight = x, mlp_weight = x;
      if (!x.WHOLE_ROW || threadIdx.x / 32 < B) head_weight.load(model.at(block, HEAD_NORM)), mlp_weight.load(model.at(block, MLP_NORM));
      grid.wait();
      for_each_row<decltype(x)>(B, [&](int sequence) {
        if (unit_tiles > 0) x.load(shared.stream[sequence]);
        else load_stream(x, block, sequence);
        load_exchanged(h, hidden_state + sequence * WIDTH);
        h.template normalize<D>(Join(shared, sequence, 0));
        h.multiply_by(head_weight);
        x.add(h);
        x.for_each([&](float (&v)[4], int at) {
          const int place = at / 8 - first_output_tile();
          if (place >= 0 && place % GRID == 0) store_four(&shared.residual[sequence][place / GRID * 8 + at % 8], v);
        });
        x.template normalize<WIDTH>(Join(shared, sequence, 1));
        x.multiply_by(mlp_weight);
        x.store(&shared.operand[sequence * OPERAND_STRIDE]);
      });
    });
    load_normalized(operand);
    multiply_rows<HIDDEN_TILES>(shared, weights, operand, B, [&](int sequence, int, int row, float sum) {
      if (row < HIDDEN) hidden[sequence * HIDDEN + row] = scalar(gelu(sum));
    });
  }

  // Third phase: the residual stream after the MLP.
  DEVICE void compute_stream() {
    if (first_output_tile() >= UNIT_TILES) return grid.pass(UNIT_BLOCKS);
    grid.wait();
#pragma unroll 1
    for (int tile = first_output_tile(), place = 0; tile < UNIT_TILES; tile += GRID, place++) {
      Sums c[SLICES_AT_ONCE] = {};
#pragma unroll
      for (int first = 0; first < SLICES; first += SLICES_AT_ONCE) {
        Operand slices[SLICES_AT_ONCE];
#pragma unroll
        for (int k = 0; k < SLICES_AT_ONCE; k++)
          load_operand(slices[k], VECTORS, B, [&](int sequence, int at) {
            const int slice = min(first + k, SLICES - 1);
            return load_exchanged(reinterpret_cast<const uint4*>(hidden + sequence * HIDDEN + slice * WIDTH + at), true);
          });
        weights.multiply<SLICES_AT_ONCE>([&](auto k) -> Sums& { return c[k]; },
                                         [&](auto k, int i) -> const Vectors& { return slices[k][i]; }, VECTORS, SLICES - first);
      }
#pragma unroll
      for (int k = 1; k < SLICES_AT_ONCE; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) c[0][0][0][r] += c[k][0][0][r];
      sync();  // all threads have read the previous sums
      store_sums(shared, 0, c[0]);
      sync();
      for_each_sequence(B, [&](int sequence, int) {
        const int lane = threadIdx.x % 32;
        if (lane >= 8) return;
        const float x = shared.residual[sequence][place * 8 + lane] + sum_of_warps(shared, 0, sequence, lane);
        residual[sequence * WIDTH + tile * 8 + lane] = x;
      });
    }
    grid.arrive(UNIT_BLOCKS);
  }
};

// PARAMETERS: types and shapes are in step.py. tokens, at most SEQS of them -> logits and chosen tokens, as `Choice` has them.
// table: as in `Model`. residual, hidden_state and hidden: as in `Step`. counters are zero before and after.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
flashrnn_step(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  Shared& shared = *shared_memory;
  begin(shared, table);
  const Model model{base, shared.table};
  if (is_copying()) {
    if (threadIdx.x < THREADS + 8) Copies(model, head, shared.chunks, shared.slots).run();
    return;
  }
  Weights weights(shared.chunks, shared.slots);
  CountingBarrier grid(counters);
  Step step{shared, model, weights, grid, embedding, tokens, residual, hidden_state, hidden, partials, B,
            tiles_from(first_unit_tile(), UNIT_TILES)};
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    step.compute_h(block);
    step.compute_hidden(block);
    grid.arrive();
    store_h(model.at<float>(block, STATE), hidden_state, B);
    step.compute_stream();
  }
  Operand operand;
  step.begin(operand, BLOCKS, norm);
  const Choice choice{logits, best, chosen, history, cursor, keys, temperature};
  u64 largest[WARP_SEQS] = {};
  multiply_rows<CLASS_TILES>(shared, weights, operand, B, [&](int sequence, int n, int row, float sum) {
    if (row < CLASSES) largest[n] = max(largest[n], choice.rate(sequence, row, sum));
  });
  for_each_sequence(B, [&](int sequence, int n) { choice.raise<32>(sequence, largest[n]); });
  choice.finish(B, counters, shared.before);
}
