// CENTRED: recurrent sums without their mean over all gates and units (cells/centring.py). The mean is linear in h: its
// weights are the means of the columns of R, which are multiplied beside R.
#pragma once
#include "resident/kernels/cells.cuh"
#include "resident/kernels/forward_memory.cuh"

// Returns the sum of `value` over the quads of the warp.
DEVICE float sum_over_quads(float value) {
  UNROLL for (int mask = 16; mask >= 4; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// Calls call(tile, half, column) for each pair of neighbouring columns in the warp's fragments, with the number of the
// pair's first tile and the first column.
template <class Call>
DEVICE void for_each_pair(const ThreadCoord& coord, const Call& call) {
  UNROLL for (int k = 0; k < K_TILES; k++)
    UNROLL for (int half = 0; half < 2; half++) call(k * GR, half, k * 16 + half * 8 + 2 * coord.lane_in_quad);
}

struct MeanWeights {
  u32 registers[K_TILES][4];  // fragments of two kinds of rows: the leading 8 bits of the means, and the next ones

  // Computes the weights from the warp's tiles of R, which are all in registers, and loads the biases of the lane's
  // rows of R, without their mean, in the order of a product's sums. `memory` is shared. All threads of the block call
  // this.
  DEVICE void load(float (&biases)[GR][4], const Weights& weights, char* memory, const Params& params,
                   const ThreadCoord& coord) {
    constexpr int ROW_SUMS = D + 1;  // of all columns of R, and of the biases
    float* const sums = reinterpret_cast<float*>(memory);
    float* const own = sums + coord.unit_tile * ROW_SUMS;
    for_each_pair(coord, [&](int tile, int half, int column) {
      float2 sum = make_float2(0, 0);
      UNROLL for (int i = 0; i < 2 * GR; i++) {
        const float2 pair = unpack(weights.registers[tile + i / 2][2 * half + i % 2]);
        sum.x += pair.x, sum.y += pair.y;
      }
      sum.x = sum_over_quads(sum.x), sum.y = sum_over_quads(sum.y);
      if (coord.quad == 0) own[column] = sum.x, own[column + 1] = sum.y;
    });
    float of_unit[GR][2], sum = 0;
    UNROLL for (int j = 0; j < GATES; j++)
      UNROLL for (int i = 0; i < 2; i++)
        if (RECURRENT_OF[j] >= 0)
          sum += of_unit[RECURRENT_OF[j] >= 0 ? RECURRENT_OF[j] : 0][i] =
              float(params.bias[j * ROW + coord.head * D + coord.tile_unit + 2 * coord.quad + i]);
    sum = sum_over_quads(sum);
    if (coord.lane == 0) own[D] = sum;
    __syncthreads();
    auto mean = [&](int column) {
      float total = 0;
      UNROLL for (int i = 0; i < UNIT_TILES; i++) total += sums[i * ROW_SUMS + column];
      return total * (1.0f / (GR * D));
    };
    for_each_pair(coord, [&](int tile, int half, int column) {
      const float first = mean(column), second = mean(column + 1);
      const u32 leading = pack(first, second);
      const float2 rounded = unpack(leading);
      registers[tile / GR][2 * half] = leading,
          registers[tile / GR][2 * half + 1] = pack(first - rounded.x, second - rounded.y);
    });
    // Volatile, so that the compiler does not know which ones are equal: it would copy these in every step.
    volatile float* const of_lane = sums + UNIT_TILES * ROW_SUMS + 2 * threadIdx.x;
    UNROLL for (int j = 0; j < GR; j++) {
      UNROLL for (int i = 0; i < 2; i++) of_lane[i] = of_unit[j][i] - mean(D);
      UNROLL for (int i = 0; i < 4; i++) biases[j][i] = of_lane[i / 2];
    }
    static_assert(!CENTRED || (UNIT_TILES * ROW_SUMS + 2 * THREADS) * 4 <= STAGES * INPUT_BYTES);
    __syncthreads();
  }

  // Subtracts the means of R h from the sums c of a step, whose operand's first row of the lane is `row`.
  DEVICE void centre(float (&c)[GR][BATCH_TILES][4], u32 row) const {
    UNROLL for (int n = 0; n < BATCH_TILES; n++) {
      float parts[2][4] = {};
      UNROLL for (int k = 0; k < K_TILES; k += 2) {
        u32 h[4] = {};
        const u32 from = row + (k * 2 * OPERAND_COLUMNS + n * 8) * 16;
        if (k + 1 == K_TILES) load_two_matrices(h[0], h[1], from);
        else load_four_matrices(h, from);
        mma(parts[0], registers[k], h[0], h[1]);
        if (k + 1 < K_TILES) mma(parts[1], registers[k + 1 < K_TILES ? k + 1 : 0], h[2], h[3]);
      }
      float means[2];
      UNROLL for (int i = 0; i < 2; i++) means[i] = (parts[0][i] + parts[1][i]) + (parts[0][2 + i] + parts[1][2 + i]);
      UNROLL for (int j = 0; j < GR; j++)
        UNROLL for (int i = 0; i < 4; i++) c[j][n][i] -= means[i % 2];
    }
  }
};
