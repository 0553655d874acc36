// The lane's cells in the backward: initialisation, an element-wise step, and its results.
#pragma once
#include "resident/kernels/backward_inputs.cuh"
#include "resident/kernels/unit_reductions.cuh"

// Values that a lane carries from step to step for its cells.
struct CarriedCells {
  float d_state[STATES][CELLS];  // gradients of the states after the step, without what reaches h through R
  float d_b[GATES][CELLS] = {};  // sums of the gradients of the gates
  float after[STATES][CELLS];    // the other states after the step, as far as the cell's gradient needs them
  float first_h[CELLS];          // h before the first step
  float constants[CONSTANTS + 1][PAIR];  // HELPED: see StepCells
  bool carry_next[CELLS];        // whether d_h of step t + 1 reaches step t, i.e. there is no reset between them
};

// Sets the coordinates of the lane's cells, and loads the gradients of their last states and, if the cell's gradient
// uses it, h before the first step.
DEVICE void load_cells(LaneCells& cells, CarriedCells& carried, const Params& params, const ThreadCoord& coord) {
  UNROLL for (int q = 0; q < CELLS; q++) {
    cells.sequence[q] = coord.batch_index(coord.sequence(q));
    cells.valid[q] = coord.has_cells() && coord.unit(q) < D && coord.has_sequence(coord.sequence(q));
    carried.carry_next[q] = true;
    cells.element[q] = coord.head * D + coord.unit(q);
    carried.first_h[q] = USES_H && cells.valid[q]
        ? float(scalar(params.initial[cells.sequence[q] * ROW + cells.element[q]])) : 0;
    UNROLL for (int i = 0; i < STATES; i++)
      carried.d_state[i][q] = cells.valid[q] && params.d_last ? params.d_last[cells.state_index(i, q, params.B)] : 0;
  }
}

// Loads the states after the last step, for states whose value after a step enters the step's gradient.
DEVICE void load_after(float (&after)[STATES][CELLS], const Params& params, const LaneCells& cells,
                       const ThreadCoord& coord) {
  const i64 last_row = (params.T - 1) * params.row_t, rows = params.B * params.T;
  UNROLL for (int q = 0; q < CELLS; q++)
    UNROLL for (int i = 1; i < STATES; i++)
      if (AFTER_OF[i] >= 0)
        after[i][q] = (HELPED ? coord.has_sequence(coord.sequence(q)) : cells.valid[q])
            ? float(params.aux[((i - 1) * rows + cells.sequence[q] * params.row_b + last_row) * ROW + cells.element[q]])
            : 0;
}

// Computes the gradients of a step's gates, and updates `carried` from the gradients of the states after the step to
// those before it. from_next returns the gradient of h that comes through R from the following step; it is called as
// late as possible. HELPED, another warp has computed `early`.
#if REDUCES
// Sets the gates of the lane's cells, and those states after the step that its gradient needs.
DEVICE void gates_and_after(float (&g)[GATES][CELLS], float (&a)[AFTER > 0 ? AFTER : 1][CELLS], const StepCells& inputs,
                            const CarriedCells& carried) {
  UNROLL for (int q = 0; q < CELLS; q++) {
    UNROLL for (int j = 0; j < GATES; j++) g[j][q] = inputs.gate_of(j, q);
    UNROLL for (int i = 0; i < STATES; i++)
      if (AFTER_OF[i] >= 0) a[AFTER_OF[i] >= 0 ? AFTER_OF[i] : 0][q] = carried.after[i][q];
  }
}

// HELPED: computes the early values of a step from its gates and statistics.
template <class Units>
DEVICE void early_cells_back(EarlyValues::Cells& early, const CarriedCells& carried, const StepCells& inputs,
                             const Units& units) {
  float g[GATES][CELLS], a[AFTER > 0 ? AFTER : 1][CELLS];
  gates_and_after(g, a, inputs, carried);
  if constexpr (HELPED) cells_backward_early(g, a, inputs.statistics, [] {}, early, units);
}

