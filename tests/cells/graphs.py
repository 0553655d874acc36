"""Scalar graphs to test printers with, input values, and their results by PyTorch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashrnn.cells.graph import OPERATORS, TRUTH, Graph
from flashrnn.cells.printers.pytorch import torch_function


def by_graph(graph: Graph, arguments: Sequence[str], results: Sequence[str], values: Tensor) -> Tensor:
    """Return the results [count, results] of the graph's PyTorch function for values [count, arguments]."""
    columns = torch_function(graph, arguments, results)(*values.unbind(1))
    return torch.stack([torch.as_tensor(c, dtype=values.dtype).expand(len(values)) for c in columns], 1)


def values_of(cell) -> tuple[Tensor, Tensor]:
    """Return gates and states of all magnitudes, including zero states as in the first step."""
    generator = torch.Generator().manual_seed(0)
    gates = 3 * torch.randn(1000, len(cell.gates), generator=generator)
    states = torch.randn(1000, len(cell.states), generator=generator)
    gates[:50] *= 10
    states[:100] = 0
    if "n" in cell.states:
        states[100:, cell.states.index("n")].abs_().add_(1)
    return gates, states


def every_operator() -> Graph:
    """Return a graph with an output per operator, on x, y and a constant, and with constants that are hard to print."""
    graph = Graph()
    x, y, c = graph.input("x"), graph.input("y"), graph.const(-0.75)
    positive = graph.add("add", graph.add("abs", x), graph.const(0.125))
    truths = {op: graph.add(op, x, y) for op in ("eq", "ne", "lt", "le", "gt", "ge")}
    for op in OPERATORS:
        if op in truths:
            value = truths[op]
        elif op in ("and", "or"):
            value = graph.add(op, truths["lt"], graph.add("not", truths["le"]))
        elif op == "not":
            value = graph.add(op, truths["ne"])
        elif op == "where":
            value = graph.add(op, truths["gt"], x, c)
        elif op in ("add", "sub", "mul", "div", "max", "min", "fmod", "copysign"):
            value = graph.add("add", graph.add(op, x, c), graph.add(op, c, y))
        elif op in ("pow", "log", "sqrt", "rsqrt"):
            value = graph.add(op, *((positive, y) if op == "pow" else (positive,)))
        else:
            value = graph.add(op, graph.add("sub", x, c))
        graph.outputs[op] = graph.add("where", value, graph.const(2), c) if op in TRUTH else value
    for constant in (math.inf, -math.inf, math.nan, 1e-30, 3e38, -0.1, 0.0, 7.0):
        graph.outputs[f"constant {constant}"] = graph.add("where", truths["lt"], graph.const(constant), y)
        graph.outputs[f"result {constant}"] = graph.const(constant)
    return graph


def operands() -> Tensor:
    """Return values x and y [500, 2] for `every_operator`, including equal numbers, zeros and NaN."""
    values = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    values[0] = 0
    values[1:20, 1] = values[1:20, 0]
    values[20, 0], values[21, 1] = math.nan, math.nan
    return values
