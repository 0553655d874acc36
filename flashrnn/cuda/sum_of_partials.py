"""Sums of the partial sums of several blocks, in one small launch; PyTorch's sum and cast would be two."""

import torch
from torch import Tensor

from flashrnn.cuda.dtype_kernel import DtypeKernel
from flashrnn.cuda.parameters import Parameter, Parameters, numbers


def parameters(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/sum_of_partials.cuh."""
    return (
        Parameter("partial", "const float2* __restrict__", torch.float32, ("partials", "pairs", 2)),
        Parameter("total", "Pair* __restrict__", dtype, ("pairs", 2)),
        *numbers("partials", "pairs"),
    )


KERNEL = DtypeKernel("sum_of_partials", 128, parameters)


def sum_of_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the first axis of `partial`, rounded to `dtype`.

    `partial` is contiguous float32; the number of sums is even.
    """
    if partial.shape[0] == 1 and partial.dtype == dtype:
        return partial[0]
    total = partial.new_empty(partial.shape[1:], dtype=dtype)
    pairs = total.numel() // 2
    arguments = {"partial": partial, "total": total, "partials": partial.shape[0], "pairs": pairs}
    KERNEL.launch(pairs, arguments, dtype, partial.device.index)
    return total
