"""The functions of a cell that are printed, independent of the language."""

from typing import NamedTuple

import torch

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import Graph
from flashrnn.cells.trace import trace


class Function(NamedTuple):
    """A graph to be printed as a function, with arguments and results in groups, in the order of the cell."""

    name: str
    graph: Graph
    inputs: dict[str, tuple[str, ...]]  # name of the group -> names of its elements
    outputs: dict[str, tuple[str, ...]]


def functions(cell: Cell, dtype: torch.dtype = torch.float32) -> tuple[Function, ...]:
    """Return `cell_forward`, `cell_factors` and `cell_backward` of a cell for a dtype (see `trace`)."""
    graphs = trace(cell, dtype)
    step = {"g": cell.gates, "s": cell.states}
    factors = tuple(sorted(graphs.factors.outputs, key=lambda name: int(name.removeprefix("factor"))))
    new = tuple(f"new_{state}" for state in cell.states)
    cotangents = tuple(f"d_{name}" for name in new)
    gradients = {group: tuple(f"d_{name}" for name in names) for group, names in step.items()}
    return (
        Function("cell_forward", graphs.forward, step, {"fresh": new}),
        Function("cell_factors", graphs.factors, step, {"factors": factors}),
        Function(
            "cell_backward",
            graphs.backward,
            {"factors": factors, "d_new": cotangents},
            {"d_g": gradients["g"], "d_old": gradients["s"]},
        ),
    )