template <class FromNext>
DEVICE void step_cells_back(float (&d_g)[GATES][CELLS], CarriedCells& carried, const StepCells& inputs,
                            const AuxGradients& aux_gradients, const FromNext& from_next,
                            const EarlyValues::Cells& early, const bool (&valid)[CELLS], const UnitReductions& units) {
  bool carry[CELLS];
  float g[GATES][CELLS], s[STATES][CELLS], d_old[STATES][CELLS], a[AFTER > 0 ? AFTER : 1][CELLS];
  UNROLL for (int q = 0; q < CELLS; q++) {
    carry[q] = !RESET || inputs.masks[q / PAIR];
    UNROLL for (int i = 0; i < STATES; i++) s[i][q] = carry[q] && (i > 0 || USES_H) ? inputs.states[i][q] : 0;
  }
  gates_and_after(g, a, inputs, carried);
  auto cotangents = [&](float (&d_new)[STATES][CELLS]) {
    float d_from_next[CELLS];
    from_next(d_from_next);
    UNROLL for (int q = 0; q < CELLS; q++) {
      UNROLL for (int i = 0; i < STATES; i++)
        d_new[i][q] = carried.d_state[i][q], aux_gradients.add_to(d_new[i][q], i, q);
      d_new[0][q] += inputs.d_h[q];
      d_new[0][q] += carried.carry_next[q] ? d_from_next[q] : 0;  // which is known last
    }
  };
  float d_new[STATES][CELLS];
  if constexpr (HELPED) cells_backward(g, s, a, inputs.statistics, d_new, early, cotangents, d_g, d_old, units);
  else cells_backward(g, s, a, inputs.statistics, d_new, cotangents, d_g, d_old, units);
  UNROLL for (int q = 0; q < CELLS; q++) {
    UNROLL for (int j = 0; j < GATES; j++) {
      d_g[j][q] = FINITE || valid[q] ? d_g[j][q] : 0;
      carried.d_b[j][q % PAIR] += d_g[j][q];  // sums over all of the lane's sequences
    }
    UNROLL for (int i = 0; i < STATES; i++) carried.d_state[i][q] = (FINITE || valid[q]) && carry[q] ? d_old[i][q] : 0;
    UNROLL for (int i = 1; i < STATES; i++) carried.after[i][q] = inputs.states[i][q];
    carried.carry_next[q] = carry[q];
  }
}
#else
template <class FromNext>
DEVICE void step_cells_back(float (&d_g_all)[GATES][CELLS], CarriedCells& carried, const StepCells& inputs,
                            const AuxGradients& aux_gradients, const FromNext& from_next, const bool (&valid)[CELLS],
                            const UnitReductions&, const ThreadCoord& coord) {
  bool carry[CELLS];
  float factors[CELLS][FACTORS], d_from_next[CELLS];
  UNROLL for (int q = 0; q < CELLS; q++) {
    if (!coord.has_cells()) break;
    float g[GATES], s[STATES];
    carry[q] = !RESET || inputs.masks[q / PAIR];
    UNROLL for (int i = 0; i < STATES; i++) s[i] = carry[q] && (i > 0 || USES_H) ? inputs.states[i][q] : 0;
    UNROLL for (int j = 0; j < GATES; j++) g[j] = inputs.gate_of(j, q);
    cell_factors(g, s, factors[q]);
  }
  from_next(d_from_next);
  UNROLL for (int q = 0; q < CELLS; q++) {
    if (!coord.has_cells()) break;
    float d_new[STATES], d_g[GATES], d_old[STATES];
    UNROLL for (int i = 0; i < STATES; i++) d_new[i] = carried.d_state[i][q], aux_gradients.add_to(d_new[i], i, q);
    d_new[0] += inputs.d_h[q] + (carried.carry_next[q] ? d_from_next[q] : 0);
    cell_backward(factors[q], d_new, d_g, d_old);
    UNROLL for (int j = 0; j < GATES; j++) {
      d_g_all[j][q] = FINITE || valid[q] ? d_g[j] : 0;
      carried.d_b[j][q] += d_g_all[j][q];
    }
    UNROLL for (int i = 0; i < STATES; i++) carried.d_state[i][q] = carry[q] ? d_old[i] : 0;
    carried.carry_next[q] = carry[q];
  }
}
#endif

