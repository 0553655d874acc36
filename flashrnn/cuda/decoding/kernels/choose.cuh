// Selects the next token of each sequence from its logits: the largest, or a random one of the classes that top-k and
// top-p allow. A cluster serves one sequence; each thread holds the same few classes throughout.
//
// The allowed classes are those whose logit is at least a threshold: the k-th largest logit, or the largest value such
// that the classes from it on have a share p of the probability. The threshold is found digit by digit, by sums over
// all classes, which takes fewer passes than sorting. Classes with equal logits are allowed together or not at all.
#pragma once
#include "decoding/kernels/draw.cuh"
#include "kernels/cluster.cuh"
#include "kernels/memory.cuh"

constexpr int THREADS = 32 * WARPS;
// The lowest bit of `ordered` in which logits differ, or the bit below it: an even number.
constexpr int LOWEST_BIT = sizeof(scalar) == 4 ? 0 : MANTISSA_BITS == 7 ? 16 : 12;

struct alignas(16) Shared {
  float4 warp_results[WARPS], block_results[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES_EXPECTED, "choose.py counts shared memory differently");

// Reductions of up to three values over all threads of the cluster. All of them call each function together.
struct Cluster {
  Shared& shared;
  int buffer = 0;  // the buffer to use: one block may be one reduction ahead of another

  template <int LANES, class F>
  DEVICE static float4 reduce_lanes(float4 v, F f) {
    UNROLL for (int other = 1; other < LANES; other *= 2)
      v = f(v, make_float4(__shfl_xor_sync(0xffffffffu, v.x, other), __shfl_xor_sync(0xffffffffu, v.y, other),
                           __shfl_xor_sync(0xffffffffu, v.z, other), 0));
    return v;
  }
  template <class F>
  DEVICE float4 reduce(float4 v, F f) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = reduce_lanes<32>(v, f);
    if (lane == 0) shared.warp_results[warp] = v;
    __syncthreads();
    if (warp == 0) {
      v = reduce_lanes<WARPS>(shared.warp_results[lane % WARPS], f);
      if (lane == 0) shared.block_results[buffer] = v;
    }
    cluster_sync();
    v = reduce_lanes<RANKS>(load_remote(remote_address(shared_address(&shared.block_results[buffer]), lane % RANKS)),
                            f);
    buffer ^= 1;
    return v;
  }
  DEVICE float4 sum(float x, float y = 0, float z = 0) {
    return reduce(make_float4(x, y, z, 0),
                  [](float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, 0); });
  }
  DEVICE float max(float x) {
    return reduce(make_float4(x, 0, 0, 0), [](float4 a, float4 b) { return make_float4(fmaxf(a.x, b.x), 0, 0, 0); }).x;
  }
  DEVICE u64 max(u64 x) {
    auto whole = [](float4 v) { return u64(__float_as_uint(v.y)) << 32 | __float_as_uint(v.x); };
    const float4 v = make_float4(__uint_as_float(u32(x)), __uint_as_float(u32(x >> 32)), 0, 0);
    return whole(reduce(v, [&](float4 a, float4 b) { return whole(a) < whole(b) ? b : a; }));
  }
};

// Returns the largest `ordered` number such that the classes with at least this logit have at least the given weight in
// total. weight_of(i) is the weight of the thread's class i.
template <class F>
DEVICE u32 weight_threshold(Cluster& cluster, const u32 (&logit)[ELEMENTS], float weight, int lowest_bit, F weight_of) {
  u32 found = 0;
#pragma unroll 1
  for (int bit = 30; bit >= lowest_bit; bit -= 2) {
    float sums[3] = {};
    UNROLL for (int i = 0; i < ELEMENTS; i++)
      UNROLL for (u32 digit = 1; digit < 4; digit++)
        if (logit[i] >= (found | digit << bit)) sums[digit - 1] += weight_of(i);
    const float4 all = cluster.sum(sums[0], sums[1], sums[2]);
    found |= u32((all.x >= weight) + (all.y >= weight) + (all.z >= weight)) << bit;
  }
  return found;
}

