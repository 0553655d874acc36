// One token of each of B sequences through a language model of residual recurrent blocks, in one cooperative launch.
//
// The residual blocks, x + norm(h) and x + down(gelu(up(norm(x)))), are three phases, after each of which the blocks of the
// grid wait for each other: gates and cell; the first matrix of the MLP; the second one. A block computes tiles of eight
// rows of each matrix, for all sequences, and in the first phase all gates of eight units. Every block reads the whole
// residual stream and computes norms of it by itself: that is less than another barrier takes.
#pragma once
#include "decoding/kernels/rows.cuh"
#include "kernels/gates.cuh"

constexpr int TILES = GATES > 4 ? GATES : 4;  // whose sums are in shared memory at a time
constexpr int OPERAND_STRIDE = WIDTH + VECTOR;  // lets a quarter of a warp, two rows of four lanes, read from all banks
constexpr int CELLS = (SEQS * 8 + THREADS - 1) / THREADS;
constexpr int WARP_SEQS = (SEQS + WARPS - 1) / WARPS;
static_assert(SEQS == 8 || SEQS == 16 * SEQ_TILES);

struct alignas(16) Shared {
  uint4 fifo[SLOTS * WARP_VECTORS * THREADS];
  float sums[WARPS][TILES][SEQS][8];
  float residual[SEQS][OUTPUT_TILES * 8];  // of the rows of `down` that the block computes
  scalar operand[SEQS * OPERAND_STRIDE];
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "decoding/step.py counts shared memory differently");

// A barrier of the grid. The counter is zero when the kernel starts, and again when it ends.
struct CountingBarrier {
  u32 *counter, expected = 0;
  DEVICE explicit CountingBarrier(u32* counter) : counter(counter) {}
  DEVICE void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) signal(counter);
    expected += gridDim.x;
  }
  DEVICE void wait() const {
    if (threadIdx.x == 0) await(counter, expected);
    __syncthreads();
  }
};

using Operand = uint4[WARP_VECTORS][SEQ_TILES][2];

// Calls f(16 bytes, sequence, number of the vector) for each part of a product's operand that the lane loads.
template <class F>
DEVICE void load_operand(Operand& operand, int vectors, i64 B, F f) {
  const int warp = threadIdx.x / 32, quad = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < WARP_VECTORS; i++)
#pragma unroll
    for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int sequence = m * 16 + half * 8 + quad, vector = i * WARPS + warp;
        const bool valid = (half == 0 || SEQS > 8) && sequence < B && vector < vectors;
        operand[i][m][half] = valid ? f(sequence, vector * VECTOR + threadIdx.x % 4 * LANE) : make_uint4(0, 0, 0, 0);
      }
}

// Rounds as many floats as there are scalars in 16 bytes.
DEVICE uint4 rounded(const float* from) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  if constexpr (BYTES == 4) {
    return make_uint4(__float_as_uint(low.x), __float_as_uint(low.y), __float_as_uint(low.z), __float_as_uint(low.w));
  } else {
    const float4 high = *reinterpret_cast<const float4*>(from + 4);
    return make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
  }
}

using Sums = float[SEQ_TILES][1][4];  // of a warp: a tile of rows by all sequences

DEVICE void store_sums(Shared& shared, int tile, const Sums& c) {
  const int warp = threadIdx.x / 32, quad = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
    for (int half = 0; half < (SEQS > 8 ? 2 : 1); half++)
      *reinterpret_cast<float2*>(&shared.sums[warp][tile][m * 16 + half * 8 + quad][column]) =
          make_float2(c[m][0][2 * half], c[m][0][2 * half + 1]);
}
DEVICE float sum_of_warps(const Shared& shared, int tile, int sequence, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += shared.sums[warp][tile][sequence][row];
  return sum;
}

