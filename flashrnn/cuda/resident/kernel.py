"""From a spec to a compiled kernel: tilings are compiled in the order of their estimates until one spills little."""

import logging
from dataclasses import replace
from functools import cache

from flashrnn.cuda.buckets import bucket
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.resident import solver, tiling
from flashrnn.cuda.resident.source import prelude
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.resident.tuned import saved_tiling
from flashrnn.cuda.spec import KernelSpec

logger = logging.getLogger("flashrnn")

_ATTEMPTS = 6  # tilings to compile before the one that spills least is used
SPILLED = 168  # bytes per thread that may spill: so few spill before the time loop, more might in it


def compile_best(spec: KernelSpec) -> tuple[Binary, Tiling]:
    """Return the fused kernel and its tiling. This needs no GPU.

    The tiling is the one that `python -m flashrnn tune` has saved for this batch size, or else that of its bucket.
    """
    tuned = saved_tiling(spec)
    if tuned is not None:
        return compile_tiling(spec, tuned), tuned
    binary, choice = _compile_bucket(bucket(spec, solver.SOLVER))
    return binary, solver.for_batch(spec, choice)


@cache
def _compile_bucket(spec: KernelSpec) -> tuple[Binary, Tiling]:
    """Return the best kernel by estimate, with so much less of R in registers that it spills little or, after
    _ATTEMPTS, the one of these that spills least."""
    tried: list[tuple[Binary, Tiling]] = []
    for choice in solver.tilings(spec):
        if tried and not _has_less_in_registers(choice, tried[-1][1]):
            continue
        tried.append((compile_tiling(spec, choice), choice))
        in_loop = 4 * tiling.spillable(spec, choice.grid)
        if tried[-1][0].spilled <= SPILLED + in_loop or len(tried) == _ATTEMPTS:
            break
    binary, choice = min(tried, key=lambda candidate: candidate[0].spilled)
    logger.info("%s: %s, compiled %d", spec, choice, len(tried))
    return binary, choice


def compile_tiling(spec: KernelSpec, choice: Tiling) -> Binary:
    """Return the kernel with this tiling."""
    source = prelude(spec, choice, tiling.shared_bytes(spec, choice))
    header, entry = f"resident/kernels/{spec.direction}.cuh", f"flashrnn_{spec.direction}"
    return build(source, header, entry, spec.gpu.arch, str(spec))


def _has_less_in_registers(choice: Tiling, other: Tiling) -> bool:
    """Return whether `choice` differs from `other` only in its stages and in having less of R in registers."""
    same = replace(choice, stages=other.stages, register_fragments=other.register_fragments) == other
    return same and choice.register_fragments < other.register_fragments
