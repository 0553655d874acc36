// A time step of a layer for few sequences, in one launch: input and recurrent products, and the cells. A warp computes
// a unit of up to SEQS sequences. Its lanes share the rows of W and R, and then each lane has the cell of a sequence.
#pragma once
#include "kernels/gates.cuh"

constexpr int ROW = HEADS * D;                    // units
constexpr int UNIT_BLOCKS = (ROW + WARPS - 1) / WARPS;
constexpr int VECTOR = 16 / BYTES;                // elements that a lane loads together
using Sums = float[GATES][SEQS];

// Loads V numbers from an address that is a multiple of their size, at most 16 bytes.
template <int V, class S>
DEVICE void load(float (&to)[V], const S* from) {
  struct alignas(V * sizeof(S) < 16 ? V * sizeof(S) : 16) Numbers { S values[V]; };
  const Numbers numbers = *reinterpret_cast<const Numbers*>(from);
  UNROLL for (int i = 0; i < V; i++) to[i] = float(numbers.values[i]);
}

// Adds the lane's share of the products of the unit's rows of W or, if RECURRENT, R and the vectors of `count`
// sequences. Rows have `size` elements. `row` is that of the first gate; vector(v, s, k) sets v to elements k to k + V
// of the vector of sequence s.
template <bool RECURRENT, int V, class Vector>
DEVICE void add_products(Sums& sums, const scalar* row, int size, int count, Vector vector) {
  for (int k = threadIdx.x % 32 * V; k < size; k += 32 * V) {
    float rows[GATES][V];
    UNROLL for (int j = 0; j < GATES; j++) {
      const int number = RECURRENT ? RECURRENT_OF[j] : INPUT_OF[j];
      if (number >= 0) load(rows[j], row + i64(number) * ROW * size + k);
    }
    UNROLL for (int s = 0; s < SEQS; s++) {
      if (s >= count) break;
      float v[V];
      vector(v, s, k);
      UNROLL for (int j = 0; j < GATES; j++)
        UNROLL for (int i = 0; i < V; i++)
          if ((RECURRENT ? RECURRENT_OF[j] : INPUT_OF[j]) >= 0) sums[j][s] = fmaf(rows[j][i], v[i], sums[j][s]);
    }
  }
}

// Sets `g` to the sums over all lanes, those of sequence s in lane s.
DEVICE void reduce(float (&g)[GATES], const Sums& sums, int count) {
  UNROLL for (int s = 0; s < SEQS; s++) {
    if (s >= count) break;
    UNROLL for (int j = 0; j < GATES; j++) {
      float sum = sums[j][s];
      UNROLL for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (threadIdx.x % 32 == s) g[j] = sum;
    }
  }
}

// Adds both products to `sums`. V: elements of a load. `initial`: h before the step, or null. `carry`: a bit for
// each sequence, 0 where the states before the step are reset.
template <int V>
DEVICE void add_all_products(Sums& sums, const Params& params, const float* initial, u32 carry, i64 first, int count,
                             int unit) {
  const int features = int(params.features);
  const scalar* x = params.x + first * features;
  add_products<false, V>(sums, params.W + i64(unit) * features, features, count,
                         [&](float (&v)[V], int s, int k) { load(v, x + i64(s) * features + k); });
  if (!initial) return;
  initial += first * ROW + unit / D * D;
  add_products<true, V>(sums, params.R + i64(unit) * D, D, count, [&](float (&v)[V], int s, int k) {
    load(v, initial + i64(s) * ROW + k);
    UNROLL for (int i = 0; i < V; i++) v[i] = carry >> s & 1 ? float(scalar(v[i])) : 0;
  });
}

// Returns the index of a unit's stored gate `number` in the gates of a sequence: see ResidualGates in cells.cuh.
DEVICE int gate_index(int unit, int number) {
  const int head = unit / D, of_head = unit % D * STORED + number;
  return GATES_IN_PIECES ? (of_head / D * HEADS + head) * D + of_head % D : head * HEAD_NUMBERS + of_head;
}

DEVICE bool aligned(const void* p) { return reinterpret_cast<size_t>(p) % 16 == 0; }

// Params: types and shapes are in single_step.py. x, W, R, bias or null, reset or null, initial states or nulls -> h,
// the last states and, unless null, aux and gates. The blocks of all units for SEQS sequences follow each other.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
flashrnn_single_step(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const float* const before[] = {INITIAL_STATES};
  const int lane = threadIdx.x % 32, unit = blockIdx.x % UNIT_BLOCKS * WARPS + threadIdx.x / 32;
  const i64 first = i64(blockIdx.x / UNIT_BLOCKS) * SEQS;
  const int count = int(min(params.B - first, i64(SEQS)));
  if (unit >= ROW) return;
  u32 carry = ~0u;
  for (int s = 0; params.reset && s < count; s++)
    if (params.reset[first + s]) carry &= ~(1u << s);
  const bool vectors = params.features % VECTOR == 0 && D % VECTOR == 0 && aligned(params.x) && aligned(params.W) &&
      aligned(params.R) && aligned(before[0]);
  Sums sums = {};
  if (vectors) add_all_products<VECTOR>(sums, params, before[0], carry, first, count, unit);
  else add_all_products<1>(sums, params, before[0], carry, first, count, unit);
  float g[GATES], old[STATES], fresh[STATES];
  reduce(g, sums, count);
  if (lane >= count) return;
  const i64 at = (first + lane) * ROW + unit;
  UNROLL for (int j = 0; j < GATES; j++) g[j] += params.bias ? float(params.bias[j * ROW + unit]) : 0;
  UNROLL for (int i = 0; i < STATES; i++) old[i] = before[i] && carry >> lane & 1 ? before[i][at] : 0;
  old[0] = float(scalar(old[0]));  // rounded as h of every step
  if (params.gates)
    UNROLL for (int j = 0; j < GATES; j++)
      if (STORED_OF[j] >= 0)
        to_gate(params.gates[(first + lane) * (HEADS * HEAD_NUMBERS) + gate_index(unit, STORED_OF[j])], g[j]);
  cell_forward(g, old, fresh);
  params.h[at] = scalar(fresh[0]);
  fresh[0] = float(scalar(fresh[0]));
  UNROLL for (int i = 0; i < STATES; i++) params.last[i * params.B * ROW + at] = fresh[i];
  if (params.aux)
    UNROLL for (int i = 1; i < STATES; i++) to_gate(params.aux[(i - 1) * params.B * ROW + at], fresh[i]);
}
