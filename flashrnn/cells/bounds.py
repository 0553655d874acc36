"""Checks whether a cell's h stays within a bound that is known before the time loop."""

from functools import cache
from itertools import permutations

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import Graph, Node
from flashrnn.cells.trace import trace

_FRACTION, _ONE, _OF_H = range(3)
"""What is known of a number: it is in [0, 1], its magnitude is at most 1, or it is at most the larger of 1 and the
largest magnitude of h before the step. Each of them implies the next one."""


@cache
def is_bounded(cell: Cell) -> bool:
    """Return whether |h| after a step is at most 1 or the largest |h| before it.

    This is detected if h is a tanh, or z * h + (1 - z) * tanh(...) with a sigmoid z.
    """
    graph, known = trace(cell).forward, []
    for index in range(len(graph.nodes)):
        known.append(_bound(index, graph, known, cell.states[0]))
    return known[graph.outputs[f"new_{cell.states[0]}"]] is not None


def _bound(index: int, graph: Graph, known: list[int | None], h: str) -> int | None:
    node = graph.nodes[index]
    of = [known[a] for a in node.args]
    match node.op:
        case "sigmoid":
            return _FRACTION
        case "tanh":
            return _ONE
        case "input" if node.value == h:
            return _OF_H
        case "const" if abs(node.value) <= 1:
            return _ONE
        case "sub" if graph.constant(node.args[0]) == 1 and of[1] == _FRACTION:
            return _FRACTION
        case "neg" if of[0] is not None:
            return max(of[0], _ONE)
        case "mul" if None not in of and min(of) <= _ONE:
            return max(of)
        case "where" if None not in of[1:]:
            return max(of[1:])
        case "add":
            return _of_mixture([graph.nodes[a] for a in node.args], graph, known)
    return None


def _of_mixture(terms: list[Node], graph: Graph, known: list[int | None]) -> int | None:
    """Return the bound of z * a + (1 - z) * b with z in [0, 1]."""
    if any(term.op != "mul" for term in terms):
        return None
    for first, second in permutations(terms):
        for z, a in permutations(first.args):
            for rest, b in permutations(second.args):
                is_rest = graph.nodes[rest].op == "sub" and graph.nodes[rest].args[1] == z
                if is_rest and known[z] == known[rest] == _FRACTION and None not in (known[a], known[b]):
                    return max(known[a], known[b])
    return None