// Multiplies the operand by this block's tiles of a matrix of `tiles` tiles, and calls f(sequence, row, sum) for each result;
// one warp gets all of a sequence.
template <class F>
DEVICE void multiply_rows(Shared& shared, Weights& weights, const Operand& operand, int tiles, i64 B, F f) {
#pragma unroll 1
  for (int first = blockIdx.x; first < tiles; first += TILES * gridDim.x) {
    if (first >= TILES * gridDim.x) __syncthreads();  // all threads have read the previous sums
#pragma unroll
    for (int k = 0; k < TILES; k++) {
      if (first + k * gridDim.x >= tiles) break;
      Sums c = {};
      weights.multiply_next(c, operand, VECTORS);
      store_sums(shared, k, c);
    }
    __syncthreads();
#pragma unroll 1
    for (int sequence = threadIdx.x / 32; sequence < B; sequence += WARPS)
      for (int i = threadIdx.x % 32; i < TILES * 8; i += 32) {
        const int tile = first + i / 8 * gridDim.x;
        if (tile < tiles) f(sequence, tile * 8 + i % 8, sum_of_warps(shared, i / 8, sequence, i % 8));
      }
  }
}

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + op_erf(x * 0.70710678f)); }

// A float, and an index of which the smaller is preferred, as a number of the same order.
DEVICE u64 ordered(float x, u32 index) {
  const u32 bits = __float_as_uint(x);
  return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~index;
}

// PARAMETERS: types and shapes are in parameters.py. tokens, at most SEQS of them -> logits, unless null; chosen, unless null:
// the tokens of the largest logits. table: as in `Model`. counters and best are zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_step(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  Shared& shared = *shared_memory;
  const Model model{base, table};
  Weights weights(model, head, shared.fifo);
  CountingBarrier grid(counters);
  const int warp = threadIdx.x / 32;

  auto normalized_operand = [&](Operand& operand) {
    __syncthreads();
    load_operand(operand, VECTORS, B, [&](int sequence, int at) {
      return *reinterpret_cast<const uint4*>(&shared.operand[sequence * OPERAND_STRIDE + at]);
    });
  };
  auto load_residual = [&](Row& row, int block, int sequence) {
    if (block == 0) row.load(embedding + tokens[sequence] * WIDTH);
    else row.load_from_others(residual + sequence * WIDTH);
  };
  // The operand of the first matrix after block - 1: norms of the residual stream.
  auto begin = [&](Operand& operand, int block, const scalar* norm) {
    Row row, weight;
    if (warp < B) weight.load(norm);
    if (block > 0) grid.wait();
    for (int sequence = warp; sequence < B; sequence += WARPS) {
      load_residual(row, block, sequence);
      row.normalize<WIDTH>();
      row.multiply_by(weight);
      row.store(&shared.operand[sequence * OPERAND_STRIDE]);
    }
    normalized_operand(operand);
  };

#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    float* state = model.at<float>(block, STATE);
    const scalar* bias = model.at(block, BIAS);
    Operand operand;
    // R h depends on nothing of this step: it is computed before the residual stream arrives.
    const int unit_tiles = tiles_from(first_unit_tile(), UNIT_TILES);
