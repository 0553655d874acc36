"""Scalar graphs as CUDA C++ device functions."""

import math
from collections.abc import Sequence

from flashrnn.cells import Cell
from flashrnn.codegen.graph import TRUTH, Graph
from flashrnn.trace import trace

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&&", "or": "||",
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "!"}


def device_function(
    graph: Graph, name: str, inputs: dict[str, Sequence[str]], outputs: dict[str, Sequence[str]]
) -> str:
    """A device function of float arrays: `inputs` and `outputs` give every array's name and its elements' names."""
    arrays = [f"const float (&{a})[{max(len(names), 1)}]" for a, names in inputs.items()]
    arrays += [f"float (&{a})[{max(len(names), 1)}]" for a, names in outputs.items()]
    place = {element: f"{a}[{k}]" for a, names in inputs.items() for k, element in enumerate(names)}
    lines = [f"DEVICE void {name}({', '.join(arrays)}) {{"]
    values: dict[int, str] = {}
    for index in graph.needed(graph.outputs.values()):
        node = graph.nodes[index]
        if node.op == "input":
            values[index] = place[node.value]
        elif node.op == "const":
            values[index] = _literal(node.value)
        else:
            values[index] = f"v{index}"
            kind = "bool" if node.op in TRUTH else "float"
            lines.append(f"  const {kind} v{index} = {_expression(node.op, [values[a] for a in node.args])};")
    for array, names in outputs.items():
        lines += [f"  {array}[{k}] = {values[graph.outputs[element]]};" for k, element in enumerate(names)]
    return "\n".join([*lines, "}"])


def cell_functions(cell: Cell) -> str:
    """`cell_forward`, `cell_factors` and `cell_backward` of a cell (see `trace.Trace`)."""
    graphs = trace(cell)
    step = {"g": cell.gates, "s": cell.states}
    factors = sorted(graphs.factors.outputs, key=lambda name: int(name.removeprefix("factor")))
    new = [f"new_{state}" for state in cell.states]
    cotangents = [f"d_new_{state}" for state in cell.states]
    d_gates, d_states = [f"d_{gate}" for gate in cell.gates], [f"d_{state}" for state in cell.states]
    return "\n\n".join(
        (
            device_function(graphs.forward, "cell_forward", step, {"fresh": new}),
            device_function(graphs.factors, "cell_factors", step, {"factors": factors}),
            device_function(
                graphs.backward,
                "cell_backward",
                {"factors": factors, "d_new": cotangents},
                {"d_g": d_gates, "d_old": d_states},
            ),
        )
    )


def _literal(value: float) -> str:
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return "NAN" if math.isnan(value) else f"{value!r}f"


def _expression(op: str, args: list[str]) -> str:
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in _PREFIX:
        return f"{_PREFIX[op]}{args[0]}"
    if op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    return f"op_{op}({', '.join(args)})"
