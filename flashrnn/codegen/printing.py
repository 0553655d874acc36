"""What the printers share: the walk over a graph, from inputs to results."""

from collections.abc import Callable, Iterable, Mapping

from flashrnn.codegen.graph import Graph, Node


def operations(
    graph: Graph,
    results: Iterable[str],
    inputs: Mapping[str, str],
    literal: Callable[[float], str],
    expression: Callable[[Node, list[str]], str],
) -> tuple[list[tuple[str, Node, str]], list[str]]:
    """The operations that the outputs `results` need, in order, as (name of the value, node, text); the results' texts.

    `inputs` has the text of every input, `literal` gives that of a constant and `expression` that of an operator on
    the texts of its operands.
    """
    results, lines, texts = list(results), [], {}
    for index in graph.needed(graph.outputs[name] for name in results):
        node = graph.nodes[index]
        if node.op == "input":
            texts[index] = inputs[node.value]
        elif node.op == "const":
            texts[index] = literal(node.value)
        else:
            texts[index] = f"v{index}"
            lines.append((texts[index], node, expression(node, [texts[a] for a in node.args])))
    return lines, [texts[graph.outputs[name]] for name in results]
