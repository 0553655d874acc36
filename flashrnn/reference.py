"""The recurrence in plain PyTorch: any cell, dtype, device and size. The oracle of every other backend ("vanilla").

The backward walks the time loop by hand, without an autograd graph: all that does not depend on later steps (gates
and the factors of the cell's gradient) is computed for many steps at once, the loop does the rest.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.codegen.torch_source import torch_function
from flashrnn.problem import Gradients, Problem, States, state_dtype
from flashrnn.trace import UntraceableCell, trace

logger = logging.getLogger("flashrnn")

_CHUNK = 2**16  # elements of a state whose gradient factors are held at once: few enough for a processor's cache


class Reference:
    """Backend `vanilla`. Computes in the state dtype; h is rounded to the dtype of Wx after every step."""

    name = "vanilla"

    def supports(self, problem: Problem) -> str | None:
        return None

    def forward(
        self, cell: Cell, Wx: Tensor, R: Tensor, b: Tensor, states: Tensor, reset: Tensor | None, all_states: bool
    ) -> States:
        layout = _Layout(cell)
        pre = layout.input_and_bias(Wx, b)  # [T, N, B, G*D]
        weight = layout.recurrent_matrix(R).transpose(1, 2)  # [N, D, Gr*D]
        state = list(states.transpose(1, 2).unbind())  # S x [N, B, D]
        history: list[list[Tensor]] = []
        for t, pre_t in enumerate(pre.unbind()):
            if reset is not None:
                state = [s.masked_fill(reset[:, t, None], 0.0) for s in state]
            recurrent = torch.baddbmm(pre_t[..., : weight.shape[2]], state[0], weight)
            state = list(cell.update(layout.split(pre_t, recurrent), state))
            state[0] = state[0].to(Wx.dtype).to(pre.dtype)
            history.append(state if all_states else state[:1])
        columns = [torch.stack(column).permute(2, 0, 1, 3) for column in zip(*history, strict=True)]  # [B, T, N, D]
        h = columns[0].to(Wx.dtype).contiguous()
        aux = torch.stack(columns[1:]) if len(columns) > 1 else empty_aux(cell, Wx, all_states)
        return States(h, aux, torch.stack(state).transpose(1, 2).contiguous())

    def backward(
        self,
        cell: Cell,
        grads: States,
        Wx: Tensor,
        R: Tensor,
        b: Tensor,
        states: Tensor,
        reset: Tensor | None,
        h: Tensor,
        aux: Tensor,
    ) -> Gradients:
        layout = _Layout(cell)
        dtype = state_dtype(Wx.dtype)
        pre = layout.input_and_bias(Wx, b)
        matrix = layout.recurrent_matrix(R)  # [N, Gr*D, D]
        previous = _previous_states(states, reset, h, aux)  # S x [T, N, B, D]
        given = [None if g is None else g.to(dtype).permute(1, 2, 0, 3) for g in _per_state(cell, grads)]
        d_state = _last_gradient(cell, grads, previous[0])
        d_gates = torch.empty_like(pre)
        functions = _functions(cell)
        chunk_steps = max(1, _CHUNK // previous[0][0].numel())
        for start in reversed(range(0, len(pre), chunk_steps)):
            steps = slice(start, min(start + chunk_steps, len(pre)))
            chunk = [p[steps] for p in previous]
            recurrent = pre[steps, ..., : matrix.shape[1]] + chunk[0] @ matrix.transpose(1, 2)
            factors = functions.factors(*layout.split(pre[steps], recurrent), *chunk)
            factors = [f.unbind() for f in factors]
            for t in reversed(range(steps.start, steps.stop)):
                d_new = [d if g is None else d + g[t] for d, g in zip(d_state, given, strict=True)]
                d_gate, d_state = functions.backward([f[t - start] for f in factors], d_new)
                torch.cat(d_gate, dim=-1, out=d_gates[t])
                d_state[0] = d_state[0] + d_gates[t, ..., : matrix.shape[1]] @ matrix
                if reset is not None:
                    d_state = [d.masked_fill(reset[:, t, None], 0.0) for d in d_state]
        d_states = torch.stack(d_state).transpose(1, 2).contiguous()
        return layout.gradients(d_gates, previous[0], Wx, R, d_states)


class _Layout:
    """The reference's own order of axes and gates: [T, N, B, G*D], gates with a recurrent part first."""

    def __init__(self, cell: Cell):
        self.cell = cell
        others = tuple(gate for gate in cell.gates if gate not in cell.recurrent_gates)
        self.order = (*cell.recurrent_gates, *others)
        self.with_input = _as_slice([self.order.index(gate) for gate in cell.input_gates])
        self.from_cell = [cell.gates.index(gate) for gate in self.order]
        self.to_cell = [self.order.index(gate) for gate in cell.gates]

    def input_and_bias(self, Wx: Tensor, b: Tensor) -> Tensor:
        B, T, _, N, D = Wx.shape
        pre = b[self.from_cell].transpose(0, 1)[None, :, None].expand(T, N, B, -1, D).clone()
        pre[:, :, :, self.with_input] += Wx.permute(1, 3, 0, 2, 4).to(b.dtype)
        return pre.flatten(3)

    def recurrent_matrix(self, R: Tensor) -> Tensor:
        return R.transpose(0, 1).flatten(1, 2).to(state_dtype(R.dtype))

    def split(self, pre: Tensor, recurrent: Tensor) -> list[Tensor]:
        """Pre-activations and the recurrent gates' sums, both [..., gates*D] -> gates in the cell's order [..., D]."""
        R = len(self.cell.recurrent_gates)
        sums = recurrent.unflatten(-1, (R, -1)).unbind(-2)
        rest = pre.unflatten(-1, (len(self.order), -1)).unbind(-2)[R:]
        gates = (*sums, *rest)
        return [gates[k] for k in self.to_cell]

    def gradients(self, d_gates: Tensor, h_previous: Tensor, Wx: Tensor, R: Tensor, d_states: Tensor) -> Gradients:
        """From d_gates [T, N, B, G*D] in this layout and h_{t-1} [T, N, B, D]."""
        d_gates = d_gates.unflatten(-1, (len(self.order), -1))
        d_recurrent = d_gates[..., : R.shape[0], :].flatten(3).transpose(0, 1).flatten(1, 2)  # [N, T*B, Gr*D]
        d_R = d_recurrent.transpose(1, 2) @ h_previous.transpose(0, 1).flatten(1, 2)
        d_R = d_R.unflatten(1, (R.shape[0], -1)).transpose(0, 1)
        d_Wx = d_gates[:, :, :, self.with_input].permute(2, 0, 3, 1, 4)
        d_b = d_gates.sum((0, 2)).transpose(0, 1)[self.to_cell]
        return Gradients(d_Wx.to(Wx.dtype).contiguous(), d_R.to(R.dtype).contiguous(), d_b.contiguous(), d_states)


