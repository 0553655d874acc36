"""Division of a graph with reductions over units into loops over units, for languages without vector operations."""

from collections.abc import Iterable
from typing import NamedTuple

from flashrnn.cells.graph import REDUCTIONS, TRUTH, Graph


class Phase(NamedTuple):
    """Nodes that are equal in all units, then a loop over units, then the reductions that depend on this loop.

    Reductions that do not depend on each other are in the same phase. The last phase has no reductions; its loop
    computes the results.
    """

    uniform: tuple[int, ...]
    reads: tuple[int, ...]  # nodes computed by earlier loops
    computes: tuple[int, ...]  # nodes in the order of execution, including inputs
    reductions: tuple[int, ...]


def phases(graph: Graph, results: Iterable[int]) -> list[Phase]:
    """Return the phases that compute the nodes `results`. Each node is computed in the first phase that needs it."""
    results = list(results)
    order, level = graph.needed(results), {}
    for index in order:
        node = graph.nodes[index]
        level[index] = max((level[a] for a in node.args), default=0) + (node.op in REDUCTIONS)
    computed: set[int] = set()
    found = []
    for number in range(max(level.values(), default=0) + 1):
        reductions = [k for k in order if graph.nodes[k].op in REDUCTIONS and level[k] == number + 1]
        wanted = [graph.nodes[k].args[0] for k in reductions] or results
        reads, computes = _loop(graph, wanted, computed)
        uniform = [k for k in order if level[k] == number and graph.is_uniform(k) and _is_operation(graph, k)]
        found.append(Phase(tuple(uniform), reads, computes, tuple(reductions)))
        computed |= {k for k in computes if _is_operation(graph, k) and graph.nodes[k].op not in TRUTH}
    return found


def stored_nodes(graph: Graph, found: Iterable[Phase]) -> list[int]:
    """Return the nodes whose values in all units must be stored: those that later loops read or that are reduced."""
    reduced = {graph.nodes[k].args[0] for phase in found for k in phase.reductions}
    reduced = {k for k in reduced if not graph.is_uniform(k) and graph.nodes[k].op != "input"}
    return sorted(reduced.union(*(phase.reads for phase in found)))


def _is_operation(graph: Graph, index: int) -> bool:
    return graph.nodes[index].op not in ("input", "const", *REDUCTIONS)


def _loop(graph: Graph, wanted: Iterable[int], computed: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the nodes of `computed` that a loop for the nodes `wanted` reads, and the nodes that it computes."""
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
