"""Scalar graphs as Triton device functions, of operators that every GPU and Triton's interpreter have."""

import math

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import Node
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cells.printers.printing import PYTHON, operations, python_function, variables, write

# Errors are absolute for results of size 1. No argument overflows to NaN: exp2 may be infinite, its inverse is then 0.
# exp2 and rsqrt, squared for an inverse, are one instruction each; exp and a division are five and six on NVIDIA GPUs.
_EXP = "tl.exp2(1.4426950408889634 * {0})"
_LOGISTIC = "tl.rsqrt(1.0 + tl.exp2({scale} * {{0}})) * tl.rsqrt(1.0 + tl.exp2({scale} * {{0}}))"
_FORMULA = PYTHON | {
    "exp": _EXP,
    "tanh": f"2.0 * {_LOGISTIC.format(scale=-2.8853900817779268)} - 1.0",
    "sigmoid": _LOGISTIC.format(scale=-1.4426950408889634),
    "expm1": f"{_EXP} - 1.0",
    "log1p": "tl.log(1.0 + {0})",
    "sign": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "where": "tl.where({0}, {1}, {2})",
    "pow": (
        "tl.where({1} == 0.0, 1.0, tl.exp2({1} * tl.log2(tl.abs({0}))) * tl.where({0} >= 0.0, 1.0, "
        "tl.where({1} != tl.floor({1}), float('nan'), 1.0 - 2.0 * ({1} - 2.0 * tl.floor({1} / 2.0)))))"
    ),
}


def device_function(function: Function) -> str:
    """A function of float32 blocks, with an argument per element of its groups, that returns the tuple of results."""
    arguments = [name for group in function.inputs.values() for name in group]
    results = [name for group in function.outputs.values() for name in group]
    inputs = variables(arguments)

    def full(literal: str) -> str:
        return f"tl.full({inputs[arguments[0]]}.shape, {literal}, tl.float32)"

    def text_of(node: Node, args: list[str]) -> str:
        if node.op == "pow":
            args = [full(arg) if is_constant(a) else arg for a, arg in zip(node.args, args, strict=True)]
        return write(node.op, args, _FORMULA, "tl.")

    def is_constant(index: int) -> bool:
        return function.graph.constant(index) is not None

    printed, texts = operations(function.graph, results, inputs, _literal, text_of)
    indices = (function.graph.outputs[name] for name in results)
    texts = [full(text) if is_constant(index) else text for index, text in zip(indices, texts, strict=True)]
    return python_function(function.name, inputs.values(), printed, texts)


def cell_functions(cell: Cell) -> str:
    """`cell_forward`, `cell_factors` and `cell_backward` of a cell (see `trace.Trace`), as the text of a module."""
    return "\n\n\n".join(["import triton.language as tl", *map(device_function, functions(cell))]) + "\n"


def _literal(value: float) -> str:
    return f"({value!r})" if math.isfinite(value) else f"float('{value}')"
