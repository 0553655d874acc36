"""Scalar graphs as Python functions on PyTorch tensors."""

import math
from collections.abc import Callable, Sequence

import torch

from flashrnn.cells.graph import REDUCTIONS, Graph, Node
from flashrnn.cells.printers.printing import PYTHON, operations, python_function, variables, write

_FORMULA = PYTHON | {"pow": "{0} ** {1}", "max": "torch.maximum({0}, {1})", "min": "torch.minimum({0}, {1})"}
_FORMULA |= {
    "unit_sum": "{0}.sum(-1, keepdim=True)",
    "unit_mean": "{0}.mean(-1, keepdim=True)",
    "unit_max": "{0}.amax(-1, keepdim=True)",
    "unit_variance": "{0}.var(-1, correction=0, keepdim=True)",
}
_CLAMP = {"max": "min", "min": "max"}  # the argument of clamp for a constant operand
_TENSOR_FIRST = ("fmod", "copysign")  # operators of which only the second operand may be a number


def torch_function(graph: Graph, arguments: Sequence[str], results: Sequence[str]) -> Callable:
    """Return a function of tensors `arguments` that returns the tuple of the graph's outputs `results`.

    An output that is a constant is returned as a float. Reductions go over the last axis.
    """

    def as_tensor(number: str) -> str:
        return f"{inputs[arguments[0]]}.new_full((), {number})"

    def text_of(node: Node, args: list[str]) -> str:
        is_constant = [graph.constant(a) is not None for a in node.args]
        if node.op == "where" and is_constant[1:] == [True, True]:  # with two numbers, the dtype would be the default
            args[1] = as_tensor(args[1])
        if node.op in _TENSOR_FIRST and is_constant[0]:
            args[0] = as_tensor(args[0])
        if node.op in REDUCTIONS and any(is_constant):
            return f"{as_tensor(args[0])} * {inputs[arguments[0]]}.shape[-1]"
        if node.op in _CLAMP and any(is_constant):
            constant = is_constant.index(True)
            return f"torch.clamp({args[1 - constant]}, {_CLAMP[node.op]}={args[constant]})"
        return write(node.op, args, _FORMULA, "torch.")

    inputs = variables(arguments)
    printed, texts = operations(graph, results, inputs, lambda value: f"({value!r})", text_of)
    for k, index in enumerate(graph.outputs[name] for name in results):
        if graph.is_uniform(index) and graph.constant(index) is None:
            texts[k] += f".expand_as({inputs[arguments[0]]})"
    scope: dict = {"torch": torch, "inf": math.inf, "nan": math.nan}
    exec(python_function("function", inputs.values(), printed, texts), scope)
    return scope["function"]
