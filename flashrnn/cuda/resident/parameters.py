"""The parameters of the fused kernels, and of the chunks through which concurrent kernels wait for each other."""

import torch

from flashrnn.cells.gates import constant
from flashrnn.cuda.parameters import B, Parameter, Parameters, T, Tensors, counts, numbers
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import head_numbers

# Strides in bytes between steps are arguments, because the time loop does not recompute what is in constant memory.
_FUSED_NUMBERS = numbers(
    "B", "T", "row_b", "row_t", "first_group", "x_step", "h_step", "aux_step", "gates_step", "used_sequences"
)


def fused(spec: KernelSpec) -> Parameters:
    """Return the parameters of {forward,backward}.cuh in resident/kernels."""
    return _fused_forward(spec) if spec.direction == "forward" else _fused_backward(spec)


def _fused_forward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, GR, _), N, D = Tensors(spec), counts(spec), spec.heads, spec.head_dim
    return (
        tensors.reads("x", "scalar", B, T, GI, N, D),
        tensors.reads("R", "scalar", GR, N, D, D),
        tensors.reads("bias", "scalar" if spec.variant.half_bias else "float", G, N, D),
        tensors.reads("initial", "float", S, B, N, D),
        tensors.reads("resets", "u32"),
        tensors.writes("h", "scalar", B, T, N, D),
        tensors.writes("aux", "aux_number", S - 1, B, T, N, D),
        tensors.writes("last", "float", S, B, N, D),
        tensors.writes("gates", "gate", B, T, N, head_numbers(spec.cell, N, D, spec.dtype)),
        Parameter("workspace", "uint4*", torch.uint8),
        Parameter("launch", "u64"),
        *(chunks() if spec.layers > 1 else ()),
        *_FUSED_NUMBERS,
    )


def chunks() -> Parameters:
    """Return the counters of chunks that a kernel waits for, the blocks that count each, and those it increments."""
    return (
        Parameter("arrived", "const u32*", torch.int32),
        *numbers("producers"),
        Parameter("done", "u32*", torch.int32),
    )


def _fused_backward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, GR, GU), N, D = Tensors(spec), counts(spec), spec.heads, spec.head_dim
    other_states = range(S - 1) if spec.variant.d_aux else ()
    return (
        tensors.reads("R", "scalar", GR, N, D, D),
        *([tensors.reads("bias", "float", G, N, D)] if constant(spec.cell) else []),  # for gates that are not stored
        tensors.reads("initial", "float", S, B, N, D),
        tensors.reads("resets", "u32"),
        tensors.reads("h", "scalar", B, T, N, D),
        tensors.reads("aux", "aux_number", S - 1, B, T, N, D),
        tensors.reads("first_aux", "aux_number", S - 1, B, N, D),
        tensors.shares("gates", "const gate", B, T, N, head_numbers(spec.cell, N, D, spec.dtype)),
        tensors.reads("d_h", "scalar", B, T, N, D),
        *(tensors.reads(f"d_aux_{i}", "float", B, T, N, D) for i in other_states),
        tensors.reads("d_last", "float", S, B, N, D),
        tensors.shares("d_x", "scalar", B, T, GI, N, D),  # may alias gates
        tensors.writes("d_u", "scalar", B, T, GU, N, D),
        tensors.writes("d_bias", "float"),
        tensors.writes("d_initial", "float", S, B, N, D),
        Parameter("progress", "u32*", torch.int32),
        Parameter("workspace", "u64*", torch.uint8),
        Parameter("launch", "u64"),
        *(chunks() if spec.layers > 1 else ()),
        *_FUSED_NUMBERS,
    )
