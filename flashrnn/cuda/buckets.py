"""Batch buckets: one kernel serves many batch sizes, so that a program that calls with all of them compiles few
kernels.

The solvers find a tiling for one batch size; asked for every size, they return up to thirteen different kernels. Of
these, the FEW are selected whose largest estimated slowdown over the fastest kernel is smallest. If it exceeds SLOWEST,
kernels with `KernelSpec.any_sequences` are considered as well, and the sum of all slowdowns is made small too.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

from flashrnn.cache import cache_folder, store
from flashrnn.cuda.spec import KernelSpec

FEW = 6  # kernels per direction for all batch sizes up to LARGEST
LARGEST = 512
SLOWEST = 1.06
_MORE = 0.01  # by which the largest slowdown may grow if the sum of all falls
_SOLVED = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 60, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
_JUDGED = (*range(1, 65), *range(66, 257, 2), *range(264, LARGEST + 1, 8))  # sizes in between have the larger's bucket

Kernel = tuple[int, bool]
"""The batch size whose tiling a kernel has, and its `KernelSpec.any_sequences`."""
Ranges = tuple[tuple[int, Kernel], ...]
"""Pairs of the first batch size of a range and the kernel that serves the range."""


@dataclass(frozen=True)
class Solver:
    """Finds and rates tilings of a backend's kernels.

    Attributes:
        sources: the files that define the problem and its estimates. Buckets are found again when one of them changes.
        best: returns the tiling with the best estimate for a spec.
        cycles: returns the estimate for a spec and a tiling, which may have been found for another batch size.
    """

    sources: tuple[str, ...]
    best: Callable[[KernelSpec], Hashable]
    cycles: Callable[[KernelSpec, Hashable], float]


def bucket(spec: KernelSpec, solver: Solver) -> KernelSpec:
    """Return the spec with the batch size whose tiling serves the batch size of `spec`."""
    if spec.layers > 1:  # a search for every number of layers would take long
        return replace(spec, batch=min((size for size in _SOLVED if size >= spec.batch), default=spec.batch))
    ranges = _ranges(replace(spec.of_all_variants, batch=1), solver)
    if spec.batch > LARGEST:
        return _spec_for(spec, _fastest(spec.of_all_variants, solver, ranges))
    return _spec_for(spec, ranges[bisect_right([first for first, _ in ranges], spec.batch) - 1][1])


def _spec_for(spec: KernelSpec, kernel: Kernel) -> KernelSpec:
    return replace(spec, batch=kernel[0], any_sequences=kernel[1])


@cache
def _fastest(spec: KernelSpec, solver: Solver, ranges: Ranges) -> Kernel:
    """Return the kernel with the best estimate for a batch size above LARGEST."""
    kernels = sorted({kernel for _, kernel in ranges})
    return min(kernels, key=lambda kernel: solver.cycles(spec, solver.best(_spec_for(spec, kernel))))


@cache
def _ranges(spec: KernelSpec, solver: Solver) -> Ranges:
    """Return the ranges of batch sizes for a spec, from the cache folder if they are there."""
    file = _file(spec, solver)
    found = _read(file)
    if found is None:
        found = find(spec, solver)
        store({file: json.dumps({"spec": str(spec), "ranges": found}).encode()})
    return found


def _file(spec: KernelSpec, solver: Solver) -> Path:
    """Return the file in the cache folder that stores the ranges for a spec."""
    estimates = b"".join(Path(file).read_bytes() for file in (*solver.sources, __file__))
    gpu = replace(spec.gpu, name="")  # data sheet and driver give it different names
    sizes = spec.direction, spec.cell.key, spec.heads, spec.head_dim, spec.dtype, gpu, spec.variant.tf32, spec.steps
    identity = repr(sizes).encode() + estimates
    return cache_folder() / f"buckets-{hashlib.sha256(identity).hexdigest()[:32]}.json"


def _read(file: Path) -> Ranges | None:
    """Return the ranges stored in a file; None if it is missing or invalid."""
    try:
        found = tuple((first, (batch, any_)) for first, (batch, any_) in json.loads(file.read_text())["ranges"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    batches = [number for first, (batch, _) in found for number in (first, batch)]
    valid = all(type(number) is int and 1 <= number <= LARGEST for number in batches)
    valid = valid and all(type(any_) is bool for _, (_, any_) in found)
    firsts = [first for first, _ in found] if valid else []
    return found if firsts[:1] == [1] and firsts == sorted(firsts) else None


def find(spec: KernelSpec, solver: Solver) -> Ranges:
    """Return the ranges for a spec; its batch size is ignored."""
    cycles = _estimates(spec, solver, any_sequences=False)
    slowest, taken = _best_few(_slowdowns(cycles))
    if slowest > SLOWEST:
        cycles |= _estimates(spec, solver, any_sequences=True)
        slowdowns = _slowdowns(cycles)
        slowest, taken = _best_few(slowdowns)
        taken = _with_smaller_sum(taken, slowdowns, slowest + _MORE)
    serving = [min(taken, key=lambda one: cycles[one][i]) for i in range(len(_JUDGED))]
    starts = [1, *(before + 1 for before in _JUDGED[:-1])]
    return tuple((starts[i], one) for i, one in enumerate(serving) if i == 0 or one != serving[i - 1])


def _estimates(spec: KernelSpec, solver: Solver, any_sequences: bool) -> dict[Kernel, tuple[float, ...]]:
    """Return, for each kernel that is the best for some batch size, its estimates for all _JUDGED batch sizes."""
    tilings: dict[Hashable, Kernel] = {}
    for batch in _SOLVED:
        kernel = batch, any_sequences
        tilings.setdefault(solver.best(_spec_for(spec, kernel)), kernel)
    found: dict[tuple[float, ...], Kernel] = {}  # tilings of the same kernel have equal estimates
    for tiling, kernel in tilings.items():
        found.setdefault(tuple(solver.cycles(replace(spec, batch=batch), tiling) for batch in _JUDGED), kernel)
    return {kernel: estimates for estimates, kernel in found.items()}


def _slowdowns(cycles: dict[Kernel, tuple[float, ...]]) -> dict[Kernel, list[float]]:
    """Return each kernel's estimated slowdowns over the fastest kernel, at all batch sizes."""
    fastest = [min(column) for column in zip(*cycles.values(), strict=True)]
    return {one: [a / b for a, b in zip(row, fastest, strict=True)] for one, row in cycles.items()}


