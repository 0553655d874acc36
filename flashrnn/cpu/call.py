"""Calls of compiled kernels, whose arguments are one array of numbers and addresses.

Whatever follows from the sizes of a call is prepared once; a call copies it and adds its addresses.
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
from flashrnn.cpu import build, threads
from flashrnn.problem import state_dtype
from flashrnn.products import places, recurrent_only

_WIDE = 128  # units of a head, whose matrices leave the first cache between the steps of one sequence
_SMALL = 2**19  # multiplications of a call that one thread has done before another one has begun


LARGEST_IN_LOOP = 192  # head size; of larger ones d_R, which leaves the caches between steps, is a product after them
_MOST_FEATURES = 512  # of the input of a layer whose input product the kernel computes


class Sizes(NamedTuple):
    """All that decides which kernel runs, and on how many threads."""

    direction: str
    cell: Cell
    batch: int
    steps: int
    heads: int
    head_dim: int
    time_major: bool
    dtype: torch.dtype  # that h has; the kernels compute in its state dtype
    threads: int  # that there are
    features: int = 0  # of the layer's input, if the kernel computes the input product of a layer of one head

    @property
    def by_rows(self) -> bool:
        """Whether products are those of kernels/rows.py: of large heads, and where the other would gain less than the
        copy of R takes that it needs. Of more steps than one their number does not matter, so that sequences can be
        cut anywhere without a change in any bit."""
        few = self.steps == 1 or (self.batch == 1 and self.head_dim >= _WIDE)
        return build.is_large(self.head_dim) or (self.direction == "forward" and few)


def with_product(sizes: Sizes, features: int) -> Sizes:
    """Return the sizes of a layer's sequences: with the features of its input if the kernel computes its product too.

    It does where matrices fit the caches: steps then find the inputs of their gates there, which are never stored.
    """
    fits = sizes.heads == 1 and sizes.head_dim <= LARGEST_IN_LOOP and features <= _MOST_FEATURES
    return sizes._replace(features=features) if fits else sizes


class Prepared(NamedTuple):
    """What calls of the same sizes share."""

    sizes: Sizes
    kernel: build.Part
    words: array
    field: dict[str, int]  # where an argument stands among the words
    threads: int  # that take part
    parts: int  # of the batch
    width: int  # of the sums over rows, see `build.Tile`
    by_rows: bool  # see `Sizes`
    buffers: int  # numbers that they work on
    tensors: tuple[Tensor, ...]  # which words point to

    def run(self, **arguments: Tensor | Sequence[Tensor | None] | None) -> None:
        """Run with these arguments, by their names in the kernels; several tensors are an array of their addresses."""
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
        """Return numbers that threads set to zero themselves; for a single step, what another one has left, or zeros.

        PyTorch does not fill them, because a forked process would wait for its threads.
        """
        dtype = state_dtype(self.sizes.dtype)
        if self.sizes.steps == 1:
            with suppress(IndexError):  # no other thread gets the same
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
    """Return what calls of such sizes share; raises KernelUnavailable."""
    direction, cell, B, T, N, D, time_major, dtype, _, features = sizes
    tile, (parts, part) = build.tile(D), _parts(sizes)
    real = state_dtype(dtype)
    kernel = build.time_loop(direction, real)
    product = build.row_product_of(real) if sizes.by_rows else build.matrix_product(tile.width, real)
    alone = recurrent_only(cell)
    tensors = [torch.tensor(places(cell.gates, gates)) for gates in (cell.input_gates, cell.recurrent_gates, alone)]
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
    """Return how the batch is divided so that the heads' parts keep all threads busy: the number of parts, and the
    sequences in each but the last."""
    if _is_small(sizes):
        return 1, sizes.batch
    size = -(-sizes.batch // (sizes.threads // gcd(sizes.heads, sizes.threads)))
    size += -size % (4 if sizes.by_rows else 2)  # sequences that are worked on at once
    return -(-sizes.batch // size), size
