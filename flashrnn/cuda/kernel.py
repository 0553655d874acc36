"""From a problem to its compiled kernel: tilings are compiled, the best first, until one hardly spills."""

import logging
from dataclasses import replace

import torch

from flashrnn.cells import Cell
from flashrnn.cuda import tiling
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.source import Tiling, Variant, prelude
from flashrnn.cuda.tuned import Sizes, kept
from flashrnn.gpu import Gpu

logger = logging.getLogger("flashrnn")

_ATTEMPTS = 6  # tilings that are compiled before the one of them that spills least is taken
SPILLED = 104  # bytes of a thread's registers that may be put aside while R is loaded, before the time loop


def compile_best(
    direction: str, cell: Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, variant: Variant, gpu: Gpu
) -> tuple[Binary, Tiling]:
    """The kernel of that direction ("forward" or "backward") and its tiling; needs no GPU.

    The tiling that `python -m flashrnn tune` has kept for these sizes, or else the best by estimate.
    """
    sizes = Sizes(cell, heads, head_dim, batch, dtype, gpu, variant.tf32)
    tuned = kept(direction, sizes)
    if tuned is not None:
        return compile_tiling(direction, cell, heads, head_dim, dtype, variant, gpu, tuned), tuned
    tried: list[tuple[Binary, Tiling]] = []
    for choice in tiling.tilings(direction, *sizes):
        if any(_needs_as_many_registers(choice, other) for _, other in tried):
            continue
        tried.append((compile_tiling(direction, cell, heads, head_dim, dtype, variant, gpu, choice), choice))
        if tried[-1][0].spilled <= SPILLED or len(tried) == _ATTEMPTS:
            break
    binary, choice = min(tried, key=lambda candidate: candidate[0].spilled)
    logger.info("%s of %s %d x %d: %s, compiled %d", direction, cell.name, heads, head_dim, choice, len(tried))
    return binary, choice


def compile_tiling(
    direction: str,
    cell: Cell,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    variant: Variant,
    gpu: Gpu,
    choice: Tiling,
) -> Binary:
    """The kernel with this very tiling."""
    shared_bytes = tiling.shared_bytes(direction, cell, dtype, choice, variant.tf32)
    source = prelude(cell, heads, head_dim, dtype, choice, variant, shared_bytes)
    return build(source, f"{direction}.cuh", f"flashrnn_{direction}", gpu.arch)


def _needs_as_many_registers(choice: Tiling, other: Tiling) -> bool:
    """Whether it only loads ahead otherwise, or keeps more of R in registers."""
    same_layout = replace(choice, stages=other.stages, register_fragments=other.register_fragments) == other
    return same_layout and choice.register_fragments >= other.register_fragments
