"""Rows of a tensor made longer or shorter by one launch, which is bound by memory.

PyTorch's `pad` and copies of slices take up to four times as long, because they copy number by number.
"""

from functools import cache

import torch
from torch import Tensor

from flashrnn.cuda import parameters
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import declaration
from flashrnn.cuda.source import definitions
from flashrnn.gpu import Gpu, device_gpu

THREADS = 256


def resize_rows(x: Tensor, size: int) -> Tensor:
    """Return x [..., K], contiguous and of a half type or float32, as [..., size]: cut off, or padded with zeros."""
    resized = x.new_empty(*x.shape[:-1], size)
    if not resized.numel():
        return resized
    vectors = -(-resized.nbytes // 16)
    rows = resized.numel() // size
    arguments = {"x": x, "resized": resized, "rows": rows, "from": x.shape[-1], "to": size}
    _kernel(x.dtype, x.device.index).launch(-(-vectors // THREADS), arguments)
    return resized


@cache
def _kernel(dtype: torch.dtype, device: int) -> LoadedKernel:
    binary = compile_kernel(dtype, device_gpu(device))
    return load(binary, parameters.resize_rows(dtype), device, THREADS, 0, 1, False)


def compile_kernel(dtype: torch.dtype, gpu: Gpu) -> Binary:
    """Return the kernel; this needs no GPU."""
    return build(prelude(dtype), "kernels/resize_rows.cuh", "flashrnn_resize_rows", gpu.arch)


def prelude(dtype: torch.dtype) -> str:
    """Return the source before the header."""
    return "\n".join((definitions(dtype, {"ROW_THREADS": THREADS}, {}), declaration(parameters.resize_rows(dtype))))
