"""The largest heads whose recurrent matrix fits on the chip (`cuda_fused`), from the solver that chooses tilings."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from flashrnn.cells import Cell, get_cell, registered_cells
from flashrnn.cells.trace import untraceable
from flashrnn.cuda.resident import solver
from flashrnn.cuda.spec import KernelSpec
from flashrnn.gpu import NAMED, Gpu, nvidia_gpu
from flashrnn.problem import dtype_name

STEP = 16  # units of a tile: a head between two multiples fits if the larger multiple does
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NOTE = """\
Larger heads run on backend cuda, which reads R at every step and has a size limit only for cells that reduce over the
units of a head, as layernorm_gru does. Beyond it, they run on backend vanilla, a loop in PyTorch. For an LSTM on an
H100, the paper reports 2688 units (arXiv 2412.07752, appendix H.1). Here the limit is lower, because a block owns whole
tiles of 16 units: two tiles do not fit into a block, and one on each of 132 multiprocessors is at most 2112 units.
"""
"""The text below the table."""


@dataclass(frozen=True)
class Limit:
    """The largest head sizes of a cell on a GPU; 0 if none fits."""

    gpu: str
    cell: str
    dtype: str
    inference: int
    training: int


def known_gpus() -> list[Gpu]:
    """Return the GPUs of this machine, and those known by name."""
    here = [nvidia_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return list(dict.fromkeys([*filter(None, here), *NAMED.values()]))


def limits(gpu: Gpu) -> Iterator[Limit]:
    """Yield the limits of every registered cell that the fused kernels support, in each of their dtypes."""
    cells = [cell for cell in registered_cells() if untraceable(get_cell(cell)) is None]
    return (limit(cell, dtype, gpu) for cell in cells for dtype in DTYPES)


def limit(cell: str, dtype: torch.dtype, gpu: Gpu) -> Limit:
    """Return the largest heads of a registered cell."""
    forward, backward = (largest_head(way, get_cell(cell), dtype, gpu) for way in ("forward", "backward"))
    return Limit(gpu.name, cell, dtype_name(dtype), forward, min(forward, backward))


@cache
def largest_head(direction: str, cell: Cell, dtype: torch.dtype, gpu: Gpu) -> int:
    """Return the largest head size that fits, a multiple of 16, found by bisection.

    There are no gaps: if a head fits, the next smaller multiple fits with the same tiling or one with fewer blocks.
    """
    chip = gpu.multiprocessors * (4 * gpu.registers + gpu.shared_per_block)
    bound = math.isqrt(chip // (len(cell.recurrent_gates) * dtype.itemsize))
    sizes = range(STEP, bound + 1, STEP)

    def too_large(size: int) -> bool:
        return solver.infeasible(KernelSpec(direction, cell, 1, size, 1, dtype, gpu)) is not None

    return STEP * bisect_left(sizes, True, key=too_large)


def table(rows: Iterable[Limit]) -> list[list[str]]:
    """Return a row for every GPU and cell, with two columns for every dtype; the header comes first."""
    columns: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        columns.setdefault((row.gpu, row.cell), []).extend((str(row.inference), str(row.training)))
    uses = [f"{dtype_name(dtype)} {use}" for dtype in DTYPES for use in ("inference", "training")]
    return [["GPU", "cell", *uses], *([*names, *sizes] for names, sizes in columns.items())]
