"""PyTorch's element-wise operators: OPERATORS are those that scalar graphs have; PARTS are others, as functions of
tensors, and what these functions do is recorded in place of the operator."""

from collections.abc import Callable

import torch
from torch import Tensor

from flashrnn.cells import graph

OPERATORS: dict[str, str] = {
    name: op
    for op, names in {
        "neg": "neg", "add": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow", "max": "maximum",
        "min": "minimum", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "sign": "sign sgn",
        "expm1": "expm1", "log1p": "log1p", "rsqrt": "rsqrt", "tanh": "tanh", "sigmoid": "sigmoid", "sin": "sin",
        "cos": "cos", "erf": "erf", "eq": "eq", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
        "ne": "ne logical_xor bitwise_xor",
        "and": "logical_and bitwise_and", "or": "logical_or bitwise_or", "not": "logical_not bitwise_not",
        "where": "where",
    }.items()
    for name in names.split()
}  # fmt: skip
"""PyTorch's name -> the graph's."""
assert set(OPERATORS.values()) == set(graph.OPERATORS)


def _reciprocal(x: Tensor) -> Tensor:
    return torch.div(torch.ones_like(x), x)


def _relu(x: Tensor) -> Tensor:
    return torch.maximum(x, torch.zeros_like(x))


PARTS: dict[str, Callable[..., Tensor]] = {"reciprocal": _reciprocal, "relu": _relu}
"""PyTorch's name -> the same of simpler operators."""
