// One token of each of B sequences through a language model of residual recurrent blocks, in one cooperative launch.
//
// The residual blocks, x + norm(h) and x + down(gelu(up(norm(x)))), are three phases, whose results the blocks of the grid
// exchange: h, from gates and cell; the hidden layer of the MLP; the residual stream x. A block computes tiles of eight rows of
// each matrix, for all sequences, and in the first phase all gates of eight units. Every block reads the whole residual stream
// and computes norms of it by itself: that is less than another exchange takes.
#pragma once
#include "decoding/kernels/exchange.cuh"
#include "decoding/kernels/weights.cuh"
#include "kernels/memory.cuh"

constexpr int TILES = (GATES + 3) / 4 * 4;      // whose sums are in shared memory at a time
constexpr int OPERAND_STRIDE = WIDTH + VECTOR;  // lets a quarter of a warp, two rows of four lanes, read from all banks
constexpr int WARP_SEQS = (SEQS + WARPS - 1) / WARPS;
// Slices of the hidden layer that are loaded at once: as many as registers hold.
constexpr int SLICES_AT_ONCE = WARP_VECTORS * SEQS <= 24 ? SLICES < 4 ? SLICES : 4 : SLICES < 2 ? 1 : 2;
static_assert(SEQS == 8 || SEQS == 16 * SEQ_TILES);

struct alignas(16) Shared {
  char slots[SLOTS * SLOT_BYTES];
  float stream[SEQS][WIDTH];                // the residual stream
  float sums[WARPS][TILES][SEQS][8];
  float residual[SEQS][OUTPUT_TILES * 8];   // of the rows of `down` that the block computes
  scalar operand[SEQS * OPERAND_STRIDE];
  i64 table[BLOCKS * ENTRIES];
  u64 barriers[SLOTS];
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "decoding/tiling.py counts shared memory differently");

// Loads a row that other blocks wrote.
DEVICE void load_exchanged(Row& row, const float* from) {
  row.for_each([&](float (&v)[4], int at) {
    const uint4 words = load_exchanged(reinterpret_cast<const uint4*>(from + at), true);
    v[0] = __uint_as_float(words.x), v[1] = __uint_as_float(words.y), v[2] = __uint_as_float(words.z), v[3] = __uint_as_float(words.w);
  });
}

// Calls f(sequence, n) for each sequence of the warp, number n of WARP_SEQS.
template <class F>
DEVICE void for_each_sequence(i64 B, F f) {
#pragma unroll
  for (int n = 0; n < WARP_SEQS; n++) {
    const int sequence = n * WARPS + threadIdx.x / 32;
    if (sequence < B) f(sequence, n);
  }
}

// Sets the operand of a product with `vectors` vectors to f(sequence, place of 16 bytes of scalars).
template <class F>
DEVICE void load_operand(Operand& operand, int vectors, i64 B, F f) {
#pragma unroll
  for (int i = 0; i < WARP_VECTORS; i++)
#pragma unroll
    for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int sequence = m * 16 + half * 8 + threadIdx.x % 32 / 4, vector = i * WARPS + threadIdx.x / 32;
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

DEVICE void store_sums(Shared& shared, int tile, const Sums& c) {
  const int quad = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
    for (int half = 0; half < (SEQS > 8 ? 2 : 1); half++)
      *reinterpret_cast<float2*>(&shared.sums[threadIdx.x / 32][tile][m * 16 + half * 8 + quad][column]) =
          make_float2(c[m][0][2 * half], c[m][0][2 * half + 1]);
}
DEVICE float sum_of_warps(const Shared& shared, int tile, int sequence, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += shared.sums[warp][tile][sequence][row];
  return sum;
}

// Multiplies the operand by this block's tiles of a matrix of `tiles` tiles, and calls f(sequence, n, row, sum) for each
// result, n as in for_each_sequence, by all lanes of a warp at once; f has to leave out rows beyond the matrix.
template <class F>
DEVICE void multiply_rows(Shared& shared, Weights& weights, const Operand& operand, int tiles, i64 B, F f) {
#pragma unroll 1
  for (int first = blockIdx.x; first < tiles; first += TILES * GRID) {
    if (first >= TILES * GRID) weights.refill();
    Sums c[TILES] = {};
    weights.multiply<TILES>([&](auto k) -> Sums& { return c[k]; }, [&](int) -> const Operand& { return operand; }, VECTORS,
                            tiles_from(first, tiles));
    if (first >= TILES * GRID) __syncthreads();  // all threads have read the previous sums
#pragma unroll
    for (int k = 0; k < TILES; k++) store_sums(shared, k, c[k]);
    __syncthreads();
    for_each_sequence(B, [&](int sequence, int n) {
      for (int i = threadIdx.x % 32; i < TILES * 8; i += 32)
        f(sequence, n, (first + i / 8 * GRID) * 8 + i % 8, sum_of_warps(shared, i / 8, sequence, i % 8));
    });
  }
}

// The gate that is number k of its class.
DEVICE constexpr int gate_of(const int (&places)[GATES], int k) {
  for (int j = 0; j < GATES; j++)
    if (places[j] == k) return j;
  return 0;
}

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + op_erf(x * 0.70710678f)); }