#pragma unroll 1
    for (int i = 0; i < (unit_tiles ? unit_tiles : 1); i++) {
      const int unit0 = (first_unit_tile() + i * gridDim.x) * 8;
      const bool mine = unit_tiles > 0;
      Sums c[GATES] = {};
      float old[CELLS][STATES] = {}, b[CELLS][GATES] = {};
      if (mine) {
        Operand h_before;
        load_operand(h_before, D / VECTOR, B, [&](int sequence, int at) {
          return rounded(state + sequence * WIDTH + unit0 / D * D + at);
        });
#pragma unroll
        for (int n = 0; n < CELLS; n++) {
          const int cell = threadIdx.x + n * THREADS, sequence = cell / 8, element = unit0 + cell % 8;
          if (sequence >= B) break;
#pragma unroll
          for (int k = 0; k < STATES; k++) old[n][k] = state[(k * B + sequence) * WIDTH + element];
#pragma unroll
          for (int j = 0; j < GATES; j++) b[n][j] = float(bias[j * WIDTH + element]);
        }
#pragma unroll
        for (int j = 0; j < GATES; j++)
          if (RECURRENT_OF[j] >= 0) weights.multiply_next(c[j], h_before, D / VECTOR);
      }
      if (i == 0) begin(operand, block, model.at(block, MIXER_NORM));
      if (!mine) break;
#pragma unroll
      for (int j = 0; j < GATES; j++) {
        if (INPUT_OF[j] >= 0) weights.multiply_next(c[j], operand, VECTORS);
        store_sums(shared, j, c[j]);
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < CELLS; n++) {
        const int cell = threadIdx.x + n * THREADS, sequence = cell / 8, element = unit0 + cell % 8;
        if (sequence >= B) break;
        float g[GATES], fresh[STATES];
#pragma unroll
        for (int j = 0; j < GATES; j++) g[j] = b[n][j] + sum_of_warps(shared, j, sequence, cell % 8);
        cell_forward(g, old[n], fresh);
        hidden_state[sequence * WIDTH + element] = float(scalar(fresh[0]));
#pragma unroll
        for (int k = 1; k < STATES; k++) state[(k * B + sequence) * WIDTH + element] = fresh[k];
      }
      if (i + 1 < unit_tiles) __syncthreads();
    }
    grid.arrive();

    {
      Row x, h, head_weight, mlp_weight;
      if (warp < B) head_weight.load(model.at(block, HEAD_NORM)), mlp_weight.load(model.at(block, MLP_NORM));
      grid.wait();
      for (int sequence = warp; sequence < B; sequence += WARPS) {
        h.load_from_others(hidden_state + sequence * WIDTH);
        load_residual(x, block, sequence);
        h.normalize<D>();
        h.multiply_by(head_weight);
        x.add(h);
        x.for_each([&](float (&v)[4], int at) {
          const int tile = at / 8, place = tile - first_output_tile();
          if (place >= 0 && place % gridDim.x == 0) store_four(&shared.residual[sequence][place / gridDim.x * 8 + at % 8], v);
        });
        x.normalize<WIDTH>();
        x.multiply_by(mlp_weight);
        x.store(&shared.operand[sequence * OPERAND_STRIDE]);
      }
      normalized_operand(operand);
    }
    multiply_rows(shared, weights, operand, HIDDEN_TILES, B,
                  [&](int sequence, int row, float sum) { hidden[sequence * HIDDEN + row] = scalar(gelu(sum)); });
    grid.arrive();
    // All blocks have read h of the step before.
    for (int i = 0; i < unit_tiles; i++)
      for (int cell = threadIdx.x; cell < B * 8; cell += THREADS) {
        const int at = cell / 8 * WIDTH + (first_unit_tile() + i * gridDim.x) * 8 + cell % 8;
        state[at] = hidden_state[at];
      }

    grid.wait();
#pragma unroll 1
    for (int tile = first_output_tile(), place = 0; tile < UNIT_TILES; tile += gridDim.x, place++) {
      Operand slices[SLICES];
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++)
        load_operand(slices[slice], VECTORS, B, [&](int sequence, int at) {
          return load_exchanged(reinterpret_cast<const uint4*>(hidden + sequence * HIDDEN + slice * WIDTH + at), true);
        });
      Sums c = {};
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) weights.multiply_next(c, slices[slice], VECTORS);
      store_sums(shared, 0, c);
      __syncthreads();
      for (int cell = threadIdx.x; cell < B * 8; cell += THREADS) {
        const int sequence = cell / 8, row = cell % 8;
        residual[sequence * WIDTH + tile * 8 + row] = shared.residual[sequence][place * 8 + row] + sum_of_warps(shared, 0, sequence, row);
      }
      __syncthreads();
    }
    grid.arrive();
  }

  Operand operand;
  begin(operand, BLOCKS, norm);
  u64 largest[WARP_SEQS] = {};
  multiply_rows(shared, weights, operand, CLASS_TILES, B, [&](int sequence, int row, float sum) {
    if (row >= CLASSES) return;
    const scalar logit = scalar(sum);
    if (logits) logits[i64(sequence) * CLASSES + row] = logit;
#pragma unroll
    for (int n = 0; n < WARP_SEQS; n++)
      if (sequence / WARPS == n) largest[n] = max(largest[n], ordered(float(logit), row));
  });
  if (chosen) {
#pragma unroll
    for (int n = 0; n < WARP_SEQS; n++) {
#pragma unroll
      for (int other = 1; other < 32; other *= 2) largest[n] = max(largest[n], __shfl_xor_sync(0xffffffffu, largest[n], other));
      if (threadIdx.x % 32 == 0 && n * WARPS + warp < B) raise_to(best + n * WARPS + warp, largest[n]);
    }
  }
  if (last_of_grid(counters + 1)) {
    for (int sequence = threadIdx.x; chosen && sequence < B; sequence += THREADS) {
      chosen[sequence] = u32(~best[sequence]);
      best[sequence] = 0;
    }
    if (threadIdx.x == 0) counters[0] = counters[1] = 0;
  }
}
