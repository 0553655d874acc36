"""Anomalies in times over a size: sizes slower than a larger one, and neighbours whose order is estimated wrongly."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple


class Cliff(NamedTuple):
    """A size that takes longer than a larger one."""

    size: int
    ms: float
    faster: int
    faster_ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.faster_ms


def cliffs(times: Mapping[int, float], tolerance: float) -> list[Cliff]:
    """Return the sizes that take more than `tolerance` times as long as a larger size, each with the fastest one."""
    found, fastest = [], None
    for size in sorted(times, reverse=True):
        if fastest is not None and times[size] > tolerance * times[fastest]:
            found.append(Cliff(size, times[size], fastest, times[fastest]))
        if fastest is None or times[size] <= times[fastest]:
            fastest = size
    return found[::-1]


class Misranked(NamedTuple):
    """Neighbouring sizes that an estimate puts in the wrong order."""

    smaller: int
    larger: int
    estimated: float  # time of the larger size relative to that of the smaller
    measured: float


_NOISE = 1.02  # two measured times have no order if their ratio is less than this


def misranked(estimated: Mapping[int, float], measured: Mapping[int, float]) -> list[Misranked]:
    """Return neighbouring sizes for which the order of the estimated times is not that of the measured times."""
    found = []
    for smaller, larger in pairwise(sorted(estimated.keys() & measured.keys())):
        ratios = Misranked(smaller, larger, *(times[larger] / times[smaller] for times in (estimated, measured)))
        slower, faster = ratios.measured > _NOISE, ratios.measured < 1 / _NOISE
        if (slower and ratios.estimated < 1) or (faster and ratios.estimated > 1):
            found.append(ratios)
    return found
