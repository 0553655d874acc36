"""The parameters of the streaming kernels."""

import torch

from flashrnn.cells.trace import trace
from flashrnn.cuda.parameters import B, Parameter, Parameters, T, Tensors, counts, numbers
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import head_numbers, residual_dtype


def streaming(spec: KernelSpec) -> Parameters:
    """Return the parameters of {forward,backward}.cuh in streaming/kernels."""
    return _stream_forward(spec) if spec.direction == "forward" else _stream_backward(spec)


def _stream_forward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, _, _), N, D = Tensors(spec), counts(spec), spec.heads, spec.head_dim
    return (
        tensors.reads("x", "scalar", B, T, GI, N, D),
        Parameter("R", "const uint4* __restrict__", spec.dtype),
        tensors.reads("bias", "float", G, N, D),
        tensors.reads("reset", "unsigned char", B, T),
        tensors.shares("exchange", "scalar"),
        Parameter("counters", "u32*", torch.int32),
        tensors.writes("h", "scalar", B, T, N, D),
        tensors.writes("aux", "aux_number", S - 1, B, T, N, D),
        tensors.writes("state", "float", S, B, N, D),
        *_stream_gates(spec, ""),
        *numbers("B", "T", "row_b", "row_t"),
    )


def _stream_gates(spec: KernelSpec, const: str) -> Parameters:
    """Return the parameter for stored gates and, if steps reduce over units, those of the exchange between blocks."""
    N, D, dtype = spec.heads, spec.head_dim, residual_dtype(spec.dtype)
    if not trace(spec.cell).reduces:
        return (
            Parameter("gates", f"{const}struct UnitGates* __restrict__", dtype, (B, T, N, D, len(spec.cell.gates))),
        )
    return (
        Parameter("gates", f"{const}gate* __restrict__", dtype, (B, T, N, head_numbers(spec.cell, N, D, spec.dtype))),
        Parameter("parts", "uint4*", torch.float32),
        *numbers("first_item"),
    )


def _stream_backward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, _, GU), N, D = Tensors(spec), counts(spec), spec.heads, spec.head_dim
    return (
        Parameter("R", "const uint4* __restrict__", spec.dtype),
        tensors.reads("reset", "unsigned char", B, T),
        tensors.shares("exchange", "scalar"),
        Parameter("counters", "u32*", torch.int32),
        tensors.reads("initial", "float", S, B, N, D),
        tensors.reads("h", "scalar", B, T, N, D),
        tensors.reads("aux", "aux_number", S - 1, B, T, N, D),
        *([tensors.reads("bias", "float", G, N, D)] if trace(spec.cell).reduces else []),
        *_stream_gates(spec, "const "),
        tensors.reads("d_h", "scalar", B, T, N, D),
        tensors.reads("d_aux", "float", S - 1, B, T, N, D),
        tensors.writes("d_x", "scalar", B, T, GI, N, D),
        tensors.writes("d_u", "scalar", B, T, GU, N, D),
        tensors.shares("d_bias", "float", B, G, N, D),
        tensors.writes("d_state", "float", S, B, N, D),
        *numbers("B", "T", "row_b", "row_t"),
    )
