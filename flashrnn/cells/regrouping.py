"""Sums and products regrouped such that only one operation waits for the operand that is known last."""

from collections import Counter
from collections.abc import Callable, Sequence

from flashrnn.cells.graph import Graph, moved


def regrouped(graph: Graph, order: Callable[[Graph], Sequence[int]], late: int) -> Graph:
    """Return the graph with operands of chains of additions or multiplications in the order in which they are known.

    `order(graph)` returns for every node a number that says when it is known, at least that of each operand. A chain
    passes through a value that is also used elsewhere, which is then computed twice, if all of its operands are known
    at `late` or later: other values might become early ones.
    """
    whole, here, known = Graph(), {}, order(graph)
    needed = graph.needed(graph.outputs.values())
    uses = Counter([*(a for k in needed for a in graph.nodes[k].args), *graph.outputs.values()])

    def operands(op: str, index: int) -> list[int]:
        node = graph.nodes[index]
        follows = node.op == op and (uses[index] == 1 or all(known[a] >= late for a in node.args))
        return [k for a in node.args for k in operands(op, a)] if follows else [index]

    for index in needed:
        node = graph.nodes[index]
        if node.op in ("add", "mul") and len({known[a] for a in node.args}) > 1:
            parts = [k for a in node.args for k in operands(node.op, a)]
            first, *others = (here[k] for k in sorted(parts, key=lambda k: known[k]))
            for other in others:
                first = whole.add(node.op, first, other)
            here[index] = first
        else:
            here[index] = whole.copied(node, here)
    whole.outputs = {name: here[index] for name, index in graph.outputs.items()}
    whole.norms = moved(graph.norms, here)
    return whole