// The results of a step, which are stored during the following step, after its product has started.
struct Results {
  scalar *x_to[PAIRS], *u_to[PAIRS];
  bool to_store[CELLS] = {};  // none before the first step
  DEVICE void start(const Params& params, const LaneCells& cells) {
    UNROLL for (int p = 0; p < PAIRS; p++) {
      i64 row = cells.sequence[p * PAIR] * params.row_b + params.T * params.row_t;  // one step after the last
      x_to[p] = params.d_x + row * GI * ROW + cells.element[p * PAIR],
          u_to[p] = params.d_u + row * GU * ROW + cells.element[p * PAIR];
      asm_fence(x_to[p]), asm_fence(u_to[p]);
    }
  }
  DEVICE void store(const StoredCells (&d_gate)[GATES], const Params& params) {
    UNROLL for (int j = 0; j < GATES; j++) {
      if (INPUT_OF[j] >= 0) d_gate[j].store_global(x_to, INPUT_OF[j] * ROW, to_store);
      else if (RECURRENT_OF[j] >= 0) d_gate[j].store_global(u_to, RECURRENT_ONLY_OF[j] * ROW, to_store);
    }
    UNROLL for (int p = 0; p < PAIRS; p++) advance(x_to[p], -params.x_step), advance(u_to[p], -GU * params.h_step);
  }
};

// Sums the gradients of the biases over the sequences of the batch tile. These are in the four lanes of a quad and,
// with K_SLICES > 1, in several warps; IN_ROWS, in several rows of lanes. All threads call this; `totals` may overlap
// the inputs and operands, so it synchronises first.
constexpr int BIAS_PARTS = IN_ROWS ? ROWS_AT_ONCE : CELL_SLICES;
static_assert(BIAS_PARTS * GATES * UNITS * 4 <= SharedMemory::SIZE);
DEVICE void sum_biases(float* d_bias, const float (&d_b)[GATES][CELLS], float* totals, const ThreadCoord& coord) {
  if (BLOCKS == 1) copy_wait<0>();  // copies of zeros, for steps before the first, may still be writing to `totals`
  __syncthreads();
  UNROLL for (int j = 0; j < GATES; j++)
    UNROLL for (int odd = 0; odd < 2; odd++) {
      float sum = 0;
      UNROLL for (int q = 0; q < CELLS; q++) sum += coord.unit(q) % 2 == odd ? d_b[j][q] : 0;
      if constexpr (IN_ROWS) {
        if (coord.has_cells()) totals[(threadIdx.x / ROW_LANES * GATES + j) * UNITS + coord.unit(odd)] = sum;
        continue;
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int unit = coord.unit_tile * 16 + 2 * coord.quad + odd;
      if (coord.lane_in_quad == 0 && coord.has_cells()) totals[(coord.cell_slice * GATES + j) * UNITS + unit] = sum;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < GATES * UNITS; i += THREADS) {
    int gate = i / UNITS, unit = coord.rank * UNITS + i % UNITS;
    float sum = 0;
    UNROLL for (int k = 0; k < BIAS_PARTS; k++) sum += totals[k * GATES * UNITS + i];
    if (unit < D) d_bias[(coord.batch_tile * GATES + gate) * ROW + coord.head * D + unit] = sum;
  }
}

// Stores the gradients of the initial states; that of h includes d_first, which comes through R from the first step.
DEVICE void store_d_initial(const Params& params, CarriedCells& carried, const float (&d_first)[CELLS],
                            const LaneCells& cells) {
  UNROLL for (int q = 0; q < CELLS; q++) carried.d_state[0][q] += carried.carry_next[q] ? d_first[q] : 0;
  UNROLL for (int q = 0; q < CELLS; q++)
    UNROLL for (int i = 0; i < STATES; i++)
      if (cells.valid[q]) params.d_initial[cells.state_index(i, q, params.B)] = carried.d_state[i][q];
}
