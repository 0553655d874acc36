"""A kernel for the operations of the residual stream between matrix products: addition and norms."""

from functools import cache

import torch

from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import Launch, load
from flashrnn.cuda.parameters import Parameter, Parameters, declaration
from flashrnn.cuda.source import definitions
from flashrnn.gpu import device_gpu

WARPS = 8  # of a block; each computes one row


def parameters(dtype: torch.dtype, width: int) -> Parameters:
    """Return the parameters of kernels/add_norm.cuh."""
    weight = "const scalar* __restrict__"
    return (
        Parameter("x", "scalar* __restrict__", dtype, ("M", width)),
        Parameter("update", weight, dtype, ("M", width)),
        Parameter("head_weight", weight, dtype, (width,)),
        Parameter("weight", weight, dtype, (width,)),
        Parameter("normalized", "scalar* __restrict__", dtype, ("M", width)),
        Parameter("M", "i64"),
    )


@cache
def load_add_norm(heads: int, head_dim: int, dtype: torch.dtype, device: int) -> Launch:
    """Return the launcher of the kernel on a GPU."""
    binary = compile_add_norm(heads, head_dim, dtype, device_gpu(device).arch)
    return load(binary, parameters(dtype, heads * head_dim), device, 32 * WARPS, 0, 1, False).launch


def compile_add_norm(heads: int, head_dim: int, dtype: torch.dtype, arch: str) -> Binary:
    """Return the kernel compiled for an architecture."""
    source, made_for = prelude(heads, head_dim, dtype), f"rows of {heads} x {head_dim}, {dtype}"
    return build(source, "decoding/kernels/add_norm.cuh", "flashrnn_add_norm", arch, made_for)


def prelude(heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """Return the printed source before kernels/add_norm.cuh."""
    constants = {"HEADS": heads, "D": head_dim, "WARPS": WARPS}
    return "\n".join((definitions(dtype, constants, {}), declaration(parameters(dtype, heads * head_dim))))
