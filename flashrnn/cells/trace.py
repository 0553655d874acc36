"""Traces: the scalar graphs of a cell, from which kernels are printed."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from flashrnn.cells.checks import one_thread
from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, Graph, UntraceableCell
from flashrnn.cells.linear import split
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.recorder import recorded
from flashrnn.cells.statistics import Statistics, statistics_of
from flashrnn.forking import lock_that_forks_wait_for

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Trace:
    """A cell as scalar graphs, whose inputs and outputs have the names of gates and states.

    forward: gates and previous states -> `new_<state>` for every state.
    factors: gates and previous states -> `factor<k>`.
    backward: `factor<k>` and `d_new_<state>` -> `d_<gate>` for every gate and `d_<state>` for every previous state.
    gradient: gates, previous states and `d_new_<state>` -> the same as `backward`, in fewer operations.
    statistics: values that a forward pass may store for the gradient, and the gradient that uses them.
    """

    forward: Graph
    factors: Graph
    backward: Graph
    gradient: Graph
    statistics: Statistics

    @property
    def reduces(self) -> bool:
        """Return whether the step reads other units of its head."""
        return self.forward.reduces


def trace(cell: Cell, dtype: torch.dtype = torch.float32) -> Trace:
    """Return the scalar graphs of `cell`; raise UntraceableCell if an operator has no scalar form.

    A step may choose constants depending on the dtype of its arguments. In the trace this is float64 for `dtype`
    float64, and otherwise float32, because kernels also compute in float32 for half types.
    """
    return _traced(cell, torch.float64 if dtype == torch.float64 else torch.float32)


def untraceable(cell: Cell) -> str | None:
    """Return why the cell has no scalar graphs, and therefore no printed kernels; None if it has."""
    try:
        trace(cell)
    except UntraceableCell as reason:
        return str(reason)
    return None


@cache
def reduces_states(cell: Cell) -> bool:
    """Return whether the step reduces values over units that depend on states other than the first one."""
    if untraceable(cell):
        return False
    graph = trace(cell).forward
    reduced = graph.needed(k for k, node in enumerate(graph.nodes) if node.op in REDUCTIONS)
    return any(graph.nodes[k].op == "input" and graph.nodes[k].value in cell.states[1:] for k in reduced)


@cache
def _traced(cell: Cell, dtype: torch.dtype) -> Trace:
    return without_modes(_make_trace, cell, dtype)


def without_modes(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Wrap a function that traces so that it runs in a new thread, which does not have the caller's modes.

    A trace is then the same in inference mode, without gradients and under autocast, and it works inside of an operator
    of a compiled model, where PyTorch's tracing modes cannot be nested.
    """
    with _TRACING, ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


_TRACING = lock_that_forks_wait_for()  # all threads share PyTorch's count of tracing modes


def _make_trace(cell: Cell, dtype: torch.dtype) -> Trace:
    made = _record(cell, dtype)
    with one_thread():
        _check(cell, made, dtype)
    return made


def _record(cell: Cell, dtype: torch.dtype) -> Trace:
    names = (*cell.gates, *cell.states)
    cotangents = tuple(f"d_new_{state}" for state in cell.states)
    # 0-dimensional, to keep shapes out of the graphs, and different from zero, where steps may branch.
    values = [torch.tensor(0.5 + 0.01 * k, dtype=dtype, device="cpu") for k in range(len(names) + len(cotangents))]
    primals, tangents = values[: len(names)], values[len(names) :]
    new = recorded(
        cell,
        lambda: _new_states(cell, primals),
        dict(zip(names, primals, strict=True)),
        [f"new_{state}" for state in cell.states],
    )
    joint = recorded(
        cell,
        lambda: _gradients(cell, primals, tangents),
        dict(zip((*names, *cotangents), values, strict=True)),
        [f"d_{name}" for name in names],
    )
    return Trace(new, *split(cell, joint, cotangents), joint, statistics_of(new, joint, cell.gates, cell.states))


