"""Cuts a graph that reduces over units into loops over units, for languages in which a loop sees one unit at a time."""

from collections.abc import Iterable
from typing import NamedTuple

from flashrnn.cells.graph import REDUCTIONS, TRUTH, Graph


class Phase(NamedTuple):
    """Nodes of the same values in all units, then a loop over units, then the reductions that it has made possible.

    Reductions that do not depend on each other are in the same phase. The last phase has none: its loop gives results.
    """

    uniform: tuple[int, ...]
    reads: tuple[int, ...]  # what earlier loops have computed
    computes: tuple[int, ...]  # in order, inputs among them
    reductions: tuple[int, ...]


def phases(graph: Graph, results: Iterable[int]) -> list[Phase]:
    """Return the phases that compute the nodes `results`; a node is computed in the first one that needs it."""
    results = list(results)
    order, level = graph.needed(results), {}
    for index in order:
        node = graph.nodes[index]
        level[index] = max((level[a] for a in node.args), default=0) + (node.op in REDUCTIONS)
    computed: set[int] = set()
    found = []
    for number in range(max(level.values()) + 1):
        reductions = [k for k in order if graph.nodes[k].op in REDUCTIONS and level[k] == number + 1]
        wanted = [graph.nodes[k].args[0] for k in reductions] or results
        reads, computes = _loop(graph, wanted, computed)
        uniform = [k for k in order if level[k] == number and graph.is_uniform(k) and _is_operation(graph, k)]
        found.append(Phase(tuple(uniform), reads, computes, tuple(reductions)))
        computed |= {k for k in computes if _is_operation(graph, k) and graph.nodes[k].op not in TRUTH}
    return found


def stored_nodes(graph: Graph, found: Iterable[Phase]) -> list[int]:
    """Return the nodes whose values in all units must be stored: what later loops read, and what is reduced."""
    reduced = {graph.nodes[k].args[0] for phase in found for k in phase.reductions}
    reduced = {k for k in reduced if not graph.is_uniform(k) and graph.nodes[k].op != "input"}
    return sorted(reduced.union(*(phase.reads for phase in found)))


def _is_operation(graph: Graph, index: int) -> bool:
    return graph.nodes[index].op not in ("input", "const", *REDUCTIONS)


def _loop(graph: Graph, wanted: Iterable[int], computed: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a loop that computes the nodes `wanted` reads of what is `computed`, and what it computes."""
    todo, reads, computes = list(wanted), set(), set()
    while todo:
        index = todo.pop()
        if graph.is_uniform(index) or index in computes:
            continue
        if index in computed:
            reads.add(index)
        else:
            computes.add(index)
            todo.extend(graph.nodes[index].args)
    return tuple(sorted(reads)), tuple(sorted(computes))
