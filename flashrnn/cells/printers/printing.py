"""Code shared by the printers: the traversal of a graph from inputs to results, and common syntax."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flashrnn.cells.graph import Graph, Node

_INFIX = {"add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
EVERYWHERE = {"neg": "-{0}"} | {op: f"{{0}} {sign} {{1}}" for op, sign in _INFIX.items()}
"""The formulas of operators that all languages have, in the operands {0} and {1}."""
PYTHON = EVERYWHERE | {"div": "{0} / {1}", "and": "{0} & {1}", "or": "{0} | {1}", "not": "~{0}"}


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return the variable of each input in printed code; the names do not collide with others."""
    return {name: f"x_{name}" for name in names}


def operations(
    graph: Graph,
    results: Iterable[str],
    inputs: Mapping[str, str],
    literal: Callable[[float], str],
    expression: Callable[[Node, list[str]], str],
) -> tuple[list[tuple[str, Node, str]], list[str]]:
    """Return the operations for the outputs `results`, in order, as (name, node, text), and the texts of the results.

    `inputs` are the texts of the inputs, `literal` returns the text of a constant, and `expression` that of an
    operator, given the texts of its operands.
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


def write(op: str, args: Sequence[str], formulas: Mapping[str, str], library: str) -> str:
    """Return the text of an operator, given those of its operands: its formula, or a call of `{library}{op}`."""
    return formulas[op].format(*args) if op in formulas else f"{library}{op}({', '.join(args)})"


def python_function(
    name: str, arguments: Iterable[str], printed: Iterable[tuple[str, Node, str]], results: Iterable[str]
) -> str:
    """Return the text of a function of `arguments` that returns the tuple of `results`; see `operations`."""
    lines = [f"def {name}({', '.join(arguments)}):"]
    lines += [f"    {value} = {text}" for value, _, text in printed]
    return "\n".join([*lines, f"    return ({''.join(text + ', ' for text in results)})"])
