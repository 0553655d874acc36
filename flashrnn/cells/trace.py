"""The scalar graphs of a cell, of which kernels are printed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from threading import Lock

import torch
from torch import Tensor

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import Graph, UntraceableCell
from flashrnn.cells.linear import split
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.recorder import recorded


@dataclass(frozen=True)
class Trace:
    """A cell as scalar graphs. Inputs and outputs go by the names of gates and states.

    forward: gates and previous states -> `new_<state>` for every state.
    factors: gates and previous states -> `factor<k>`.
    backward: `factor<k>` and `d_new_<state>` -> `d_<gate>` for every gate and `d_<state>` for every previous state.
    """

    forward: Graph
    factors: Graph
    backward: Graph


def trace(cell: Cell, dtype: torch.dtype = torch.float32) -> Trace:
    """Return the scalar graphs of `cell`; raise UntraceableCell naming the operator that has none.

    A step may choose its constants by the dtype of its numbers: it sees float64 for `dtype` float64, and float32 for
    all others, in which half types are computed too.
    """
    return _traced(cell, torch.float64 if dtype == torch.float64 else torch.float32)


def untraceable(cell: Cell) -> str | None:
    """Return why the cell has no scalar graphs, and so no printed kernels; None if it has."""
    try:
        trace(cell)
    except UntraceableCell as reason:
        return str(reason)
    return None


@cache
def _traced(cell: Cell, dtype: torch.dtype) -> Trace:
    """In a thread of its own, which starts without the modes of the caller: a trace is the same at inference and under
    autocast, and within an operator of a compiled model, where PyTorch's tracing modes do not nest.
    """
    with _TRACING, ThreadPoolExecutor(1) as thread:
        return thread.submit(_make_trace, cell, dtype).result()


_TRACING = Lock()  # of PyTorch's tracing modes there is one count for all threads


def _make_trace(cell: Cell, dtype: torch.dtype) -> Trace:
    names = (*cell.gates, *cell.states)
    cotangents = tuple(f"d_new_{state}" for state in cell.states)

    def forward(primals: list[Tensor]) -> tuple[Tensor, ...]:
        primals = [value.clone() for value in primals]  # a step may work in place
        return cell.update(primals[: len(cell.gates)], primals[len(cell.gates) :])

    def vjp(primals: list[Tensor], cotangents: list[Tensor]) -> tuple[Tensor, ...]:
        primals = [value.requires_grad_() for value in primals]
        new = forward(primals)
        # One number that depends on every value: for anything else, autograd imports what takes longer than the trace.
        total = sum(n * d for n, d in zip(new, cotangents, strict=True)) + sum(0.0 * value for value in primals)
        return torch.autograd.grad(total, primals)

    new = _scalar_graph(cell, dtype, forward, (names,), [f"new_{state}" for state in cell.states])
    joint = _scalar_graph(cell, dtype, vjp, (names, cotangents), [f"d_{name}" for name in names])
    factors, backward = split(cell, joint, cotangents)
    return Trace(new, factors, backward)


def _scalar_graph(
    cell: Cell, dtype: torch.dtype, function: Callable, input_names: tuple, output_names: list[str]
) -> Graph:
    # 0-dimensional inputs keep shapes out of the graph; the values stay clear of where steps branch on zero.
    options = {"dtype": dtype, "device": "cpu"}
    examples = [[torch.tensor(0.5 + 0.01 * k, **options) for k in range(len(names))] for names in input_names]
    inputs = dict(zip(chain(*input_names), chain(*examples), strict=True))
    graph, results = recorded(cell, lambda: function(*examples), inputs, output_names)
    _check(cell, graph, inputs, results)
    return graph


def _check(cell: Cell, graph: Graph, inputs: dict[str, Tensor], results: tuple[Tensor, ...]) -> None:
    """Raise UntraceableCell if the graph computes something else, as it might where PyTorch's operators change."""
    computed = torch_function(graph, list(inputs), list(graph.outputs))(*inputs.values())
    for name, ours, theirs in zip(graph.outputs, computed, results, strict=True):
        # to two digits: a step may round to half types, which graphs leave out
        if not torch.allclose(torch.as_tensor(ours).to(theirs), theirs, rtol=1e-2, equal_nan=True):
            raise UntraceableCell(f"cell {cell.name!r} cannot be traced: {name} is {theirs}, but by its graph {ours}")
