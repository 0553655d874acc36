"""From a spec to a compiled kernel: the best tiling by estimate or, if it spills, one that needs fewer registers."""

import logging
from collections.abc import Iterator
from functools import cache
from itertools import islice

from flashrnn.cuda.buckets import bucket
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.resident import solver, tiling
from flashrnn.cuda.resident.source import prelude
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.resident.tuned import saved_tiling
from flashrnn.cuda.spec import KernelSpec

logger = logging.getLogger("flashrnn")

_NEAR = 64  # of the next solutions, among which one with less of R in registers is looked for
_LESS = 2  # attempts with less of R in registers, before other tilings
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
    """Return the first of `_candidates` that spills little or, of the first _ATTEMPTS, the one that spills least."""
    tried: list[tuple[Binary, Tiling]] = []
    for choice in _candidates(spec):
        if any(_needs_as_many_registers(choice, other) for _, other in tried):
            continue
        tried.append((compile_tiling(spec, choice), choice))
        in_loop = 4 * tiling.spillable(spec, choice.grid)
        if tried[-1][0].spilled <= SPILLED + in_loop or len(tried) == _ATTEMPTS:
            break
    binary, choice = min(tried, key=lambda candidate: candidate[0].spilled)
    logger.info("%s: %s, compiled %d", spec, choice, len(tried))
    return binary, choice


def _candidates(spec: KernelSpec) -> Iterator[Tiling]:
    """Yield the best tiling by estimate, the same with a little less of R in registers, and the others."""
    found = solver.tilings(spec)
    best = next(found)
    yield best
    near = list(islice(found, _NEAR))
    alike = {one.register_fragments: one for one in reversed(near) if one.distribution == best.distribution}
    fewer = sorted((fragments for fragments in alike if fragments < best.register_fragments), reverse=True)
    yield from (alike[fragments] for fragments in fewer[:_LESS])
    yield from near
    yield from found


def compile_tiling(spec: KernelSpec, choice: Tiling) -> Binary:
    """Return the kernel with this tiling."""
    source = prelude(spec, choice, tiling.shared_bytes(spec, choice))
    header, entry = f"resident/kernels/{spec.direction}.cuh", f"flashrnn_{spec.direction}"
    return build(source, header, entry, spec.gpu.arch, str(spec))


def _needs_as_many_registers(choice: Tiling, other: Tiling) -> bool:
    """Return whether `choice` differs from `other` only in its stages or in having more of R in registers."""
    return choice.distribution == other.distribution and choice.register_fragments >= other.register_fragments
