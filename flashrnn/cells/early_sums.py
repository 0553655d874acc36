"""A gradient whose reductions over units need one exchange after the gradients of the new states are known.

A gradient is linear in the gradients of the new states. A sum over units that depends on the result of another one is
thus a sum of products of that result and sums that do not depend on it. Of these, those without gradients of the new
states are early: they are known before these gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, Graph
from flashrnn.cells.linear import split
from flashrnn.cells.trace import trace


@cache
def gradient_with_early_sums(cell: Cell) -> Graph | None:
    """Return the gradient that `trace` has for stored statistics, with early sums; None if these spare no exchange.

    No reduction depends on another one in it. All factors of the gradients of the new states are multiplied with each
    other first.
    """
    gradient = trace(cell).statistics.gradient
    cotangents = tuple(f"d_new_{state}" for state in cell.states)
    late = gradient.depending(lambda node: node.value in cotangents)
    before = _nested_reductions(gradient, lambda index: late[index])
    if not before or any(gradient.nodes[k].op == "unit_max" for k in before):
        return None
    graph = _Rewriting(cell, gradient, cotangents).whole
    late = graph.depending(lambda node: node.value in cotangents)
    found = [k for k in graph.needed(graph.outputs.values()) if graph.nodes[k].op in REDUCTIONS]
    of_units = not any(graph.is_uniform(graph.nodes[k].args[0]) for k in found)
    two = {late[k] for k in found} == {False, True}
    return graph if two and of_units and not _nested_reductions(graph, lambda index: True) else None


def _nested_reductions(graph: Graph, counts: Callable[[int], bool]) -> list[int]:
    """Return the reductions that depend on another one, of those that count."""
    found, depends = [], [False] * len(graph.nodes)
    for k in graph.needed(graph.outputs.values()):
        reduces = graph.nodes[k].op in REDUCTIONS and counts(k)
        depends[k] = any(depends[a] for a in graph.nodes[k].args)
        if reduces and depends[k]:
            found.append(k)
        depends[k] |= reduces
    return found


_Terms = dict[int, int]
"""A sum of products: nodes -> their factors."""


class _Rewriting:
    """Copies a gradient to `whole`, such that reductions of late values do not depend on each other.

    Every node that depends on cotangents is a sum of products whose first operands are cotangents or reductions, and
    whose factors depend on neither.
    """

    def __init__(self, cell: Cell, gradient: Graph, cotangents: Sequence[str]) -> None:
        self.whole, self._cotangents = Graph(), cotangents
        self._reduced: set[int] = set()  # reductions of what depends on cotangents
        self._terms: dict[int, _Terms] = {}
        factors, linear = split(cell, gradient, tuple(cotangents))
        known = self.whole.copy(factors.outputs.values(), factors)
        here: dict[int, int] = {}
        for index in linear.needed(linear.outputs.values()):
            node = linear.nodes[index]
            if node.value in factors.outputs:
                here[index] = known[factors.outputs[node.value]]
            elif node.op in REDUCTIONS:
                here[index] = self._reduce(node.op, here[node.args[0]])
            else:
                here[index] = self.whole.copied(node, here)
        self.whole.outputs = {name: here[index] for name, index in linear.outputs.items()}

    def _reduce(self, op: str, operand: int) -> int:
        """Return the reduction of an operand: that of its terms without reductions, and products with the others."""
        whole, terms = self.whole, self._expand(operand)
        reduced = [k for k in terms if k in self._reduced]
        if reduced:
            operand = whole.const(0)
            for k, factor in terms.items():
                operand = operand if k in self._reduced else whole.add("add", operand, whole.add("mul", factor, k))
        result = whole.add(op, operand)
        self._reduced.add(result)
        for k in reduced:
            result = whole.add("add", result, whole.add("mul", whole.add(op, terms[k]), k))
        return result

    def _expand(self, index: int) -> _Terms:
        """Return a node as a sum of products; nothing if it does not depend on cotangents."""
        if index not in self._terms:
            self._terms[index] = self._expanded(index)
        return self._terms[index]

    def _expanded(self, index: int) -> _Terms:
        whole, node = self.whole, self.whole.nodes[index]
        if index in self._reduced or node.value in self._cotangents:
            return {index: whole.const(1)}
        operands = [self._expand(a) for a in node.args]
        if not any(operands):
            return {}
        if node.op == "mul":
            terms, factor = (operands[0], node.args[1]) if operands[0] else (operands[1], node.args[0])
            return {k: whole.add("mul", own, factor) for k, own in terms.items()}
        assert node.op in ("add", "sub", "neg")
        found: _Terms = {}
        for place, terms in enumerate(operands):
            for k, own in terms.items():
                signed = whole.add("neg", own) if node.op == "neg" or (node.op == "sub" and place) else own
                found[k] = whole.add("add", found[k], signed) if k in found else signed
        return found