def _as_slice(indices: list[int]) -> list[int] | slice:
    """`indices` as a slice where they are consecutive, because slices need no copy."""
    consecutive = slice(indices[0], indices[0] + len(indices))
    return consecutive if indices == list(range(consecutive.start, consecutive.stop)) else indices


@dataclass(frozen=True)
class _Functions:
    """A cell's gradient in two parts: factors of gates and states, then, from them and d_new, (d_gates in the order of
    `_Layout`, d_states)."""

    factors: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[list[Tensor], list[Tensor]]]


@cache
def _functions(cell: Cell) -> _Functions:
    try:
        graphs = trace(cell)
    except UntraceableCell as reason:
        logger.warning("%s; its backward differentiates the step in every time step, which takes longer", reason)
        return _functions_of_step(cell)
    names = sorted(graphs.factors.outputs)
    cotangents = [f"d_new_{state}" for state in cell.states]
    order = _Layout(cell).order
    results = [f"d_{gate}" for gate in order] + [f"d_{state}" for state in cell.states]
    run = torch_function(graphs.backward, (*names, *cotangents), results)

    def backward(factors, d_new):
        grads = [g if isinstance(g, Tensor) else torch.full_like(d_new[0], g) for g in run(*factors, *d_new)]
        return grads[: len(order)], grads[len(order) :]

    return _Functions(torch_function(graphs.factors, (*cell.gates, *cell.states), names), backward)


def _functions_of_step(cell: Cell) -> _Functions:
    """For a cell without scalar graphs: its gates and states are the factors, the rest is left to the step's vjp."""
    layout, gates = _Layout(cell), len(cell.gates)

    def factors(*gates_and_states):
        return gates_and_states

    def backward(factors, d_new):
        _, vjp = torch.func.vjp(lambda *values: cell.update(values[:gates], values[gates:]), *factors)
        grads = vjp(tuple(d_new))
        return [grads[k] for k in layout.from_cell], list(grads[gates:])

    return _Functions(factors, backward)


def empty_aux(cell: Cell, Wx: Tensor, all_states: bool) -> Tensor:
    """Room for the states behind the first: [S-1, B, T, N, D], without time steps if they are not wanted."""
    B, T, _, N, D = Wx.shape
    return Wx.new_empty(len(cell.states) - 1, B, T if all_states else 0, N, D, dtype=state_dtype(Wx.dtype))


def _previous_states(states: Tensor, reset: Tensor | None, h: Tensor, aux: Tensor) -> list[Tensor]:
    """The states before every step, S x [T, N, B, D]."""
    result = []
    for initial, column in zip(states.unbind(), (h, *aux.unbind()), strict=True):
        shifted = torch.cat([initial[:, None], column[:, :-1].to(initial.dtype)], dim=1)
        if reset is not None:
            shifted = shifted.masked_fill(reset[:, :, None, None], 0.0)
        result.append(shifted.permute(1, 2, 0, 3).contiguous())
    return result


def _per_state(cell: Cell, grads: States) -> list[Tensor | None]:
    aux = [None] * (len(cell.states) - 1) if grads.aux is None else list(grads.aux.unbind())
    return [grads.h, *aux]


def _last_gradient(cell: Cell, grads: States, like: Tensor) -> list[Tensor]:
    if grads.last is None:
        return [torch.zeros_like(like[0]) for _ in cell.states]
    return list(grads.last.transpose(1, 2).unbind())
