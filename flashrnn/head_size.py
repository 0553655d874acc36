"""Padding and truncation of heads to another head size."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn._torch_private import autograd_alone
from flashrnn.cuda.resize_rows import resize_rows
from flashrnn.memory_format import is_time_major
from flashrnn.problem import PLAIN, KernelUnavailable


def with_head_size(tensors: Sequence[Tensor | None], size: int, matrices: int | None = None) -> list[Tensor | None]:
    """Return each tensor [..., D] as [..., size], truncated or padded with zeros; None stays None.

    The results are dense; that of a tensor [B, T, ...] has its memory format. `matrices` is the index of recurrent
    matrices [..., D, D], which become [..., size, size].
    """
    given = [(x, 2 if i == matrices else 1) for i, x in enumerate(tensors) if x is not None]
    resized = iter(_resized([x for x, _ in given], size, [axes for _, axes in given]))
    return [None if x is None else next(resized) for x in tensors]


def _resized(tensors: list[Tensor], size: int, axes: list[int]) -> Sequence[Tensor]:
    if autograd_alone() and all(x.is_cuda and x.element_size() % 2 == 0 and type(x) in PLAIN for x in tensors):
        try:
            return _Resized.apply(size, axes, *tensors)
        except KernelUnavailable:  # the kernels of the recurrence will report the same error
            pass
    return _in_memory_order(partial(_padded, size, axes), tensors)


def _padded(size: int, axes: list[int], tensors: list[Tensor]) -> list[Tensor]:
    return [pad(x, (0, size - x.shape[-1]) * count) for x, count in zip(tensors, axes, strict=True)]


def _by_kernel(size: int, axes: list[int], tensors: list[Tensor]) -> list[Tensor]:
    return resize_rows([x.contiguous() for x in tensors], size, axes)


class _Resized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, size, axes, *tensors):
        ctx.size, ctx.matrices = tensors[0].shape[-1], axes.index(2) if 2 in axes else None
        ctx.set_materialize_grads(False)
        return tuple(_in_memory_order(partial(_by_kernel, size, axes), tensors))

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *with_head_size(gradients, ctx.size, ctx.matrices)


def _in_memory_order(run: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call `run` with the first two axes of time-major tensors swapped, and swap those of its results back."""
    swapped = [is_time_major(x) for x in tensors]
    found = run([x.transpose(0, 1) if swap else x for x, swap in zip(tensors, swapped, strict=True)])
    return [x.transpose(0, 1) if swap else x for x, swap in zip(found, swapped, strict=True)]