// A float, and an index of which the smaller is preferred, as a number of the same order.
DEVICE u64 ordered(float x, u32 index) {
  const u32 bits = __float_as_uint(x);
  return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~index;
}

// PARAMETERS: types and shapes are in step.py. tokens, at most SEQS of them -> logits, unless null; chosen, unless null: the
// tokens of the largest logits; history, unless null: they are its row *cursor, which moves on. table: as in `Model`. residual,
// hidden_state and hidden are written by some blocks and read by others. counters and best are zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_step(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  Shared& shared = *shared_memory;
  for (int i = threadIdx.x; i < BLOCKS * ENTRIES; i += THREADS) shared.table[i] = table[i];
  const Model model{base, shared.table};
  Weights weights(model, head, shared.slots, shared.barriers);
  __syncthreads();
  weights.refill();
  CountingBarrier grid(counters + 1);
  const int lane = threadIdx.x % 32, unit_tiles = tiles_from(first_unit_tile(), UNIT_TILES);
  const bool has_units = unit_tiles > 0, has_outputs = first_output_tile() < UNIT_TILES;

  // The residual stream before a block.
  auto load_stream = [&](Row& row, int block, int sequence) {
    if (block == 0) row.load(embedding + tokens[sequence] * WIDTH);
    else load_exchanged(row, residual + sequence * WIDTH);
  };
  auto operand_of_shared = [&](Operand& operand) {
    __syncthreads();
    load_operand(operand, VECTORS, B, [&](int sequence, int at) {
      return *reinterpret_cast<const uint4*>(&shared.operand[sequence * OPERAND_STRIDE + at]);
    });
  };
  // Normalizes the residual stream before a block, as the operand of its first matrix.
  auto begin = [&](Operand& operand, int block, const scalar* norm) {
    Row row, weight;
    if (threadIdx.x / 32 < B) weight.load(norm);
    if (block > 0) grid.wait();
    for_each_sequence(B, [&](int sequence, int) {
      load_stream(row, block, sequence);
      row.store(shared.stream[sequence]);
      row.normalize<WIDTH>();
      row.multiply_by(weight);
      row.store(&shared.operand[sequence * OPERAND_STRIDE]);
    });
    operand_of_shared(operand);
  };

#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    float* state = model.at<float>(block, STATE);
    const scalar* bias = model.at(block, BIAS);
    Operand operand;
    if (!has_units && block > 0) grid.wait();
