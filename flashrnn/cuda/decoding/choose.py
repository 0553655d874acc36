"""A kernel that selects the next token of each sequence from its logits: the largest, or a random one."""

from functools import cache

import torch

from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import Launch, load
from flashrnn.cuda.parameters import Parameter, Parameters, declaration
from flashrnn.cuda.source import definitions
from flashrnn.gpu import device_gpu

RANKS, WARPS = 8, 16  # blocks of a cluster, and warps of a block
_ELEMENTS = (16, 32, 64)  # classes per thread
MOST_CLASSES = _ELEMENTS[-1] * RANKS * WARPS * 32


def parameters(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/choose.cuh."""
    return (
        Parameter("logits", "const scalar* __restrict__", dtype),
        Parameter("stride", "i64"),
        Parameter("C", "i64"),
        Parameter("seen", "bool*", torch.bool),
        Parameter("keys", "u32*", torch.int32),
        Parameter("settings", "const float* __restrict__", torch.float32, (4,)),
        Parameter("top_k", "i64"),
        Parameter("chosen", "i64*", torch.int64),
        Parameter("history", "i64*", torch.int64),
        Parameter("cursor", "i64*", torch.int64),
        Parameter("counter", "u32*", torch.int32, (1,)),
    )


@cache
def load_choose(classes: int, dtype: torch.dtype, device: int) -> Launch:
    """Return the launcher of the kernel on a GPU. It launches one cluster per sequence."""
    elements = elements_for(classes)
    binary = compile_choose(elements, dtype, device_gpu(device).arch)
    return load(binary, parameters(dtype), device, 32 * WARPS, shared_bytes(), RANKS, False).launch


def shared_bytes() -> int:
    """Return the size in bytes of `Shared` in kernels/choose.cuh."""
    return 16 * (WARPS + 2)


def elements_for(classes: int) -> int:
    """Return how many classes each thread must hold. `classes` is at most MOST_CLASSES."""
    return next(number for number in _ELEMENTS if number * RANKS * WARPS * 32 >= classes)


@cache
def compile_choose(elements: int, dtype: torch.dtype, arch: str) -> Binary:
    """Return the kernel compiled for an architecture."""
    made_for = f"{elements} classes of a thread, {dtype}"
    return build(prelude(elements, dtype), "decoding/kernels/choose.cuh", "flashrnn_choose", arch, made_for)


def prelude(elements: int, dtype: torch.dtype) -> str:
    """Return the printed source before kernels/choose.cuh."""
    constants = {"ELEMENTS": elements, "RANKS": RANKS, "WARPS": WARPS, "SHARED_BYTES_EXPECTED": shared_bytes()}
    constants["MANTISSA_BITS"] = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    return "\n".join((definitions(dtype, constants, {}), declaration(parameters(dtype))))
