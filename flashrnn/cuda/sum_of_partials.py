"""Sums of the partial sums of several blocks: one small launch, where PyTorch's sum and cast would be two."""

from functools import cache

import torch
from torch import Tensor

from flashrnn.cuda import parameters
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import declaration
from flashrnn.cuda.source import definitions
from flashrnn.gpu import Gpu, device_gpu

THREADS = 128


def sum_of_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the first axis of `partial`, float32 and contiguous, an even number of sums, in `dtype`."""
    if partial.shape[0] == 1 and partial.dtype == dtype:
        return partial[0]
    total = partial.new_empty(partial.shape[1:], dtype=dtype)
    pairs = total.numel() // 2
    arguments = {"partial": partial, "total": total, "partials": partial.shape[0], "pairs": pairs}
    _kernel(dtype, partial.device.index).launch(-(-pairs // THREADS), arguments)
    return total


@cache
def _kernel(dtype: torch.dtype, device: int) -> LoadedKernel:
    binary = compile_kernel(dtype, device_gpu(device))
    return load(binary, parameters.sum_of_partials(dtype), device, THREADS, 0, 1, False)


def compile_kernel(dtype: torch.dtype, gpu: Gpu) -> Binary:
    """Return the kernel; this needs no GPU."""
    return build(prelude(dtype), "kernels/sum_of_partials.cuh", "flashrnn_sum_of_partials", gpu.arch)


def prelude(dtype: torch.dtype) -> str:
    """Return the source before the header."""
    return "\n".join((definitions(dtype, {"SUM_THREADS": THREADS}, {}), declaration(parameters.sum_of_partials(dtype))))
