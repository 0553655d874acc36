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
    Part total, other;
    float units = 0;
#pragma unroll
    for (int i = 0; i < Part::WORDS; i++) total.words[i] = i < Part::ADDED + Part::MOMENTS ? 0 : -INFINITY;
    for (int rank = coord.lane; rank < BLOCKS; rank += 32) {
      peek_partial(other, published_by(number, sequence, rank));
      const float more = real_units(rank * UNITS, UNITS);
      if (rank < 32) total = other;
      else total.add(other, more);
      units += more;
    }
    total.add_lanes(units);
    if (coord.lane == 0) store_results(total, sequence);
  }
}

template <class Part>
DEVICE void UnitReductions::peek_partial(Part& part, const u64* from) const {
  uint2 pairs[Part::PAIRS];
  bool all = false;
  while (!all) {
    all = true;
#pragma unroll
    for (int i = 0; i < Part::PAIRS; i++) peek_phase(pairs[i], from + i);
#pragma unroll
    for (int i = 0; i < Part::PAIRS; i++) all &= in_phase(pairs[i], phase() ^ 1);
  }
#pragma unroll
  for (int i = 0; i < Part::WORDS; i++) {
    const int at = i + 2 * Part::PAIRS - Part::WORDS;
    part.words[i] = __uint_as_float(at < Part::PAIRS ? pairs[at].x : pairs[at - Part::PAIRS].y);
  }
}
#endif
