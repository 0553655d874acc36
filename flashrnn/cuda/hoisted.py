"""The part of a cell that `cells.hoisting` moves out of the time loop, computed by a kernel for all time steps at
once."""

from functools import cache

import torch
from torch import Tensor

from flashrnn.cells.gates import class_indices
from flashrnn.cells.hoisting import Hoisted
from flashrnn.cells.printers.cuda import hoisted_function
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import Parameter, Parameters, declaration, numbers
from flashrnn.cuda.source import definitions
from flashrnn.cuda.sum_of_partials import sum_of_partials
from flashrnn.gpu import Gpu, device_gpu
from flashrnn.memory_format import aligned, empty_in_format, in_format

_CELLS, _THREADS = 4, 1024  # units per thread, unless that needs more threads than the second number


def values(parts: Hoisted, Wx: Tensor, b: Tensor, training: bool) -> Tensor:
    """Return the values [B, T, V, N, D] for inputs Wx [B, T, Gi, N, D] and biases b [G, N, D] of the whole cell.

    They have the format of `residual_dtype`: a tensor of dtype bfloat16 holds the bits of float16 numbers. Raises
    KernelUnavailable before any computation; with `training`, also if `gradients` would raise it.
    """
    Wx, (N, D) = aligned(in_format(Wx, Wx)), Wx.shape[3:]
    sizes = parts, N, D, Wx.dtype, b.dtype, Wx.device.index
    if training:
        _kernel("backward", *sizes)
    kernel = _kernel("forward", *sizes)
    found = empty_in_format(Wx, len(parts.values), N, D)
    rows = Wx.shape[0] * Wx.shape[1]
    kernel.launch(_blocks(kernel, rows, N), {"x": Wx, "bias": b.contiguous(), "values": found, "rows": rows})
    return found


def gradients(parts: Hoisted, Wx: Tensor, b: Tensor, d_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of Wx and, in float32, that of the biases of the part's gates [gates, N, D]."""
    Wx, (N, D) = aligned(in_format(Wx, Wx)), Wx.shape[3:]
    d_Wx = empty_in_format(Wx, *Wx.shape[2:])
    kernel = _kernel("backward", parts, N, D, Wx.dtype, b.dtype, Wx.device.index)
    rows = Wx.shape[0] * Wx.shape[1]
    blocks = _blocks(kernel, rows, N)
    d_b = Wx.new_empty(blocks // N, len(parts.gates), N, D, dtype=torch.float32)
    arguments = {
        "x": Wx,
        "bias": b.contiguous(),
        "d_values": aligned(in_format(d_values, Wx)),
        "d_x": d_Wx,
        "d_bias": d_b,
        "rows": rows,
    }
    kernel.launch(blocks, arguments)
    return d_Wx, sum_of_partials(d_b, d_b.dtype)


def _blocks(kernel: LoadedKernel, rows: int, heads: int) -> int:
    """Return the number of blocks for all heads: as many as are co-resident, but at most one per row and head."""
    return heads * min(rows, max(kernel.at_once // heads, 1))


def parameters(
    parts: Hoisted, direction: str, heads: int, head_dim: int, dtype: torch.dtype, bias: torch.dtype
) -> Parameters:
    """Return the parameters of kernels/hoisted.cuh."""
    N, D, Gi, V = heads, head_dim, len(parts.cell.input_gates), len(parts.values)
    given = (
        Parameter("x", "const scalar* __restrict__", dtype, ("rows", Gi, N, D)),
        Parameter("bias", "const bias_number* __restrict__", bias),
    )
    if direction == "forward":
        return (*given, Parameter("values", "scalar* __restrict__", dtype, ("rows", V, N, D)), *numbers("rows"))
    return (
        *given,
        Parameter("d_values", "const scalar* __restrict__", dtype, ("rows", V, N, D)),
        Parameter("d_x", "scalar* __restrict__", dtype, ("rows", Gi, N, D)),
        Parameter("d_bias", "float* __restrict__", torch.float32),
        *numbers("rows"),
    )


@cache
def _kernel(
    direction: str, parts: Hoisted, heads: int, head_dim: int, dtype: torch.dtype, bias: torch.dtype, device: int
) -> LoadedKernel:
    binary = compile_kernel(direction, parts, heads, head_dim, dtype, bias, device_gpu(device))
    taken = parameters(parts, direction, heads, head_dim, dtype, bias)
    return load(binary, taken, device, *block(parts, direction, head_dim), 1, False)


def compile_kernel(
    direction: str, parts: Hoisted, heads: int, head_dim: int, dtype: torch.dtype, bias: torch.dtype, gpu: Gpu
) -> Binary:
    """Return the compiled kernel of a direction, for biases of dtype `bias`. This needs no GPU."""
    source = prelude(parts, direction, heads, head_dim, dtype, bias)
    return build(
        source, "kernels/hoisted.cuh", "flashrnn_hoisted", gpu.arch, f"inputs of {parts.cell.name}, {direction}"
    )


def prelude(parts: Hoisted, direction: str, heads: int, head_dim: int, dtype: torch.dtype, bias: torch.dtype) -> str:
    """Return the printed source before the header."""
    function, vectors = hoisted_function(parts, direction)
    threads, cells = _shape(head_dim)
    constants = {
        "HEADS": heads,
        "D": head_dim,
        "GATES": len(parts.gates),
        "GI": len(parts.cell.input_gates),
        "VALUES": len(parts.values),
        "THREADS": threads,
        "CELLS": cells,
        "EXCHANGED_VECTORS": vectors,
    }
    tables = {
        "INPUT_OF": class_indices(parts.gates, parts.cell.input_gates),
        "BIAS_OF": class_indices(parts.gates, parts.cell.gates),
    }
    return "\n".join(
        [
            definitions(dtype, constants, tables),
            f"#define {direction.upper()}",
            '#include "kernels/math.cuh"',
            f"using bias_number = {'float' if bias == torch.float32 else 'scalar'};",
            function,
            declaration(parameters(parts, direction, heads, head_dim, dtype, bias)),
        ]
    )


def block(parts: Hoisted, direction: str, head_dim: int) -> tuple[int, int]:
    """Return the threads of a block and its bytes of shared memory, which has two buffers of vectors for each warp."""
    threads, _ = _shape(head_dim)
    return threads, 2 * threads // 32 * 16 * hoisted_function(parts, direction)[1]


def _shape(head_dim: int) -> tuple[int, int]:
    """Return the threads of a block and the units per thread."""
    cells = _CELLS
    while head_dim > cells * _THREADS:
        cells *= 2
    return 32 * -(-head_dim // (32 * cells)), cells
