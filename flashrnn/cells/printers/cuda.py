"""Scalar graphs as CUDA C++ device functions."""

import math
from collections.abc import Sequence

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import TRUTH, Graph, Node
from flashrnn.cells.printers.functions import functions
from flashrnn.cells.printers.printing import EVERYWHERE, operations, write

_FORMULA = EVERYWHERE | {"and": "{0} && {1}", "or": "{0} || {1}", "not": "!{0}", "where": "{0} ? {1} : {2}"}


def device_function(
    graph: Graph, name: str, inputs: dict[str, Sequence[str]], outputs: dict[str, Sequence[str]]
) -> str:
    """Return a device function of float arrays; `inputs` and `outputs` name every array and its elements."""
    arrays = [f"const float (&{a})[{max(len(names), 1)}]" for a, names in inputs.items()]
    arrays += [f"float (&{a})[{max(len(names), 1)}]" for a, names in outputs.items()]
    place = {element: f"{a}[{k}]" for a, names in inputs.items() for k, element in enumerate(names)}
    printed, texts = operations(graph, graph.outputs, place, _literal, _expression)
    lines = [f"DEVICE void {name}({', '.join(arrays)}) {{"]
    for value, node, text in printed:
        lines.append(f"  const {'bool' if node.op in TRUTH else 'float'} {value} = {text};")
    results = dict(zip(graph.outputs, texts, strict=True))
    for array, names in outputs.items():
        lines += [f"  {array}[{k}] = {results[element]};" for k, element in enumerate(names)]
    return "\n".join([*lines, "}"])


def cell_functions(cell: Cell) -> str:
    """Return the text of `cell_forward`, `cell_factors` and `cell_backward` of a cell (see `trace.Trace`)."""
    return "\n\n".join(device_function(f.graph, f.name, f.inputs, f.outputs) for f in functions(cell))


def _literal(value: float) -> str:
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return "NAN" if math.isnan(value) else f"{value!r}f"


def _expression(node: Node, args: list[str]) -> str:
    return write(node.op, args, _FORMULA, "op_")
