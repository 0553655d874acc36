"""Steps of sequences as the rows of a padded batch, and back: autograd functions of two lists of indices.

source: [T * B], the step of the data for each row of the batch; -1 for padding.
place: [steps], the row of the batch for each step of the data.
"""

from functools import cache

import torch
from torch import Tensor

from flashrnn._torch_private import autograd_alone
from flashrnn.cuda.dtype_kernel import loaded
from flashrnn.cuda.gather_rows import DTYPE, KERNEL, gather_rows, serves
from flashrnn.problem import KernelUnavailable, on_gpu


def _spread(x: Tensor, source: Tensor, place: Tensor, first: bool) -> Tensor:
    """Return the batch [T * B, ...] of the steps x [steps, ...].

    Padding is zeros or, if `first`, copies of the first step.
    """
    if _by_kernel(x, len(source)):
        return gather_rows(x, source, first)
    if first:
        return x.index_select(0, source.clamp(min=0))
    return x.new_zeros(len(source), *x.shape[1:]).index_copy_(0, place, x)


def _gathered(x: Tensor, place: Tensor) -> Tensor:
    """Return the steps [steps, ...] of the batch x [T * B, ...]."""
    return gather_rows(x, place) if _by_kernel(x, len(place)) else x.index_select(0, place)


def _by_kernel(x: Tensor, rows: int) -> bool:
    return on_gpu(x) and autograd_alone() and serves(x, rows) and _has_kernel(x.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    try:
        return loaded(KERNEL, DTYPE, device.index) is not None
    except KernelUnavailable:
        return False


class Spread(torch.autograd.Function):
    """`_spread`, with padding that has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, source, place, first):
        return _spread(x, source, place, first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *indices, ctx.first = inputs
        ctx.save_for_backward(*indices)
        ctx.save_for_forward(*indices)

    @staticmethod
    def backward(ctx, grad):
        return Gather.apply(grad, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _spread(tangent, *ctx.saved_tensors, ctx.first)


class Gather(torch.autograd.Function):
    """`_gathered`. Its gradient is a copy, and not a sum as in PyTorch, because the indices are all different."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, source, place):
        return _gathered(x, place)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        return Spread.apply(grad, *ctx.saved_tensors, False), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _gathered(tangent, ctx.saved_tensors[1])
