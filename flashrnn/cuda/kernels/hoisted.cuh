// The part of a cell that is computed outside the time loop (cells/hoisting.py): values computed from each row of
// inputs, and the gradient of the inputs from that of the values. A row is a step of a sequence.
//
// The threads of a block cover the units of one head, CELLS neighbouring units each, and process row after row. The
// next row is loaded while the current one is processed.
#pragma once
#include "kernels/partial.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int ROW = HEADS * D;
constexpr bool WIDE = D % CELLS == 0;  // a thread has all of its CELLS units or none

DEVICE float2 to_floats(PairOf<float> pair) { return make_float2(pair.low, pair.high); }
template <class S>
DEVICE float2 to_floats(PairOf<S> pair) { return unpack(pair.word); }

// Rounds values as gates are rounded: half types to float16, which is more precise than bfloat16 (residual.py).
DEVICE void round_gates(PairOf<float>& pair, float low, float high) { pair.round(low, high); }
template <class S>
DEVICE void round_gates(PairOf<S>& pair, float low, float high) { pair.word = pack_gates(low, high); }

// Returns the unit of the thread's cell q.
DEVICE int unit_of(int q) { return CELLS * threadIdx.x + q; }

// Reductions over the units of a row, with one __syncthreads each. Of two buffers, one is read while the other is
// written.
struct UnitReductions {
  float* parts;  // [2][WARPS][4 * EXCHANGED_VECTORS], in shared memory
  u32& exchange;

  // Reduces SUMS values, then MOMENTS, then MAXIMA over the units of the row. The results are the sums, mean and
  // variance of each moment, then the maxima. All threads of the block call this.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    Part total = reduce_warp<SUMS, MOMENTS, MAXIMA>(values);
    float* buffer = parts + (exchange++ & 1) * (WARPS * 4 * EXCHANGED_VECTORS);
    if (threadIdx.x % 32 == 0)
      UNROLL for (int i = 0; i < Part::WORDS; i++)
        buffer[threadIdx.x / 32 * 4 * EXCHANGED_VECTORS + i] = total.words[i];
    __syncthreads();
    total.load(buffer);
    UNROLL for (int warp = 1; warp < WARPS; warp++) {
      Part other;
      other.load(buffer + warp * 4 * EXCHANGED_VECTORS);
      total.add(other, min(max(D - 32 * CELLS * warp, 0), 32 * CELLS));
    }
    UNROLL for (int i = 0; i < Part::RESULTS; i++)
      UNROLL for (int q = 0; q < CELLS; q++) result[i][q] = total.result(i);
  }

 private:
  // Returns the contribution of the warp's units.
  template <int SUMS, int MOMENTS, int MAXIMA>
  DEVICE static Partial<SUMS, MOMENTS, MAXIMA> reduce_warp(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS]) {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    Part part = {};
    UNROLL for (int i = 0; i < MOMENTS; i++) part.words[Part::ADDED + i] = __shfl_sync(~0u, values[SUMS + i][0], 0);
    UNROLL for (int i = Part::ADDED + MOMENTS; i < Part::WORDS; i++) part.words[i] = -INFINITY;
    UNROLL for (int q = 0; q < CELLS; q++) {
      if (unit_of(q) >= D) continue;
      UNROLL for (int i = 0; i < SUMS; i++) part.words[i] += values[i][q];
      UNROLL for (int i = 0; i < MOMENTS; i++) {
        const float deviation = values[SUMS + i][q] - part.words[Part::ADDED + i];
        part.words[SUMS + 2 * i] += deviation;
        part.words[SUMS + 2 * i + 1] = fmaf(deviation, deviation, part.words[SUMS + 2 * i + 1]);
      }
      UNROLL for (int i = Part::ADDED + MOMENTS; i < Part::WORDS; i++)
        part.words[i] = op_max(part.words[i], values[i - Part::ADDED + SUMS][q]);
    }
    UNROLL for (int mask = 16; mask > 0; mask /= 2) {
      UNROLL for (int i = 0; i < Part::ADDED; i++) part.words[i] += __shfl_xor_sync(~0u, part.words[i], mask);
      UNROLL for (int i = Part::ADDED + MOMENTS; i < Part::WORDS; i++)
        part.words[i] = op_max(part.words[i], __shfl_xor_sync(~0u, part.words[i], mask));
    }
    return part;
  }
};

// The gates of the thread's units in a row; in memory, gates are ROW numbers apart.
struct alignas(CELLS * BYTES < 16 ? CELLS * BYTES : 16) Units { Pair pairs[CELLS / 2]; };
template <int ROW_GATES>
struct Row {
  Units units[ROW_GATES];
  // Loads the row whose first number of this thread is at `from`; zeros unless it `exists`.
  DEVICE void load(const scalar* from, bool exists) {
    UNROLL for (int j = 0; j < ROW_GATES; j++)
      if constexpr (WIDE) {
        units[j] = exists && unit_of(0) < D ? *reinterpret_cast<const Units*>(from + j * ROW) : Units{};
      } else {
        UNROLL for (int p = 0; p < CELLS / 2; p++)
          ::load(units[j].pairs[p], exists && unit_of(2 * p) < D ? from + j * ROW + 2 * p : nullptr);
      }
  }
  DEVICE void store(scalar* to) const {
    UNROLL for (int j = 0; j < ROW_GATES; j++)
      if constexpr (WIDE) {
        if (unit_of(0) < D) *reinterpret_cast<Units*>(to + j * ROW) = units[j];
      } else {
        UNROLL for (int p = 0; p < CELLS / 2; p++)
          if (unit_of(2 * p) < D) *reinterpret_cast<Pair*>(to + j * ROW + 2 * p) = units[j].pairs[p];
      }
  }
  DEVICE float get(int j, int q) const {
    const float2 pair = to_floats(units[j].pairs[q / 2]);
    return q % 2 ? pair.y : pair.x;
  }
  DEVICE void set(int j, const float (&values)[CELLS]) {
    UNROLL for (int p = 0; p < CELLS / 2; p++) units[j].pairs[p].round(values[2 * p], values[2 * p + 1]);
  }
  DEVICE void set_gate(int j, const float (&values)[CELLS]) {
    UNROLL for (int p = 0; p < CELLS / 2; p++) round_gates(units[j].pairs[p], values[2 * p], values[2 * p + 1]);
  }
};