def _new_states(cell: Cell, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    values = [value.clone() for value in values]  # a step may change its arguments in place
    return cell.update(values[: len(cell.gates)], values[len(cell.gates) :])


def _gradients(cell: Cell, values: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    values = [value.detach().requires_grad_() for value in values]
    new = _new_states(cell, values)
    # One scalar that depends on all values, because otherwise autograd imports modules, which would take too long.
    total = sum(n * d for n, d in zip(new, cotangents, strict=True)) + sum(0.0 * value for value in values)
    return torch.autograd.grad(total.sum() if total.ndim else total, values)


_NUMBERS = (0.0, 1e-3, -1e-3, 0.3, -0.7, 1.0, -1.0, 2.5, -4.0, 30.0, -30.0, 1e3, -1e3)


def _points(values: int, cotangents: int) -> Tensor:
    """Return test points [values + cotangents, points] with small, large and equal numbers of both signs.

    No cotangent is 0, which could hide mistakes.
    """
    generator = torch.Generator().manual_seed(0)
    equal = torch.arange(len(_NUMBERS)).expand(values, -1)
    mixed = torch.randint(len(_NUMBERS), (values, 200), generator=generator)
    nonzero = torch.randint(1, len(_NUMBERS), (cotangents, len(_NUMBERS) + 200), generator=generator)
    chosen = torch.cat([torch.cat([equal, mixed], 1), nonzero])
    return torch.tensor(_NUMBERS, dtype=torch.float64)[chosen]


def _check(cell: Cell, made: Trace, dtype: torch.dtype) -> None:
    """Raise UntraceableCell if the graphs differ from the step and its gradient, which a new PyTorch might cause."""
    points = _points(len(cell.gates) + len(cell.states), len(cell.states))
    if made.reduces:  # over the last axis
        points = points.unflatten(1, (-1, 3))
    ours, theirs, wrong = _compared(cell, made, points.to(dtype))
    if wrong.any():  # large numbers that cancel leave rounding errors, which are small in float64
        wrong &= _compared(cell, made, points)[2]
    if wrong.any() and dtype != torch.float64:  # the step may choose constants by dtype
        wrong &= _compared(cell, _record(cell, torch.float64), points)[2]
    if not wrong.any():
        return
    ours, theirs, wrong, points = (x.flatten(1) for x in (ours, theirs, wrong, points))
    k, point = wrong.nonzero()[0].tolist()
    name = (*made.forward.outputs, *made.backward.outputs)[k]
    at = ", ".join(f"{n}={x:g}" for n, x in zip((*cell.gates, *cell.states), points[:, point].tolist(), strict=False))
    raise UntraceableCell(
        f"cell {cell.name!r} cannot be traced: {name} is {theirs[k, point]:g}, but by its graph {ours[k, point]:g}, "
        f"at {at}"
    )


def _compared(cell: Cell, made: Trace, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return new states and gradients [outputs, ...] at `points` [values, ...], from the graphs and from the step.

    The third result is a mask of where the two differ.

    Numbers near overflow are not compared, because graphs multiply in another order, and simplify 0 * x to 0.
    """
    values, cotangents = points.split((len(cell.gates) + len(cell.states), len(cell.states)))
    theirs = torch.stack([*_new_states(cell, values), *_gradients(cell, values, cotangents)]).detach().to(points)
    new, factors, gradients = _by_graphs(cell, made, values, cotangents)
    ours = torch.stack([*new, *gradients])
    compared = theirs.abs() < torch.finfo(theirs.dtype).max ** 0.5
    for factor in factors:
        compared[len(new) :] &= factor.isfinite()
    return ours, theirs, compared & ~torch.isclose(ours, theirs, rtol=1e-5, atol=1e-5)


def _by_graphs(cell: Cell, made: Trace, values: Tensor, cotangents: Tensor) -> tuple[list[Tensor], ...]:
    """Return new states, factors and gradients."""

    def call(graph: Graph, names: Sequence[str], arguments: Sequence[Tensor]) -> list[Tensor]:
        results = torch_function(graph, names, tuple(graph.outputs))(*arguments)
        return [torch.as_tensor(x).to(values).expand_as(values[0]) for x in results]

    names = (*cell.gates, *cell.states)
    factors = call(made.factors, names, values)
    arguments = (*made.factors.outputs, *(f"d_new_{state}" for state in cell.states))
    return call(made.forward, names, values), factors, call(made.backward, arguments, (*factors, *cotangents))
