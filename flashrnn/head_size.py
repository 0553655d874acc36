"""Tensors of heads with another head size."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn._torch_private import autograd_alone
from flashrnn.cuda.resize_rows import resize_rows
from flashrnn.memory_format import is_time_major
from flashrnn.problem import PLAIN, KernelUnavailable


def with_head_size(x: Tensor, size: int) -> Tensor:
    """Return x [B, T, ..., D] as [B, T, ..., size], cut off or padded with zeros.

    The result is dense, in the memory format of x.
    """
    if is_time_major(x):
        return with_head_size(x.transpose(0, 1), size).transpose(0, 1)
    if x.is_cuda and x.dtype.itemsize <= 4 and type(x) in PLAIN and autograd_alone():
        try:
            return _Resized.apply(x, size)
        except KernelUnavailable:  # those of the recurrence will say the same
            pass
    return pad(x, (0, size - x.shape[-1]))


class _Resized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = x.shape[-1]
        return resize_rows(x.contiguous(), size)

    @staticmethod
    def backward(ctx, d):
        return with_head_size(d, ctx.size), None
