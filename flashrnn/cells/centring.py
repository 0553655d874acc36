"""A norm over all recurrent gates of a cell, from whose values a kernel has already subtracted their mean.

The mean over gates and units of b + R h is linear in h, so a kernel computes it beside R h. One sum is left, that of
squares.
"""

from functools import cache

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import Graph, Norm
from flashrnn.cells.trace import trace

MEAN_SQUARE = "mean_square"
"""The input of the graphs below: the mean square of the centred gates over gates and units."""


@cache
def is_centred(cell: Cell) -> bool:
    """Return whether the step's only use of its recurrent gates is one norm over all of them.

    This requires that they have no input parts.
    """
    if set(cell.recurrent_gates).intersection(cell.input_gates):
        return False
    step = trace(cell).forward
    return _norm(cell, step) is not None and set(cell.recurrent_gates).isdisjoint(_without(cell, step).inputs)


def centred(cell: Cell, graph: Graph) -> Graph:
    """Return a graph that contains the step of a cell for which `is_centred` is true, given centred recurrent gates.

    The graph has a further input MEAN_SQUARE, and the norm's mean is zero. So it is in the statistics, if the graph has
    these as outputs: they belong to the centred gates.
    """
    norm = _norm(cell, graph)
    assert norm is not None
    mean, scale = _mean_and_scale(graph, norm)
    part = graph.extract(graph.outputs, {mean: "mean", scale: "scale"})
    whole, here = Graph(), {}
    for index, node in enumerate(part.nodes):
        if node.value == "mean":
            here[index] = whole.const(0)
        elif node.value == "scale":
            here[index] = whole.add("rsqrt", whole.add("add", whole.input(MEAN_SQUARE), whole.const(norm.eps)))
        else:
            here[index] = whole.copied(node, here)
    whole.outputs = {name: here[index] for name, index in part.outputs.items()}
    return whole


def _norm(cell: Cell, graph: Graph) -> Norm | None:
    """Return the centred norm over exactly the recurrent gates."""

    def is_of_gates(one: Norm) -> bool:
        names = sorted(str(graph.nodes[k].value) for k in one.values)
        return one.centered and names == sorted(cell.recurrent_gates)

    return next(filter(is_of_gates, graph.norms), None)


def _mean_and_scale(graph: Graph, norm: Norm) -> tuple[int, int]:
    """Return the nodes of the mean and the reciprocal deviation, of which (value - mean) * scale are the results."""
    args = graph.nodes[norm.normalised[0]].args
    (centred,) = (a for a in args if graph.nodes[a].op == "sub" and graph.nodes[a].args[0] in norm.values)
    return graph.nodes[centred].args[1], args[args[0] == centred]


def _without(cell: Cell, step: Graph) -> Graph:
    """Return the step as a function of the norm's results."""
    norm = _norm(cell, step)
    assert norm is not None
    return step.extract(step.outputs, {k: f"normalised{i}" for i, k in enumerate(norm.normalised)})
