"""Padding and truncation of several tensors along their last axes, in one launch that is bound by memory bandwidth.

PyTorch's `pad` and copies of slices take one or two launches per tensor, and up to four times as long for a large one,
because they copy element by element.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.dtype_kernel import DtypeKernel
from flashrnn.cuda.parameters import Parameter, Parameters, numbers

_THREADS = 256  # of a block
_MOST_THREADS = 2**17  # for groups of rows: about as many as are co-resident on a GPU
_IN_VECTOR = 8  # 16-bit elements in a vector of 16 bytes
_TENSORS = 4  # per launch


def parameters(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/resize_rows.cuh."""
    pointers = "const u16* __restrict__", "u16* __restrict__"
    found = []
    for i in range(_TENSORS):
        x, resized, *sizes = _names(i)
        found += [Parameter(name, kind) for name, kind in zip((x, resized), pointers, strict=True)]
        found += numbers(*sizes)
    return tuple(found)


def _names(i: int) -> tuple[str, ...]:
    """Return the names of the parameters for tensor i, in the order of `Resize` in the header."""
    names = "x", "resized", "rows", "from", "to", "of_x", "of_resized", "groups", "at_once", "blocks"
    return tuple(f"{name}_{i}" for name in names)


KERNEL = DtypeKernel("resize_rows", _THREADS, parameters, dependent=True)
DTYPE = torch.bfloat16  # for tensors of any dtype: the kernel copies units of 16 bits


def resize_rows(tensors: Sequence[Tensor], size: int, axes: Sequence[int]) -> list[Tensor]:
    """Return each contiguous tensor with its last axis, or its last two, truncated or padded with zeros to `size`.

    `axes`: for each tensor 1, or 2 for axes of equal size.
    """
    resized = [x.new_empty(*x.shape[:-count], *(size,) * count) for x, count in zip(tensors, axes, strict=True)]
    jobs = list(zip(tensors, resized, axes, strict=True))
    for first in range(0, len(jobs), _TENSORS):
        some = [(x, out, count) for x, out, count in jobs[first : first + _TENSORS] if out.numel()]
        arguments = {}
        for i in range(_TENSORS):
            arguments |= _arguments(i, *some[i]) if i < len(some) else _no_arguments(i)
        if some:
            blocks = sum(arguments[f"blocks_{i}"] for i in range(_TENSORS))
            KERNEL.launch(blocks * _THREADS, arguments, DTYPE, resized[0].device.index)
    return resized


def _arguments(i: int, x: Tensor, resized: Tensor, axes: int) -> Mapping[str, Argument]:
    """Return the kernel's arguments for one tensor: how its rows are resized, and by which threads."""
    before, after, parts = x.shape[-1], resized.shape[-1], x.element_size() // 2
    rows = resized.numel() // after
    of_matrix = (before, after) if axes == 2 else (rows, rows)
    wide, from_, to = axes == 1 and min(before, after) * parts >= 2 * _IN_VECTOR, before * parts, after * parts
    # Except the last group, because words beyond the end of a row are read.
    groups = max(rows // _IN_VECTOR - 1, 0) if wide else 0
    at_once = min(groups, max(_MOST_THREADS // to, 1))
    elements = rows * to - groups * to * _IN_VECTOR
    blocks = -(-at_once * to // _THREADS) + -(-elements // (_IN_VECTOR * _THREADS))
    values = (x, resized, rows, from_, to, *of_matrix, groups, at_once, blocks)
    return dict(zip(_names(i), values, strict=True))


def _no_arguments(i: int) -> Mapping[str, Argument]:
    return dict(zip(_names(i), (None, None, 0, 1, 1, 1, 1, 0, 0, 0), strict=True))
