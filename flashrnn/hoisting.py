"""Calls that run a cell in two parts (`cells.hoisting`): a kernel for the part before the time loop, and the loop.

This shortens the step of the loop, which then has fewer reductions, gates and biases.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashrnn import eager
from flashrnn.cells import Cell
from flashrnn.cells.hoisting import Hoisted, hoisted
from flashrnn.cuda import hoisted as kernels
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.spec import SHORT, specs_of
from flashrnn.dispatch import choose
from flashrnn.problem import Inputs, KernelUnavailable, Problem, tf32_allowed

FEWEST_STEPS = max(SHORT) + 1
"""Time steps from which on a call is run in two parts: for short sequences, a further launch takes longer."""


def serves(
    cell: Cell, backend: str, dtype: torch.dtype, device: torch.device, steps: int, heads: int, head_dim: int
) -> bool:
    """Return whether a call is run in two parts: on a GPU, by `cuda_fused`, and outside of compilers."""
    if device.type != "cuda" or steps < FEWEST_STEPS or backend not in ("auto", CudaFused.name):
        return False
    if torch.compiler.is_compiling() or not hoisted(cell):  # a compiler cannot trace how a cell is traced
        return False
    training, tf32 = torch.is_grad_enabled(), tf32_allowed(dtype, device)
    return in_parts(Problem(cell, heads, head_dim, dtype, device, training, reset=False, tf32=tf32)) is not None


@lru_cache(maxsize=4096)
def in_parts(problem: Problem) -> Hoisted | None:
    """Return the two parts in which `cuda_fused` runs long sequences of a problem; None if it runs them in one.

    If one block computes a whole head, its step gains less than the time to write and read the intermediate values.
    """
    parts = None if problem.head_dim % 2 else hoisted(problem.cell)
    if parts is None or not isinstance(choose("auto", of_loop := problem._replace(cell=parts.loop)), CudaFused):
        return None
    return parts if all(solver.likely_tiling(spec).blocks > 1 for spec in specs_of(of_loop)) else None


def recurrence(
    cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the results of `eager.recurrence`."""
    Wx, _, b, *_ = eager.cast(dtype, *inputs)
    parts = hoisted(cell)
    try:
        values, biases = _FirstPart.apply(Wx, b, parts)
        of_loop = inputs._replace(Wx=values, b=biases)
        return eager.recurrence(parts.loop, CudaFused.name, dtype, return_states, of_loop)
    except KernelUnavailable:  # `eager.recurrence` reports it, or takes the next backend
        return eager.recurrence(cell, backend, dtype, return_states, inputs)


class _FirstPart(torch.autograd.Function):
    """The first part: returns the inputs of the loop, in the format of `cuda_fused`, and its biases."""

    @staticmethod
    def forward(ctx, Wx: Tensor, b: Tensor, parts: Hoisted) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(Wx, b)
        ctx.parts = parts
        of_gate = dict(zip(parts.cell.gates, b.unbind(), strict=True))
        none = torch.zeros_like(b[0])
        biases = [none] * len(parts.values) + [of_gate[gate] for gate in parts.remaining]
        return kernels.values(parts, Wx, b, any(ctx.needs_input_grad)), torch.stack(biases)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_values: Tensor, d_biases: Tensor) -> tuple[Tensor, Tensor, None]:
        Wx, b = ctx.saved_tensors
        parts = ctx.parts
        d_Wx, d_first = kernels.gradients(parts, Wx, b, d_values)
        found = dict(zip(parts.remaining, d_biases[len(parts.values) :].to(d_first.dtype).unbind(), strict=True))
        for gate, d in zip(parts.gates, d_first.unbind(), strict=True):
            found[gate] = found[gate] + d if gate in found else d
        none = torch.zeros_like(d_first[0])
        return d_Wx, torch.stack([found.get(gate, none) for gate in parts.cell.gates]).to(b.dtype), None
