// How the blocks of a grid add up their parts of a reduction over units (unit_reductions.cuh), in global memory.
#pragma once
#include "resident/kernels/unit_reductions.cuh"

#if REDUCES
template <class Part>
DEVICE void UnitReductions::publish(int number) const {
  if (threadIdx.x >= SEQS) return;
  Part total;
  total_of_block(total, threadIdx.x, parts_of(number));
  u64* to = published_by(number, threadIdx.x, coord.rank);
  auto word = [&](int i) { return i < 0 ? 0 : __float_as_uint(total.words[i < 0 ? 0 : i]); };
#pragma unroll
  for (int i = 0; i < Part::PAIRS; i++)
    publish_phase(to + i, make_uint2(word(i + Part::WORDS - 2 * Part::PAIRS), word(i + Part::WORDS - Part::PAIRS)), phase() ^ 1);
}

template <class Part>
DEVICE void UnitReductions::total_published(int number) const {
  for (int sequence = coord.warp; sequence < SEQS; sequence += WARPS) {
    Part parts[LANE_PARTS], total;
    peek_partials(parts, published_by(number, sequence, 0));
#pragma unroll
    for (int i = 0; i < Part::WORDS; i++) {
      const bool is_shift = i >= Part::ADDED && i < Part::ADDED + Part::MOMENTS;
      total.words[i] = i < Part::ADDED ? 0 : is_shift ? __shfl_sync(~0u, parts[0].words[i], 0) : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < LANE_PARTS; k++) {
      const int rank = 32 * k + coord.lane;
      if (rank < BLOCKS) total.add(parts[k], real_units(rank * UNITS, UNITS));
    }
    total.template add_lanes<1>();
    if (coord.lane == 0) store_results(total, sequence);
  }
}

// Polls all that is missing at once: that takes as long as polling one.
template <class Part>
DEVICE void UnitReductions::peek_partials(Part (&parts)[LANE_PARTS], const u64* from) const {
  uint2 pairs[LANE_PARTS][Part::PAIRS];
  bool here[LANE_PARTS], all = false;
#pragma unroll
  for (int k = 0; k < LANE_PARTS; k++) here[k] = 32 * k + coord.lane >= BLOCKS;
  while (!all) {
    all = true;
#pragma unroll
    for (int k = 0; k < LANE_PARTS; k++)
#pragma unroll
      for (int i = 0; i < Part::PAIRS; i++)
        if (!here[k]) peek_phase(pairs[k][i], from + (32 * k + coord.lane) * EXCHANGED_PAIRS + i);
#pragma unroll
    for (int k = 0; k < LANE_PARTS; k++) {
      bool arrived = true;
#pragma unroll
      for (int i = 0; i < Part::PAIRS; i++) arrived &= in_phase(pairs[k][i], phase() ^ 1);
      here[k] |= arrived;
      all &= here[k];
    }
  }
#pragma unroll
  for (int k = 0; k < LANE_PARTS; k++)
#pragma unroll
    for (int i = 0; i < Part::WORDS; i++) {
      const int at = i + 2 * Part::PAIRS - Part::WORDS;
      parts[k].words[i] = __uint_as_float(at < Part::PAIRS ? pairs[k][at].x : pairs[k][at - Part::PAIRS].y);
    }
}
#endif
