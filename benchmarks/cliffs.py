"""What is wrong with times over a size: larger sizes that are faster, and estimates that order neighbours wrongly."""

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
    """Return sizes that take more than `tolerance` times as long as a larger one, each with the fastest larger one."""
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
    estimated: float  # time of the larger over that of the smaller
    measured: float


def misranked(estimated: Mapping[int, float], measured: Mapping[int, float], noise: float = 1.02) -> list[Misranked]:
    """Return neighbours of which the estimated order is not the measured one; times within `noise` of each other have
    none."""
    found = []
    for smaller, larger in pairwise(sorted(estimated.keys() & measured.keys())):
        ratios = Misranked(smaller, larger, *(times[larger] / times[smaller] for times in (estimated, measured)))
        slower, faster = ratios.measured > noise, ratios.measured < 1 / noise
        if (slower and ratios.estimated < 1) or (faster and ratios.estimated > 1):
            found.append(ratios)
    return found
