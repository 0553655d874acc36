"""Backend `vanilla`, the reference for all others: plain PyTorch for any cell, dtype, device and size.

The backward pass runs the time loop by hand, without an autograd graph. The factors of the cell's gradient, which do
not depend on later steps, are computed for many steps at once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cells.graph import UntraceableCell
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.trace import trace
from flashrnn.memory_format import empty_in_format
from flashrnn.problem import (
    Gradients,
    Inputs,
    Problem,
    StateGradients,
    States,
    empty_aux,
    initial_states,
    state_dtype,
)
from flashrnn.products import write_previous
from flashrnn.residual import GateFormat, Residual, as_gnd, empty_gates, saturated

logger = logging.getLogger("flashrnn")

_CHUNK = 2**16  # elements of a state for which factors are computed at once, so that they fit in a processor's cache


class Reference:
    """Backend `vanilla`. It computes in the state dtype; h is rounded to the dtype of Wx after every step."""

    name = "vanilla"

    def gate_format(self, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
        return "GND"

    def unsupported_reason(self, problem: Problem) -> str | None:
        return None

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        Wx, R, b, states, reset = inputs
        states = initial_states(cell, states, Wx)
        b = b.to(states.dtype)
        packing, T = _Packing(cell), Wx.shape[1]
        weight = packing.recurrent_matrix(R).transpose(1, 2)  # [N, D, Gr*D]
        h = empty_in_format(Wx, *Wx.shape[3:])
        aux, gates = empty_aux(cell, Wx, all_states, training), empty_gates(cell, Wx, training, "GND")
        state = list(states.transpose(1, 2).clone(memory_format=torch.contiguous_format))  # S x [N, B, D]
        for steps in _chunks(h):
            pre = packing.input_and_bias(Wx[:, steps], b)  # [N, t, B, G*D]
            for t, pre_t in zip(range(T)[steps], pre.unbind(1), strict=True):
                if reset is not None:
                    state = [s.masked_fill(reset[:, t, None], 0.0) for s in state]
                pre_t[..., : weight.shape[2]].baddbmm_(state[0], weight)
                given = pre_t.clone() if training else pre_t  # because a cell's step may change its arguments in place
                state = _distinct(cell.update(packing.split(given), state))
                state[0] = state[0].to(Wx.dtype).to(pre.dtype)
                h[:, t] = state[0].transpose(0, 1)
                if aux.shape[2]:
                    for every, new in zip(aux, state[1:], strict=True):
                        every[:, t] = saturated(new, aux.dtype).transpose(0, 1)
            if training:
                gates[:, steps] = saturated(packing.gates(pre), gates.dtype)
        return States(h, aux, torch.stack(state).transpose(1, 2).contiguous()), gates

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        R, states, reset, h, aux, gates, gate_format, *_ = residual
        gates = as_gnd(gates, gate_format, cell, residual.b, R.shape[-1])
        states = initial_states(cell, states, h)
        packing, functions, T = _Packing(cell), _functions(cell, states.dtype), h.shape[1]
        matrix = packing.recurrent_matrix(R)  # [N, Gr*D, D]
        recurrent_gates = slice(matrix.shape[1])  # of the last axis
        given = [None if g is None else g.to(states.dtype).permute(2, 1, 0, 3) for g in (grads.h, *grads.aux)]
        d_last = torch.zeros_like(states) if grads.last is None else grads.last
        d_state = list(d_last.transpose(1, 2).contiguous().unbind())
        d_Wx, d_matrix, d_bias = empty_in_format(h, len(cell.input_gates), *h.shape[2:]), torch.zeros_like(matrix), 0.0
        for steps in reversed(_chunks(h)):
            pre = packing.pre_activations(gates[:, steps], states.dtype)  # [N, t, B, G*D]
            previous = _previous_states(states, reset, h, aux, steps)  # [S, N, t, B, D]
            factors = [f.unbind(1) for f in functions.factors(*packing.split(pre), *previous)]
            d_gates = torch.empty_like(pre)
            for k, t in reversed(list(enumerate(range(T)[steps]))):
                d_new = [d if g is None else d + g[:, t] for d, g in zip(d_state, given, strict=True)]
                d_gate, d_state = functions.backward([f[k] for f in factors], d_new)
                torch.cat(d_gate, dim=-1, out=d_gates[:, k])
                d_state[0] = torch.baddbmm(d_state[0], d_gates[:, k, :, recurrent_gates], matrix)
                if reset is not None:
                    d_state = [d.masked_fill(reset[:, t, None], 0.0) for d in d_state]
            d_Wx[:, steps] = packing.input_gradient(d_gates)
            d_matrix.baddbmm_(d_gates[..., recurrent_gates].flatten(1, 2).transpose(1, 2), previous[0].flatten(1, 2))
            d_bias = d_bias + d_gates.sum((1, 2))
        d_R, d_b = packing.parameter_gradients(d_matrix, d_bias)
        return Gradients(d_Wx, d_R.to(R.dtype), d_b, torch.stack(d_state).transpose(1, 2).contiguous())


def _distinct(states: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the states as distinct tensors, because a step that works in place could change two of them at once."""
    return [s.clone() if any(s is other for other in states[:i]) else s for i, s in enumerate(states)]


