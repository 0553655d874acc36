"""Backend `triton_fused`: the whole time loop in one Triton kernel, R on the chip."""

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cells.gates import recurrent_only
from flashrnn.cells.trace import untraceable
from flashrnn.memory_format import empty_in_format, in_format
from flashrnn.problem import Gradients, Inputs, Problem, StateGradients, States, aux_gradient, empty_aux, initial_states
from flashrnn.products import previous_h, weight_gradient
from flashrnn.residual import GateFormat, Residual, empty_gates

HEAD_DIM = 128  # the largest head size that has been tested


class TritonFused:
    """Backend `triton_fused`. It computes in float32, and its matrix products have operands in the dtype of Wx.

    Products in float32 are IEEE products without tensor cores.
    """

    name = "triton_fused"

    def gate_format(self, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
        return "GND"

    def unsupported_reason(self, problem: Problem) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed; it comes with PyTorch for GPUs on Linux"
        return _device_reason(problem) or _size_reason(problem) or untraceable(problem.cell)

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        from flashrnn.triton.launch import launch

        Wx, R, b, states, reset = inputs
        states = initial_states(cell, states, Wx)
        b = b.to(states.dtype)
        Wx = in_format(Wx, Wx)
        h, last = empty_in_format(Wx, *Wx.shape[3:]), torch.empty_like(states)
        aux, gates = empty_aux(cell, Wx, all_states, training), empty_gates(cell, Wx, training, "GND")
        known = (Wx, R.contiguous(), b.contiguous(), states, _as_bytes(reset))
        launch("forward", cell, h, *known, h, aux if aux.shape[2] else None, last, gates if training else None)
        return States(h, aux, last), gates

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        from flashrnn.triton.launch import launch

        R, states, reset, h, aux, *_ = residual
        states = initial_states(cell, states, h)
        B, _, N, D = h.shape
        h_before = previous_h(h, states[0], reset)
        d_Wx, d_u = (empty_in_format(h, len(names), N, D) for names in (cell.input_gates, recurrent_only(cell)))
        d_b, d_states = states.new_empty(B, len(cell.gates), N, D), torch.empty_like(states)
        known = (R.contiguous(), states, _as_bytes(reset), h_before, aux, residual.gates_in("GND", cell))
        d_h = None if grads.h is None else in_format(grads.h, h)
        d_aux = aux_gradient(grads, aux, states.dtype)
        d_last = None if grads.last is None else grads.last.contiguous()
        launch("backward", cell, h, *known, d_h, d_aux, d_last, d_Wx, d_u, d_b, d_states, d_aux=d_aux is not None)
        return Gradients(d_Wx, weight_gradient(cell, d_Wx, d_u, h_before), d_b.sum(0), d_states)


def _interpreted() -> bool:
    """Return whether Triton interprets kernels; does not import Triton if it is not necessary."""
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False
    import triton

    return triton.knobs.runtime.interpret


def _device_reason(problem: Problem) -> str | None:
    device = problem.device
    if _interpreted():
        if device.type != "cpu":
            return "under TRITON_INTERPRET=1 it runs on the CPU only"
        wrong = problem.dtype == torch.bfloat16
        return "Triton's interpreter computes bfloat16 wrongly; use float16 or float32" if wrong else None
    if device.type == "cpu":
        return "it runs on CUDA and ROCm GPUs, and on the CPU under TRITON_INTERPRET=1 only"
    if device.type != "cuda":
        return f"it runs on CUDA and ROCm GPUs, not on {device.type}"
    return problem.gpu_reason()


def _size_reason(problem: Problem) -> str | None:
    from flashrnn.triton.launch import padded, prefetch, shared_memory

    if reason := problem.dtype_reason((torch.bfloat16, torch.float16, torch.float32)):
        return reason
    if problem.head_dim > HEAD_DIM:
        return f"it supports head sizes up to {HEAD_DIM}, got {problem.head_dim}"
    cell, size, space = problem.cell, padded(problem.head_dim), shared_memory(problem.gpu)
    if not all(prefetch(direction, cell, problem.head_dim, problem.dtype, space) for direction in problem.directions):
        needed = len(cell.recurrent_gates) * size**2 * problem.dtype.itemsize
        return (
            f"the recurrent matrices of a head take {needed // 1024} KiB (head size {problem.head_dim}, padded to "
            f"{size}, {problem.dtype}), but a multiprocessor has {space // 1024} KiB for them and the data of a step"
        )
    return None


def _as_bytes(reset: Tensor | None) -> Tensor | None:
    return None if reset is None else reset.contiguous().view(torch.int8)