def _best_few(slowdowns: dict[Kernel, list[float]]) -> tuple[float, list[Kernel]]:
    """Return the smallest slowdown that at most FEW kernels can guarantee at every batch size, and these kernels."""

    def within(slowest: float) -> list[Kernel] | None:
        """Return at most FEW kernels that together are within `slowest` at every batch size; None if there are none."""
        serves = {one: sum(1 << i for i, by in enumerate(row) if by <= slowest) for one, row in slowdowns.items()}
        return _cover(serves, (1 << len(_JUDGED)) - 1, FEW)

    allowed = sorted({by for row in slowdowns.values() for by in row})
    slowest = allowed[bisect_left(allowed, True, key=lambda slowest: within(slowest) is not None)]
    return slowest, within(slowest)


def _with_smaller_sum(taken: list[Kernel], slowdowns: dict[Kernel, list[float]], slowest: float) -> list[Kernel]:
    """Exchange one kernel at a time while the sum of all slowdowns falls and none exceeds `slowest`."""

    def total(kernels: list[Kernel]) -> float:
        served = [min(column) for column in zip(*(slowdowns[one] for one in kernels), strict=True)]
        return sum(served) if max(served) <= slowest else inf

    while True:
        others = [[*taken[:i], one, *taken[i + 1 :]] for i in range(len(taken)) for one in slowdowns]
        best = min(others, key=total)
        if total(best) >= total(taken):
            return taken
        taken = best


def _cover(serves: dict[Kernel, int], missing: int, most: int) -> list[Kernel] | None:
    """Return at most `most` kernels that together serve all bits of `missing` (batch sizes); None if there are none."""
    if not missing:
        return []
    if not most:
        return None
    sizes = (i for i in range(missing.bit_length()) if missing >> i & 1)
    rarest = min(([one for one, bits in serves.items() if bits >> i & 1] for i in sizes), key=len)
    for one in sorted(rarest, key=lambda one: -(serves[one] & missing).bit_count()):
        rest = _cover(serves, missing & ~serves[one], most - 1)
        if rest is not None:
            return [one, *rest]
    return None
