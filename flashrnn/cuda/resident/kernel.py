"""From a spec to a compiled kernel: the best tiling by estimate or, if it spills in the time loop, one that needs fewer
registers."""

import logging
from collections.abc import Iterator
from functools import cache
from itertools import chain, islice

from flashrnn.cells.trace import trace
from flashrnn.cuda.buckets import bucket
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.machine_code import spills_between_products
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.resources import shared_bytes, spillable
from flashrnn.cuda.resident.source import prelude
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.resident.tuned import saved_tiling
from flashrnn.cuda.spec import KernelSpec

logger = logging.getLogger("flashrnn")

_NEAR = 64  # of the next solutions, among which those with less of R in registers are looked for
_LESS = 2  # attempts with less of R in registers, before other tilings
_LESS_IN_ALL = 3  # if one of these fits, but spills in the loop
_ATTEMPTS = 6  # tilings to compile before the one that spills least is used
_STAGES = 4  # with fewer, steps wait for their inputs
_FEW = 2  # instructions for spilled registers among the loop's products: reading more of R takes longer
_LITTLE = 64  # bytes per thread
SPILLED = 168  # bytes per thread that may spill, if few instructions of the loop load or store any of it


def compile_best(spec: KernelSpec) -> tuple[Binary, Tiling]:
    """Return the fused kernel and its tiling. This needs no GPU.

    The tiling is the one that `python -m flashrnn tune` has saved for this batch size, or else that of its bucket.
    """
    tuned = saved_tiling(spec)
    if tuned is not None:
        return compile_tiling(spec, tuned), tuned
    binary, choice = _compile_bucket(bucket(spec, solver.SOLVER))
    return binary, solver.for_batch(spec, choice)


_Compiled = tuple[Binary, Tiling]


@cache
def _compile_bucket(spec: KernelSpec) -> _Compiled:
    """Return the best tiling by estimate or, if it spills much or in the time loop, one that spills less."""
    found = solver.tilings(spec)
    best = next(found)
    tried = [(compile_tiling(spec, best), best)]
    if not _fits(spec, tried[0]) or _spills(spec, tried[0])[0] > _FEW:
        _compile_others(spec, tried, found)
    fitting = [one for one in tried if _fits(spec, one)]
    if fitting:
        binary, choice = min(fitting, key=lambda one: _spills(spec, one))
    else:
        binary, choice = min(tried, key=lambda one: one[0].spilled)
    logger.info("%s: %s, compiled %d", spec, choice, len(tried))
    return binary, choice


def _compile_others(spec: KernelSpec, tried: list[_Compiled], found: Iterator[Tiling]) -> None:
    """Add to `tried`, which holds the best tiling by estimate, the same with less of R in registers, until one fits.

    If its loop has more than a few instructions for spilled registers, go on until one spills little. If none fits, add
    tilings of `found` until one does.
    """
    best, near = tried[0][1], list(islice(found, _NEAR))
    alike = {one.register_fragments: one for one in reversed(near) if one.distribution == best.distribution}
    fewer = sorted((fragments for fragments in alike if fragments < best.register_fragments), reverse=True)
    for choice in (alike[fragments] for fragments in fewer[:_LESS_IN_ALL]):
        fitted = any(_fits(spec, one) for one in tried)
        useful = choice.stages >= min(best.stages, _STAGES) if fitted else len(tried) <= _LESS
        if not useful:
            break
        tried.append((compile_tiling(spec, choice), choice))
        in_loop, much = _spills(spec, tried[-1])
        spills_little = not (in_loop or much) if fitted else in_loop <= _FEW
        if spills_little and _fits(spec, tried[-1]):
            return
    for choice in chain(near, found):
        if any(_fits(spec, one) for one in tried) or len(tried) == _ATTEMPTS:
            return
        if not any(_needs_as_many_registers(choice, other) for _, other in tried):
            tried.append((compile_tiling(spec, choice), choice))


def _fits(spec: KernelSpec, one: _Compiled) -> bool:
    binary, choice = one
    return binary.spilled <= SPILLED + 4 * spillable(spec, choice.grid)


def _spills(spec: KernelSpec, one: _Compiled) -> tuple[int, bool]:
    """Return how many instructions among the loop's products access spilled registers, and whether much spills.

    The former is 0 where it was not timed: in float32, and if steps reduce over units.
    """
    binary = one[0]
    timed = binary.spilled and spec.dtype.itemsize == 2 and not trace(spec.cell).reduces
    return sum(spills_between_products(binary.code)) if timed else 0, binary.spilled > _LITTLE


def compile_tiling(spec: KernelSpec, choice: Tiling) -> Binary:
    """Return the kernel with this tiling."""
    source = prelude(spec, choice, shared_bytes(spec, choice))
    header, entry = f"resident/kernels/{spec.direction}.cuh", f"flashrnn_{spec.direction}"
    return build(source, header, entry, spec.gpu.arch, str(spec))


def _needs_as_many_registers(choice: Tiling, other: Tiling) -> bool:
    """Return whether `choice` differs from `other` only in its stages or in having more of R in registers."""
    return choice.distribution == other.distribution and choice.register_fragments >= other.register_fragments