// Loads the biases of the thread's units.
DEVICE void load_biases(float (&b)[GATES][CELLS], const bias_number* bias, int head) {
  UNROLL for (int j = 0; j < GATES; j++)
    UNROLL for (int q = 0; q < CELLS; q++)
      b[j][q] = unit_of(q) < D ? float(bias[BIAS_OF[j] * ROW + head * D + unit_of(q)]) : 0;
}

// Computes the gates: the bias and, for gates that have one, the input.
DEVICE void add_inputs(float (&g)[GATES][CELLS], const float (&b)[GATES][CELLS], const Row<GI>& x) {
  UNROLL for (int j = 0; j < GATES; j++)
    UNROLL for (int q = 0; q < CELLS; q++)
      g[j][q] = INPUT_OF[j] >= 0 ? b[j][q] + x.get(INPUT_OF[j] >= 0 ? INPUT_OF[j] : 0, q) : b[j][q];
}

// Params: types and shapes are in hoisted.py. x, bias -> values, rounded as gates.
#ifdef FORWARD
extern "C" __global__ void __launch_bounds__(THREADS)
flashrnn_hoisted(PARAMETERS) {
  extern __shared__ __align__(16) float parts[];
  const Params params{PARAMETER_NAMES};
  const int head = blockIdx.x % HEADS, step = gridDim.x / HEADS;
  u32 exchange = 0;
  const UnitReductions units{parts, exchange};
  float b[GATES][CELLS];
  load_biases(b, params.bias, head);
  i64 row = blockIdx.x / HEADS;
  const scalar* x = params.x + row * GI * ROW + head * D + unit_of(0);
  scalar* to = params.values + row * VALUES * ROW + head * D + unit_of(0);
  Row<GI> next;
  next.load(x, row < params.rows);
  for (; row < params.rows; row += step, to += i64(step) * VALUES * ROW) {
    float g[GATES][CELLS], v[VALUES][CELLS];
    add_inputs(g, b, next);
    x += i64(step) * GI * ROW;
    next.load(x, row + step < params.rows);
    hoisted(g, 0, v, units);
    Row<VALUES> result;
    UNROLL for (int j = 0; j < VALUES; j++) result.set_gate(j, v[j]);
    result.store(to);
  }
}
#else
// x, bias, d_values -> d_x and d_bias [blocks per head, GATES, HEADS, D], the partial sums of each block.
extern "C" __global__ void __launch_bounds__(THREADS)
flashrnn_hoisted(PARAMETERS) {
  extern __shared__ __align__(16) float parts[];
  const Params params{PARAMETER_NAMES};
  const int head = blockIdx.x % HEADS, step = gridDim.x / HEADS;
  u32 exchange = 0;
  const UnitReductions units{parts, exchange};
  float b[GATES][CELLS], sums[GATES][CELLS] = {};
  load_biases(b, params.bias, head);
  i64 row = blockIdx.x / HEADS;
  const scalar* x = params.x + row * GI * ROW + head * D + unit_of(0);
  const scalar* d_values = params.d_values + row * VALUES * ROW + head * D + unit_of(0);
  scalar* to = params.d_x + row * GI * ROW + head * D + unit_of(0);
  Row<GI> next;
  Row<VALUES> d_next;
  next.load(x, row < params.rows), d_next.load(d_values, row < params.rows);
  for (; row < params.rows; row += step, to += i64(step) * GI * ROW) {
    float g[GATES][CELLS], d_v[VALUES][CELLS], d_g[GATES][CELLS];
    add_inputs(g, b, next);
    UNROLL for (int j = 0; j < VALUES; j++)
      UNROLL for (int q = 0; q < CELLS; q++) d_v[j][q] = d_next.get(j, q);
    x += i64(step) * GI * ROW, d_values += i64(step) * VALUES * ROW;
    next.load(x, row + step < params.rows), d_next.load(d_values, row + step < params.rows);
    hoisted_gradient(g, d_v, 0, d_g, units);
    Row<GI> result;
    UNROLL for (int j = 0; j < GATES; j++) {
      if (INPUT_OF[j] >= 0) result.set(INPUT_OF[j] >= 0 ? INPUT_OF[j] : 0, d_g[j]);
      UNROLL for (int q = 0; q < CELLS; q++) sums[j][q] += d_g[j][q];
    }
    result.store(to);
  }
  UNROLL for (int j = 0; j < GATES; j++)
    UNROLL for (int q = 0; q < CELLS; q++)
      if (unit_of(q) < D)
        params.d_bias[(blockIdx.x / HEADS * GATES + j) * i64(ROW) + head * D + unit_of(q)] = sums[j][q];
}
#endif
