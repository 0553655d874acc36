// The backward time loop of one head and batch tile. R stays on the chip, transposed.
//
// A block computes the gradients dg_t of its units' gates and multiplies them by its rows of R. This gives partial sums
// of the gradient of h_{t-1} for all units of the head, which several blocks reduce-scatter (reduce_scatter.cuh).
// During the exchange, they compute the factors of the cell's gradient, which depend on gates and states only.
#pragma once
#include "resident/kernels/backward_cells.cuh"
#include "resident/kernels/backward_inputs.cuh"
#include "resident/kernels/backward_product.cuh"
#include "resident/kernels/chunks.cuh"
#include "resident/kernels/layers.cuh"

// Whether results are stored, and inputs loaded, after the sums of R^T dg have been exchanged in the block, not before,
// where these would wait for that. Slower with two warps for a unit tile, if one exchange alone follows.
constexpr bool ACCESSES_LATE = IN_ROWS && (K_SLICES == 1 || EXCHANGES > 1);

// The state of the time loop; all members are variables of the kernel.
struct Loop {
  const Params params;
  const SharedMemory& shared;
  const ThreadCoord& coord;
  const Exchange& exchange;
  const UnitReductions& units;
  const Weights& weights;
  const LaneCells& cells;
  const Resets& resets;
  const u32 (&gate_operand)[PAIRS];  // shared-memory addresses of the lane's gradients of gates
  CarriedCells& carried;
  StepInputs& inputs;
  AuxGradients& aux_gradients;
  StoredCells (&d_gate)[GATES];
  Results& results;
  const int steps;
  int stage = 0;  // of the input ring that holds this step's inputs
  OperandScale scale = {};  // of the previous step's operand
  // IN_ROWS: the lane's first row of the previous step's operand, whose address is known before the step begins.
  u32 row = IN_ROWS ? first_row(shared_address(shared.operand) + GATE_BYTES, coord) : 0;
  DEVICE void next_row() {
    if (IN_ROWS) row = 2 * first_row(shared_address(shared.operand), coord) + GATE_BYTES - row;
  }

  // Returns the inputs of the lane's cells in `stage`.
  DEVICE const char* input_tile() const {
    return shared.inputs + stage * INPUT_BYTES + coord.cell_tile() * (INPUT_BYTES / UNIT_TILES);
  }
  // HELPED, registers suffice to keep the constants.
  DEVICE void read_step_constants(StepCells& read) const {
    if (!HELPED) return read_constants(read.constants, shared.constants, coord);
    UNROLL for (int k = 0; k < CONSTANTS; k++)
      UNROLL for (int q = 0; q < PAIR; q++) read.constants[k][q] = carried.constants[k][q];
  }
  DEVICE void next_stage() { stage = stage + 1 == STAGES ? 0 : stage + 1; }
  static DEVICE int before(int stage) { return stage == 0 ? STAGES - 1 : stage - 1; }
#if REDUCES
  // HELPED: computes the early values of loop step `step`, whose inputs are in `stage`.
  DEVICE void compute_early(int step) {
    StepCells read;
    EarlyValues::Cells early;
    read.read(input_tile(), carried.first_h, false, coord);
    read_step_constants(read);
    read.read_statistics(input_tile(), coord);
    early_cells_back(early, carried, read, units);
    EarlyValues(shared.early, step).store(early);
    UNROLL for (int q = 0; q < CELLS; q++)
      UNROLL for (int i = 1; i < STATES; i++) carried.after[i][q] = read.states[i][q];
  }
  // Runs loop step `step` in the LOADERS.
  DEVICE void load_and_multiply(int step) {
    inputs.load(steps - step - STAGES, before(stage));
    next_stage();
    copy_wait<IN_FLIGHT>();
    __syncthreads();
    scatter_gradient(step, weights, scale, shared.operand, exchange, coord);
  }
  // HELPED: runs loop step `step` in the warps without cells.
  DEVICE void help_backward(int step) {
    float c[SUMS][BATCH_TILES][4] = {};
    multiply(c, step - 1, weights, scale, shared.operand, row, coord);
    RowSums<1, SUMS>{shared.sums, coord}.store(c);
    __syncthreads();
    inputs.load(steps - step - STAGES, before(stage));
    next_stage();
    compute_early(step + 1);
    const float none[GATES][CELLS] = {};
    if (SCALED) scale_of_gates(scale, none, shared.magnitudes, coord);
    copy_wait<IN_FLIGHT>();
    next_row();
    __syncthreads();
  }
#endif