def _chunks(h: Tensor) -> list[slice]:
    """Return slices of time whose gates and factors stay in a processor's cache."""
    B, T, N, D = h.shape
    steps = max(1, _CHUNK // (B * N * D))
    return [slice(start, min(start + steps, T)) for start in range(0, T, steps)]


class _Packing:
    """The layout of this backend's gates: all in one axis, [N, T, B, G*D], with the recurrent ones first."""

    def __init__(self, cell: Cell):
        self.cell = cell
        others = tuple(gate for gate in cell.gates if gate not in cell.recurrent_gates)
        self.order = (*cell.recurrent_gates, *others)
        self.with_input = _as_slice([self.order.index(gate) for gate in cell.input_gates])
        self.from_cell = [cell.gates.index(gate) for gate in self.order]
        self.to_cell = [self.order.index(gate) for gate in cell.gates]

    def input_and_bias(self, Wx: Tensor, b: Tensor) -> Tensor:
        B, T, _, N, D = Wx.shape
        pre = b.new_empty(N, T, B, len(self.order), D)
        pre[:] = b[self.from_cell].transpose(0, 1)[:, None, None]
        pre[:, :, :, self.with_input] += Wx.permute(3, 1, 0, 2, 4)
        return pre.flatten(3)

    def recurrent_matrix(self, R: Tensor) -> Tensor:
        return R.transpose(0, 1).flatten(1, 2).to(state_dtype(R.dtype))

    def split(self, pre: Tensor) -> list[Tensor]:
        """Return the gates [..., D], in the cell's order, of a packed [..., G*D]."""
        gates = pre.unflatten(-1, (len(self.order), -1)).unbind(-2)
        return [gates[k] for k in self.to_cell]

    def gates(self, pre: Tensor) -> Tensor:
        """Return packed gates [N, T, B, G*D] as [B, T, G, N, D], in the cell's order."""
        return self._apart(pre)[:, :, _as_slice(self.to_cell)]

    def pre_activations(self, gates: Tensor, dtype: torch.dtype) -> Tensor:
        """Return gates [B, T, G, N, D], in the cell's order, packed [N, T, B, G*D] and in `dtype`."""
        ordered = gates[:, :, _as_slice(self.from_cell)].permute(3, 1, 0, 2, 4)
        return ordered.to(dtype, copy=True, memory_format=torch.contiguous_format).flatten(3)

    def _apart(self, pre: Tensor) -> Tensor:
        """Return packed gates [N, T, B, G*D] as [B, T, G, N, D], in the order of the packing."""
        return pre.unflatten(-1, (len(self.order), -1)).permute(2, 1, 3, 0, 4)

    def input_gradient(self, d_gates: Tensor) -> Tensor:
        """Return d_Wx [B, T, Gi, N, D] of packed gradients [N, T, B, G*D]."""
        return self._apart(d_gates)[:, :, self.with_input]

    def parameter_gradients(self, d_matrix: Tensor, d_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return d_R [Gr, N, D, D] and d_b [G, N, D] of packed gradients [N, Gr*D, D] and [N, G*D]."""
        D = d_matrix.shape[2]
        # clone: contiguous() would keep the odd stride of a single head, which DistributedDataParallel warns about
        d_R = d_matrix.unflatten(1, (-1, D)).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return d_R, d_bias.unflatten(1, (-1, D)).transpose(0, 1)[self.to_cell].contiguous()


def _as_slice(indices: list[int]) -> list[int] | slice:
    """Return `indices` as a slice if they are consecutive: indexing by a slice makes no copy."""
    consecutive = slice(indices[0], indices[0] + len(indices))
    return consecutive if indices == list(range(consecutive.start, consecutive.stop)) else indices


@dataclass(frozen=True)
class _Functions:
    """The gradient of a cell in two parts.

    `factors` maps gates and states to factors. `backward` maps these factors and the gradients of the new states to the
    gradients of the gates, in the order of `_Packing`, and of the states.
    """

    factors: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[list[Tensor], list[Tensor]]]


@cache
def _functions(cell: Cell, dtype: torch.dtype) -> _Functions:
    try:
        graphs = trace(cell, dtype)
    except UntraceableCell as reason:
        logger.warning("%s; its backward differentiates the step in every time step, which takes longer", reason)
        return _functions_of_step(cell, dtype)
    names = sorted(graphs.factors.outputs)
    cotangents = [f"d_new_{state}" for state in cell.states]
    order = _Packing(cell).order
    results = [f"d_{gate}" for gate in order] + [f"d_{state}" for state in cell.states]
    run = torch_function(graphs.backward, (*names, *cotangents), results)

    def backward(factors, d_new):
        grads = [g if isinstance(g, Tensor) else torch.full_like(d_new[0], g) for g in run(*factors, *d_new)]
        return grads[: len(order)], grads[len(order) :]

    return _Functions(torch_function(graphs.factors, (*cell.gates, *cell.states), names), backward)


def _functions_of_step(cell: Cell, dtype: torch.dtype) -> _Functions:
    """Return the functions of a cell without scalar graphs: the factors are its gates and states, backward is a vjp."""
    packing, gates = _Packing(cell), len(cell.gates)

    def update(*values):
        values = [value.clone() for value in values]  # a cell's step may change its arguments in place
        return cell.update(values[:gates], values[gates:])

    def factors(*gates_and_states):
        return gates_and_states

    def backward(factors, d_new):
        _, vjp = torch.func.vjp(update, *factors)
        grads = vjp(tuple(d_new))
        return [grads[k] for k in packing.from_cell], list(grads[gates:])

    try:
        torch.func.vjp(update, *torch.full((gates + len(cell.states), 1), 0.5, dtype=dtype, device="cpu"))
    except RuntimeError as error:
        raise RuntimeError(
            f"cell {cell.name!r} cannot be differentiated: it has no scalar graphs, as a warning says, and "
            "torch.func.vjp does not take its step. A torch.autograd.Function in it needs a static method "
            f"setup_context, or PyTorch's own operators in its place. PyTorch says: {error}"
        ) from error
    return _Functions(factors, backward)


def _previous_states(states: Tensor, reset: Tensor | None, h: Tensor, aux: Tensor, steps: slice) -> Tensor:
    """Return the states [S, N, t, B, D] before each of `steps`."""
    S, B, N, D = states.shape
    result = states.new_empty(S, N, steps.stop - steps.start, B, D)
    for out, state, initial in zip(result, (h, *aux), states, strict=True):
        write_previous(out.permute(2, 1, 0, 3), state, initial, reset, steps)
    return result
