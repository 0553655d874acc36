"""The division of a step into a part that needs nothing of the step before, and the rest."""

from collections.abc import Sequence
from typing import NamedTuple

from flashrnn.cells.centring import MEAN_SQUARE
from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, Graph
from flashrnn.cells.printers.functions import Function
from flashrnn.cells.regrouping import regrouped

_EARLY, _LATE = 16, 32  # when values are known (see _known); constants: 0


class Late(NamedTuple):
    """Inputs that a function requests as late as possible: `late` writes them to the array of their group."""

    group: str
    names: tuple[str, ...]


def late_inputs(cell: Cell) -> dict[str, Late]:
    """Return the late inputs of a step "forward" and "backward"."""
    return {
        "forward": Late("g", (*cell.recurrent_gates, MEAN_SQUARE)),
        "backward": Late("d_new", tuple(f"d_new_{state}" for state in cell.states)),
    }


def with_early(cell: Cell, whole: Function, late: Late) -> tuple[Function, Function]:
    """Return the early part of a step, and the step as a function of its results.

    What depends on constants alone is not among the results: the step computes it itself.
    """
    names = {*late.names, *cell.states}
    constants = {*cell.gates}.difference(cell.input_gates, cell.recurrent_gates)
    graph = regrouped(whole.graph, lambda graph: _known(graph, names, constants), _LATE)
    known = _known(graph, names, constants)
    order = graph.needed(graph.outputs.values())
    used = set(graph.outputs.values()).union(*(graph.nodes[k].args for k in order if known[k] >= _LATE))
    found = [k for k in order if k in used and _EARLY <= known[k] < _LATE and graph.nodes[k].op != "input"]
    results = {k: f"early{i}" for i, k in enumerate(found)}
    inputs = {group: given for group, given in whole.inputs.items() if group == "g" or names.isdisjoint(given)}
    outputs = {"early": tuple(results.values())}
    early = Function(f"{whole.name}_early", graph.extract({results[k]: k for k in found}), inputs, outputs)
    return early, whole._replace(graph=graph.extract(graph.outputs, results), inputs=whole.inputs | outputs)


def _known(graph: Graph, late: set[str], constants: set[str]) -> Sequence[int]:
    """Return when nodes are known: first constants, then values of inputs that are not late, then those of late ones.

    Values after an exchange are known later than those before it. Functions take longer than sums and products.
    """
    found: list[int] = []
    for node in graph.nodes:
        at = max((found[a] for a in node.args), default=0)
        if node.op == "input":
            at = _LATE if node.value in late else 0 if node.value in constants else _EARLY
        exchanged = node.value == MEAN_SQUARE or (node.op in REDUCTIONS and at >= _LATE)
        is_function = node.op not in ("input", "const", "add", "sub", "mul", "neg")
        found.append(at + exchanged * (_LATE - _EARLY) + (is_function and at >= _LATE))
    return found