  // Runs loop step `step`, which is time step t = steps - 1 - step: receives the gradient of h from step t + 1,
  // computes the gradients of the gates, and multiplies them by R for step t - 1.
  DEVICE void step_backward(int step) {
    const int t = steps - 1 - step;
    const char* tile = input_tile();
    constexpr bool EARLY = BLOCKS == 1 && !REDUCES;  // whether the product is reduced before the inputs are read
    float c[SUMS][BATCH_TILES][4] = {}, sums[CELLS];
    multiply(c, step - 1, weights, scale, shared.operand, row, coord);
    if constexpr (EARLY) recurrent_gradient(sums, step - 1, c, exchange, coord);
    aux_gradients.load(t - 1, cells.valid);
    StepCells read;
    read.read(tile, carried.first_h, t == 0, coord);
    read_step_constants(read);
    resets.masks(read.masks, t);
    auto access_memory = [&] {
      results.store(d_gate, params);
      if (!HELPED && !LOADERS) inputs.load(t - (STAGES - 1), before(stage));
    };
    if (!ACCESSES_LATE && !EARLY_SUMS) access_memory();
    if constexpr (REDUCES) read.read_statistics(tile, coord);
    EarlyValues::Cells early;
    auto from_next = [&](float (&d_h)[CELLS]) {
      if (EARLY_SUMS) access_memory();
      if constexpr (!EARLY) recurrent_gradient(sums, step - 1, c, exchange, coord);
      UNROLL for (int q = 0; q < CELLS; q++) d_h[q] = sums[q];
      if constexpr (HELPED) EarlyValues(shared.early, step).load(early);
      if (ACCESSES_LATE) access_memory();
    };
    float d_g[GATES][CELLS];
#if REDUCES
    if (!DENSE || CELL_SLICES == K_SLICES || coord.warp_has_cells())
      step_cells_back(d_g, carried, read, aux_gradients, from_next, early, cells.valid, units);
#else
    step_cells_back(d_g, carried, read, aux_gradients, from_next, cells.valid, units, coord);
#endif

    if (SCALED) scale_of_gates(scale, d_g, shared.magnitudes, coord);
    store_gate_operands(d_gate, d_g, scale, gate_operand, (step & 1) * GATE_BYTES, coord);
    UNROLL for (int q = 0; q < CELLS; q++) results.to_store[q] = cells.valid[q];
    if (!LOADERS) copy_wait<IN_FLIGHT>();
    next_row();
    if (CLUSTERED && threadIdx.x == 0)
      barrier_expect(shared.barriers + (step & 1) * 8, RECEIVE_BYTES / SEQUENCES * coord.used_columns());
    __syncthreads();
    if constexpr (BLOCKS > 1) scatter_gradient(step, weights, scale, shared.operand, exchange, coord);
    next_stage();
  }
};

// In a grid: clears the workspace through which this block receives data, and arrives at the grid barrier.
DEVICE void arrive_at_grid(const Exchange& exchange, const UnitReductions& units,
                           const GridBarrier<BLOCKS>& grid_barrier, const ThreadCoord& coord) {
  clear_partials(exchange.partials, coord);
  units.clear();
  grid_barrier.arrive();
}

// Waits until all blocks of the group are ready to receive. In a grid, they must have called arrive_at_grid.
DEVICE void wait_for_group(const SharedMemory& shared, const UnitReductions& units,
                           const GridBarrier<BLOCKS>& grid_barrier) {
  if constexpr (CLUSTERED) {
    if (threadIdx.x == 0) barrier_init(shared.barriers), barrier_init(shared.barriers + 8);
    units.init();
    cluster_sync();
  }
  if (GRID) grid_barrier.wait();
  __syncthreads();
}

// Runs all steps of the loop. Unless `progress` is null, counts the finished chunks there. A chunk is counted one step
// late, because its last results are stored during the following step.
template <class Step>
DEVICE void for_each_step(int steps, u32* progress, Resets& resets, const Step& run) {
  const bool counts_chunks = OVERLAPS && progress;
  for (int step = 0, end = 0; step < steps; progress++) {
    end += counts_chunks ? chunk_steps(end, steps - end) : steps;
    const int stop = min(end + 1, steps);
    do {
      const int until = RESET ? min(stop, step + (steps - 1 - step) % WORD + 1) : stop;  // steps with the same words
      do run(step);
      while (++step < until);
      if (RESET && (steps - step) % WORD == 0) resets.move_on(steps - 1 - step - WORD);
    } while (RESET && step < stop);
    if (counts_chunks && end < steps && threadIdx.x == 0) signal(progress);
  }
}

// For a head that goes backwards in time: moves all tensors to the row of the last time step, at which the backward
// ends.
DEVICE void begin_at_last_step(Params& params) {
  const i64 last_row = (params.T - 1) * params.row_t;
  params.gates += last_row * HEADS * HEAD_NUMBERS, params.d_h += last_row * ROW, params.h += last_row * ROW;
  params.aux += last_row * ROW, params.d_x += last_row * GI * ROW, params.d_u += last_row * GU * ROW;
  reverse_strides(params);
}

