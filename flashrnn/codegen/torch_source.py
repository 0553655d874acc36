"""Scalar graphs as Python functions on PyTorch tensors."""

import math
from collections.abc import Callable, Sequence

import torch

from flashrnn.codegen.graph import Graph, Node
from flashrnn.codegen.printing import operations

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "and": "&", "or": "|",
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "~"}
_CLAMP = {"max": ("maximum", "min"), "min": ("minimum", "max")}


def torch_function(graph: Graph, arguments: Sequence[str], results: Sequence[str]) -> Callable:
    """A function of tensors `arguments` that returns the tuple of the graph's outputs `results`.

    An output that is a constant is returned as a float.
    """

    def expression(node: Node, args: list[str]) -> str:
        is_constant = [graph.constant(a) is not None for a in node.args]
        if node.op == "where" and is_constant[1:] == [True, True]:
            args[1] = f"x_{arguments[0]}.new_full((), {args[1]})"  # two numbers would give the default dtype
        return _expression(node.op, args, is_constant)

    inputs = {name: f"x_{name}" for name in arguments}
    printed, texts = operations(graph, results, inputs, lambda value: f"({value!r})", expression)
    lines = [f"def function({', '.join(inputs.values())}):"]
    lines += [f"    {value} = {text}" for value, _, text in printed]
    lines.append(f"    return ({''.join(text + ', ' for text in texts)})")
    scope: dict = {"torch": torch, "inf": math.inf, "nan": math.nan}
    exec("\n".join(lines), scope)
    return scope["function"]


def _expression(op: str, args: list[str], is_constant: list[bool]) -> str:
    if op in _INFIX:
        return f"({args[0]} {_INFIX[op]} {args[1]})"
    if op in _PREFIX:
        return f"({_PREFIX[op]}{args[0]})"
    if op in _CLAMP:
        tensors, bound = _CLAMP[op]
        if any(is_constant):
            constant = is_constant.index(True)
            return f"torch.clamp({args[1 - constant]}, {bound}={args[constant]})"
        return f"torch.{tensors}({args[0]}, {args[1]})"
    return f"torch.{op}({', '.join(args)})"