// Returns the smallest logit that top-k and top-p allow, as an `ordered` number. `largest` is the largest logit,
// divided by the temperature.
DEVICE u32 smallest_allowed(Cluster& cluster, const u32 (&logit)[ELEMENTS], const Params& params, float largest,
                            float temperature, float top_p) {
  const int lowest_bit = params.seen ? 0 : LOWEST_BIT;
  u32 smallest = 1;
  if (params.top_k)
    smallest = weight_threshold(cluster, logit, float(params.top_k), lowest_bit, [](int) { return 1.0f; });
  if (top_p < 1) {
    float weight[ELEMENTS], sum = 0;
    UNROLL for (int i = 0; i < ELEMENTS; i++) {
      weight[i] = logit[i] < smallest ? 0 : op_exp(from_ordered(logit[i]) / temperature - largest);
      sum += weight[i];
    }
    const float share = fmaxf(top_p * cluster.sum(sum).x, 1e-30f);  // the most likely class has weight 1
    smallest = max(smallest, weight_threshold(cluster, logit, share, lowest_bit, [&](int i) { return weight[i]; }));
  }
  return smallest;
}

// Stores the chosen token of the sequence, and updates its history, key and `seen`.
DEVICE void store_token(const Params& params, i64 sequence, u32 token) {
  params.chosen[sequence] = token;
  if (params.history) params.history[*params.cursor * (gridDim.x / RANKS) + sequence] = token;
  if (params.keys) params.keys[sequence] += NEXT_KEY;
  if (params.seen) params.seen[sequence * params.C + token] = 1;
}

// Params: types and shapes are in choose.py. logits [B, C], with rows of `stride` numbers -> chosen [B]. history,
// unless null: gets the tokens as row *cursor, which is then incremented. seen [B, C], unless null: classes to
// penalise, to which the chosen one is added. keys, unless null: random keys for sampling, which are then advanced;
// without keys, the largest logit is chosen. counter: zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, ELEMENTS <= 16 ? 2 : 1)
flashrnn_choose(PARAMETERS) {
  extern __shared__ __align__(16) Shared shared_memory[];
  const Params params{PARAMETER_NAMES};
  Cluster cluster{*shared_memory};
  const i64 sequence = blockIdx.x / RANKS;
  const float* const settings = params.settings;
  const float temperature = settings[0], top_p = settings[1], least = settings[2], penalty = settings[3];
  const int rank = cluster_rank();
  auto at = [&](int i) { return (i * RANKS + rank) * THREADS + int(threadIdx.x); };

  u32 logit[ELEMENTS];  // `ordered`; 0: no class
  float largest = -INFINITY;
  UNROLL for (int i = 0; i < ELEMENTS; i++) {
    logit[i] = 0;
    if (at(i) >= params.C) continue;
    float x = float(params.logits[sequence * params.stride + at(i)]);
    if (params.seen && params.seen[sequence * params.C + at(i)]) x = x < 0 ? x * penalty : x / penalty;
    logit[i] = ordered(x), largest = fmaxf(largest, x);
  }
  u32 smallest = 1;
  if (params.keys) {
    largest = cluster.max(largest) / temperature;
    smallest = smallest_allowed(cluster, logit, params, largest, temperature, top_p);
  }

  u64 best = 0;
  UNROLL for (int i = 0; i < ELEMENTS; i++) {
    if (logit[i] < smallest) continue;
    float score = from_ordered(logit[i]);
    if (params.keys) {
      score /= temperature;
      if (score < largest + least) continue;
      score = score_of_draw(score, params.keys[sequence], at(i));
    }
    best = max(best, ordered(score, at(i)));
  }
  best = cluster.max(best);
  if (rank == 0 && threadIdx.x == 0) store_token(params, sequence, u32(~best));
  cluster_sync();  // no block exits while others read its shared memory
  if (last_of_grid(params.counter) && threadIdx.x == 0) {
    *params.counter = 0;
    if (params.history) ++*params.cursor;
  }
}