// Params as of flashrnn_forward, and: first_aux, the initial states in the format of aux; d_h; with HAS_D_AUX, d_aux_0,
// d_aux_1, ... of the other states (null: zero); d_last (null: zero) -> d_x, which may alias `gates` if GATES_IN_PIECES
// and not GRID; d_u; d_bias [batch tiles, GATES, N, D]; d_initial. With GRID, `workspace` has the partial sums of every
// group of the launch, followed by the words of their GridBarrier. Unless `progress` is null (OVERLAPS only), every
// block increments the word of each finished chunk (chunks.cuh) except the last.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_backward(PARAMETERS) {
  if (OVERLAPS) launch_dependents();
  extern __shared__ __align__(128) char memory[];
  const SharedMemory shared(memory);
  Params params{PARAMETER_NAMES};
  const ThreadCoord coord(params);
  const int steps = static_cast<int>(params.T);
  if (backwards(coord.head)) begin_at_last_step(params);
  const GridBarrier<BLOCKS> grid_barrier(params.workspace + gridDim.x / BLOCKS * GROUP_PARTIALS, params.launch);
  UnitReductions units(shared.reductions, grid_barrier.words_of_all + gridDim.x, coord);
  const Exchange exchange(shared, params.workspace + blockIdx.x / BLOCKS * GROUP_PARTIALS);

  // Prologue: load R, the gradients of the last states and the first inputs, then wait until all blocks of the group
  // are ready.
  if (GRID) arrive_at_grid(exchange, units, grid_barrier, coord);
  Weights weights;
  load_weights(weights, shared.fragments, params.R, coord);
  LaneCells cells;
  CarriedCells carried;
  load_cells(cells, carried, params, coord);
  clear_operands(shared.operand, exchange.receive_buffer, shared.magnitudes);
  load_constants(shared.constants, params, coord);
  StepInputs next_inputs(shared_address(shared.inputs) + coord.load_tile() * (INPUT_BYTES / UNIT_TILES), params, coord);
  Resets cell_resets;
  cell_resets.start(params, cells, steps - 1, -WORD);
#ifdef LAYERS
  await_chunk(params.arrived, 0, params.producers);
#endif
  if (coord.loads_inputs()) next_inputs.load_first(steps);
  else copy_commit(), copy_wait<0>();  // for R
  wait_for_group(shared, units, grid_barrier);
  StoredCells d_gate[GATES];
  Results results;
  u32 gate_operand[PAIRS];
  results.start(params, cells);
  operand_addresses(gate_operand, shared_address(shared.operand), coord.rank * UNITS, coord);
  AuxGradients aux_gradients(params, cells);
  aux_gradients.load(steps - 1, cells.valid);
  load_after(carried.after, params, cells, coord);

  Loop loop{params,  shared,  coord,       exchange,      units,  weights, cells, cell_resets, gate_operand,
            carried, next_inputs, aux_gradients, d_gate, results, steps};
  auto run = [&](int step) {
    loop.step_backward(step);
    ++units.step;
  };
#ifdef LAYERS
  const int chunk = for_each_chunk(steps, params.arrived, params.producers, params.done, threadIdx.x == 0, [&](int begin, int end) {
    for (int step = begin; step < end; step++) run(step);
  });
#else
#if REDUCES
  if constexpr (HELPED) {
    read_constants(carried.constants, shared.constants, coord);
    if (coord.helps()) loop.compute_early(0);
    __syncthreads();
  }
  if (LOADERS && !coord.warp_has_cells()) {
    for (int step = 0; step < steps; step++) loop.load_and_multiply(step);
  } else if (HELPED && coord.helps()) {
    for (int step = 0; step < steps; step++) loop.help_backward(step);
  } else
#endif
    for_each_step(steps, params.progress, cell_resets, run);
#endif

  // Epilogue: the last results, the gradients of the initial states and those of the biases. No block exits while
  // others may still send to it.
  results.store(d_gate, params);
#ifdef LAYERS
  end_chunks(chunk, steps, params.done, threadIdx.x == 0);
#endif
  float d_first[CELLS], c[SUMS][BATCH_TILES][4] = {};
  multiply(c, steps - 1, weights, loop.scale, shared.operand, loop.row, coord);
  recurrent_gradient(d_first, steps - 1, c, exchange, coord);
  store_d_initial(params, carried, d_first, cells);
  sum_biases(params.d_bias, carried.d_b, reinterpret_cast<float*>(memory), coord);
  if constexpr (CLUSTERED) cluster_sync();
  if (GRID) grid_barrier.reset();
}
