"""Scalar graphs as Triton device functions, of operators that every GPU and Triton's interpreter have."""

import math

from flashrnn.cells import Cell
from flashrnn.codegen.functions import Function, functions
from flashrnn.codegen.graph import Node
from flashrnn.codegen.printing import operations

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|",
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "~"}
# Errors are absolute for results of size 1. No argument overflows to NaN: exp2 may be infinite, its inverse is then 0.
# exp2 and rsqrt, squared for an inverse, are one instruction each; exp and a division are five and six on NVIDIA GPUs.
_EXP = "tl.exp2(1.4426950408889634 * {0})"
_LOGISTIC = "tl.rsqrt(1.0 + tl.exp2({scale} * {{0}})) * tl.rsqrt(1.0 + tl.exp2({scale} * {{0}}))"
_FORMULA = {
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
    inputs = {name: f"x_{name}" for name in arguments}
    like = inputs[arguments[0]]

    def expression(node: Node, args: list[str]) -> str:
        if node.op == "pow":
            args = [_full(like, value) if function.graph.constant(a) is not None else value
                    for a, value in zip(node.args, args, strict=True)]  # fmt: skip
        return _expression(node.op, args)

    printed, texts = operations(function.graph, results, inputs, _literal, expression)
    texts = [_full(like, text) if function.graph.constant(function.graph.outputs[name]) is not None else text
             for name, text in zip(results, texts, strict=True)]  # fmt: skip
    lines = [f"def {function.name}({', '.join(inputs.values())}):"]
    lines += [f"    {value} = {text}" for value, _, text in printed]
    return "\n".join([*lines, f"    return ({''.join(text + ', ' for text in texts)})"])


def cell_functions(cell: Cell) -> str:
    """`cell_forward`, `cell_factors` and `cell_backward` of a cell (see `trace.Trace`), as the text of a module."""
    return "\n\n\n".join(["import triton.language as tl", *map(device_function, functions(cell))]) + "\n"


def _literal(value: float) -> str:
    return f"({value!r})" if math.isfinite(value) else f"float('{value}')"


def _full(like: str, literal: str) -> str:
    return f"tl.full({like}.shape, {literal}, tl.float32)"


def _expression(op: str, args: list[str]) -> str:
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in _PREFIX:
        return f"{_PREFIX[op]}{args[0]}"
    return _FORMULA.get(op, f"tl.{op}({{0}})").format(*args)
