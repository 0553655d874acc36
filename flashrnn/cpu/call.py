"""Calls of compiled kernels, whose arguments are one array of integers and addresses.

What depends only on the sizes of a call is prepared once. A call copies the array and fills in its addresses.
"""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from ctypes import memset
from functools import cache, lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cells.gates import class_indices, recurrent_only
from flashrnn.cpu import build, threads
from flashrnn.problem import state_dtype

_WIDE = 128  # head size from which the matrices do not stay in the L1 cache between the steps of one sequence
_SMALL = 2**19  # multiplications: one thread computes a smaller call before a second one has started


LARGEST_IN_LOOP = 192  # head size; d_R of larger heads does not stay in the caches, and is a product after the loop
_MOST_FEATURES = 512  # input features of a layer up to which the kernel computes the input product


class Sizes(NamedTuple):
    """What determines the kernel of a call and its number of threads."""

    direction: str
    cell: Cell
    batch: int
    steps: int
    heads: int
    head_dim: int
    time_major: bool
    dtype: torch.dtype  # the dtype of h; the kernels compute in its state dtype
    threads: int  # available threads
    features: int = 0  # input features of a layer of one head whose input product the kernel computes, otherwise 0

    @property
    def by_rows(self) -> bool:
        """Whether kernels/rows.py computes the products.

        It does for large heads, and if the copy of R that kernels/product.py needs would take longer than it saves.
        This does not depend on the number of steps beyond one, so that a sequence that is cut has the same bits.
        """
        few = self.steps == 1 or (self.batch == 1 and self.head_dim >= _WIDE)
        return build.is_large(self.head_dim) or (self.direction == "forward" and few)


def with_product(sizes: Sizes, features: int) -> Sizes:
    """Return the sizes of a layer's call, with `features` if the kernel computes the input product too.

    It does if the matrices fit the caches. The inputs of the gates are then used from the caches and never stored. In
    half types it does not, because the inputs of the gates are rounded.
    """
    fits = sizes.heads == 1 and sizes.head_dim <= LARGEST_IN_LOOP and features <= _MOST_FEATURES
    return sizes._replace(features=features) if fits and sizes.dtype == state_dtype(sizes.dtype) else sizes


class Prepared(NamedTuple):
    """What calls with the same sizes share."""

    sizes: Sizes
    kernel: build.Part
    words: array
    field: dict[str, int]  # the index of an argument in `words`
    threads: int  # used threads
    parts: int  # number of parts of the batch
    width: int  # see `build.Tile`
    by_rows: bool  # see `Sizes`
    buffers: int  # elements of the workspaces of all threads
    tensors: tuple[Tensor, ...]  # tensors whose addresses are in `words`

    def run(self, **arguments: Tensor | Sequence[Tensor | None] | None) -> None:
        """Run the kernel.

        Arguments have the names of the kernels' fields; a sequence of tensors becomes an array of their addresses, in
        which 0 stands for None.
        """
        words, arrays = self.words[:], []
        workspace = self._workspace()
        words[self.field["workspace"]] = workspace.data_ptr()
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                words[self.field[name]] = value.data_ptr()
            elif value is not None:
                arrays.append(addresses := array("q", [0 if x is None else x.data_ptr() for x in value]))
                words[self.field[name]] = addresses.buffer_info()[0]
        threads.run(self.kernel.address, threads.Data(words, (workspace, arguments, arrays)), self.threads)
        if self.sizes.steps == 1:
            _spare(self.buffers, state_dtype(self.sizes.dtype)).append(workspace)

    def _workspace(self) -> Tensor:
        """Return the memory that the threads work on.

        Threads clear their part themselves, because PyTorch would use its own threads, for which a forked process waits
        for ever. A single step does not clear it: it takes the memory of an earlier step, or zeros.
        """
        dtype = state_dtype(self.sizes.dtype)
        if self.sizes.steps == 1:
            with suppress(IndexError):  # `pop` is atomic, so no two threads get the same memory
                return _spare(self.buffers, dtype).pop()
        workspace = torch.empty(self.buffers, dtype=dtype, device="cpu")
        if self.sizes.steps == 1:
            memset(workspace.data_ptr(), 0, workspace.nbytes)
        return workspace


@cache
def _spare(numbers: int, dtype: torch.dtype) -> list[Tensor]:
    return []


@lru_cache(maxsize=1024)
def prepare(sizes: Sizes) -> Prepared:
    """Return what calls with these sizes share. Raises KernelUnavailable."""
    direction, cell, B, T, N, D, time_major, dtype, _, features = sizes
    tile, (parts, part) = build.tile(D), _parts(sizes)
    real = state_dtype(dtype)
    kernel = build.time_loop(direction, real)
    product = build.row_product_of(real) if sizes.by_rows else build.matrix_product(tile.width, real)
    alone = recurrent_only(cell)
    tensors = [
        torch.tensor(class_indices(cell.gates, gates)) for gates in (cell.input_gates, cell.recurrent_gates, alone)
    ]
    step = build.cell_step(direction, cell, D, dtype)
    arrays = len(cell.gates) + len(cell.states) * (1 if direction == "forward" else 2)
    source_width = build.whole_vectors(features)
    buffers = arrays * tile.stride + max(step.scratch, tile.chunk * source_width)
    values = {
        "tasks": parts * N,
        "part": part,
        "workspace_size": buffers,
        "clear": T > 1,
        **dict(zip(("batch", "steps", "heads", "D"), (B, T, N, D), strict=True)),
        **dict(zip(("batch_stride", "time_stride"), (1, B) if time_major else (T, 1), strict=True)),
        **tile._replace(row=D if sizes.by_rows else tile.row)._asdict(),
        "step": tile.width if sizes.by_rows else 1,
        "features": features,
        "source_width": source_width,
        "multiply_source": build.matrix_product(source_width, real).address if features else 0,
        "gates": len(cell.gates),
        "states": len(cell.states),
        "inputs": len(cell.input_gates),
        "matrices": len(cell.recurrent_gates),
        "alone": len(alone),
        **dict(zip(("input_of", "recurrent_of", "alone_of"), (x.data_ptr() for x in tensors), strict=True)),
        "multiply": product.address,
        "cell": step.part.address,
    }
    fields = kernel.module.FIELDS
    words = array("q", [values.get(name, 0) for name in fields])
    busy = 1 if _is_small(sizes) else min(parts * N, sizes.threads)
    field = {name: k for k, name in enumerate(fields)}
    return Prepared(sizes, kernel, words, field, busy, parts, tile.width, sizes.by_rows, busy * buffers, tuple(tensors))


def _is_small(sizes: Sizes) -> bool:
    cell, D = sizes.cell, sizes.head_dim
    of_row = D * (len(cell.recurrent_gates) * sizes.heads * D + len(cell.input_gates) * sizes.features)
    return sizes.batch * sizes.steps * of_row < _SMALL


def _parts(sizes: Sizes) -> tuple[int, int]:
    """Return into how many parts the batch is divided, and the number of sequences in each part but the last.

    The parts of all heads keep all threads busy.
    """
    if _is_small(sizes):
        return 1, sizes.batch
    size = -(-sizes.batch // (sizes.threads // gcd(sizes.heads, sizes.threads)))
    size += -size % (4 if sizes.by_rows else 2)  # sequences that a product computes at once
    return -(-sizes.batch // size), size