#pragma unroll 1
    for (int i = 0; i < unit_tiles; i++) {
      const int unit0 = (first_unit_tile() + i * GRID) * 8, unit = unit0 + lane % 8;
      // R h depends on nothing of this step: it is computed before the residual stream arrives.
      Operand h_before;
      load_operand(h_before, D / VECTOR, B, [&](int sequence, int at) { return rounded(state + sequence * WIDTH + unit0 / D * D + at); });
      float old[WARP_SEQS][STATES], b[GATES];
      for_each_sequence(B, [&](int sequence, int n) {
#pragma unroll
        for (int k = 0; k < STATES; k++) old[n][k] = state[(k * B + sequence) * WIDTH + unit];
      });
#pragma unroll
      for (int j = 0; j < GATES; j++) b[j] = float(bias[j * WIDTH + unit]);
      Sums c[GATES] = {};
      // Chunks are in the order of the gates of their class.
      auto of_recurrent = [&](auto k) -> Sums& { constexpr int gate = gate_of(RECURRENT_OF, k); return c[gate]; };
      auto of_input = [&](auto k) -> Sums& { constexpr int gate = gate_of(INPUT_OF, k); return c[gate]; };
      weights.multiply<GR>(of_recurrent, [&](int) -> const Operand& { return h_before; }, D / VECTOR);
      __syncthreads();
      weights.refill();
      if (i == 0) begin(operand, block, model.at(block, MIXER_NORM));
      weights.multiply<GI>(of_input, [&](int) -> const Operand& { return operand; }, VECTORS);
#pragma unroll
      for (int j = 0; j < GATES; j++) store_sums(shared, j, c[j]);
      __syncthreads();
      for_each_sequence(B, [&](int sequence, int n) {
        // Lane 8 j + r sums gate j of unit r; then all lanes of a unit compute the cell.
        float sums[TILES / 4], g[GATES], fresh[STATES];
#pragma unroll
        for (int j = 0; j < TILES; j += 4) sums[j / 4] = sum_of_warps(shared, j + lane / 8, sequence, lane % 8);
#pragma unroll
        for (int j = 0; j < GATES; j++) g[j] = b[j] + __shfl_sync(0xffffffffu, sums[j / 4], j % 4 * 8 + lane % 8);
        cell_forward(g, old[n], fresh);
        if (lane >= 8) return;
        hidden_state[sequence * WIDTH + unit] = float(scalar(fresh[0]));
#pragma unroll
        for (int k = 1; k < STATES; k++) state[(k * B + sequence) * WIDTH + unit] = fresh[k];
      });
      if (i + 1 < unit_tiles) {
        __syncthreads();
        weights.refill();
      }
    }
    grid.arrive();
    weights.refill();

    {
      Row x, h, head_weight, mlp_weight;
      if (threadIdx.x / 32 < B) head_weight.load(model.at(block, HEAD_NORM)), mlp_weight.load(model.at(block, MLP_NORM));
      grid.wait();
      for_each_sequence(B, [&](int sequence, int) {
        if (has_units) x.load(shared.stream[sequence]);
        else load_stream(x, block, sequence);
        load_exchanged(h, hidden_state + sequence * WIDTH);
        h.normalize<D>();
        h.multiply_by(head_weight);
        x.add(h);
        x.for_each([&](float (&v)[4], int at) {
          const int place = at / 8 - first_output_tile();
          if (place >= 0 && place % GRID == 0) store_four(&shared.residual[sequence][place / GRID * 8 + at % 8], v);
        });
        x.normalize<WIDTH>();
        x.multiply_by(mlp_weight);
        x.store(&shared.operand[sequence * OPERAND_STRIDE]);
      });
      operand_of_shared(operand);
    }
    multiply_rows(shared, weights, operand, HIDDEN_TILES, B, [&](int sequence, int, int row, float sum) {
      if (row < HIDDEN) hidden[sequence * HIDDEN + row] = scalar(gelu(sum));
    });
    grid.arrive();
    weights.refill();
    for (int i = 0; i < unit_tiles; i++)  // all blocks have read h of the step before
      for (int cell = threadIdx.x; cell < B * 8; cell += THREADS) {
        const int at = cell / 8 * WIDTH + (first_unit_tile() + i * GRID) * 8 + cell % 8;
        state[at] = hidden_state[at];
      }

    grid.wait();
    if (has_outputs) {
#pragma unroll 1
      for (int tile = first_output_tile(), place = 0; tile < UNIT_TILES; tile += GRID, place++) {
        if (place > 0) weights.refill();
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
                                           [&](auto k) -> const Operand& { return slices[k]; }, VECTORS, SLICES - first);
        }
#pragma unroll
        for (int k = 1; k < SLICES_AT_ONCE; k++)
#pragma unroll
          for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) c[0][m][0][r] += c[k][m][0][r];
        __syncthreads();  // all threads have read the previous sums
        store_sums(shared, 0, c[0]);
        __syncthreads();
        for_each_sequence(B, [&](int sequence, int) {
          if (lane >= 8) return;
          const float x = shared.residual[sequence][place * 8 + lane] + sum_of_warps(shared, 0, sequence, lane);
          residual[sequence * WIDTH + tile * 8 + lane] = x;
        });
      }
    }
    grid.arrive();
    weights.refill();
  }

  Operand operand;
  begin(operand, BLOCKS, norm);
  u64 largest[WARP_SEQS] = {};
  multiply_rows(shared, weights, operand, CLASS_TILES, B, [&](int sequence, int n, int row, float sum) {
    if (row >= CLASSES) return;
    const scalar logit = scalar(sum);
    if (logits) logits[i64(sequence) * CLASSES + row] = logit;
    largest[n] = max(largest[n], ordered(float(logit), row));
  });
  if (chosen)
    for_each_sequence(B, [&](int sequence, int n) {
#pragma unroll
      for (int other = 1; other < 32; other *= 2) largest[n] = max(largest[n], __shfl_xor_sync(0xffffffffu, largest[n], other));
      if (lane == 0) raise_to(best + sequence, largest[n]);
    });
  if (last_of_grid(counters)) {
    for (int sequence = threadIdx.x; chosen && sequence < B; sequence += THREADS) {
      chosen[sequence] = u32(~best[sequence]);
      if (history) history[*cursor * B + sequence] = chosen[sequence];
      best[sequence] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0 && history) ++*cursor;
    if (threadIdx.x == 0) counters[0] = counters[1] = 0;
  }
}
