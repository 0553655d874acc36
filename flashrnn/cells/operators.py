"""PyTorch's element-wise operators: OPERATORS exist in scalar graphs, and PARTS are decomposed into simpler ones."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashrnn.cells import graph

OPERATORS: dict[str, str] = {name: name for name in graph.OPERATORS.keys() - {"max", "min", "and", "or", "not"}} | {
    "maximum": "max", "minimum": "min", "sgn": "sign", "logical_xor": "ne", "bitwise_xor": "ne", "logical_and": "and",
    "bitwise_and": "and", "logical_or": "or", "bitwise_or": "or", "logical_not": "not", "bitwise_not": "not",
}  # fmt: skip
"""PyTorch's name -> the graph's."""


def _relu(x: Tensor) -> Tensor:
    return torch.maximum(x, torch.zeros_like(x))


def _reciprocal(x: Tensor) -> Tensor:
    return torch.div(torch.ones_like(x), x)


def _log2(x: Tensor) -> Tensor:
    return torch.log(x) * (1 / math.log(2))


def _sinh(x: Tensor) -> Tensor:
    minus_one = torch.expm1(x)
    half = torch.exp(0.5 * x)  # whose square alone overflows where sinh does
    small = 0.5 * (minus_one + minus_one / (minus_one + 1))
    return torch.where(torch.abs(x) < 1, small, 0.5 * half * half - 0.5 / half / half)


def _cosh(x: Tensor) -> Tensor:
    half = torch.exp(0.5 * x)
    return 0.5 * half * half + 0.5 / half / half


def _tan(x: Tensor) -> Tensor:
    return torch.sin(x) / torch.cos(x)


def _asin(x: Tensor) -> Tensor:
    return torch.atan(x / torch.sqrt((1 - x) * (1 + x)))


def _acos(x: Tensor) -> Tensor:
    return 2 * torch.atan(torch.sqrt((1 - x) / (1 + x)))


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    low, high = torch.minimum(torch.abs(x), torch.abs(y)), torch.maximum(torch.abs(x), torch.abs(y))
    equal = torch.where(high == 0, 0.0, 1.0)  # zeros and infinities have no quotient
    angle = torch.atan(torch.where(low == high, equal, low / high))
    angle = torch.where(torch.abs(y) > torch.abs(x), math.pi / 2 - angle, angle)
    to_the_left = torch.copysign(torch.ones_like(x), x) < 0
    return torch.copysign(torch.where(to_the_left, math.pi - angle, angle), y)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    low, high = torch.minimum(torch.abs(x), torch.abs(y)), torch.maximum(torch.abs(x), torch.abs(y))
    ratio = torch.where(low == high, 1.0, low / high)
    return high * torch.sqrt(ratio * ratio + 1)


def _ceil(x: Tensor) -> Tensor:
    return -torch.floor(-x)


def _trunc(x: Tensor) -> Tensor:
    return torch.copysign(torch.floor(torch.abs(x)), x)


def _remainder(a: Tensor, b: Tensor | float) -> Tensor:
    rest = torch.fmod(a, b)
    return torch.where(_signs_differ(rest, b), rest + b, rest)


def _rounded_quotient(a: Tensor, b: Tensor | float, *, rounding_mode: str) -> Tensor:
    if rounding_mode == "trunc":
        return torch.trunc(a / b)
    rest, divisor = torch.fmod(a, b), b if isinstance(b, Tensor) else torch.full_like(a, b)
    whole = torch.round((a - rest) / b)
    return torch.where(divisor == 0, a / b, torch.where(_signs_differ(rest, b), whole - 1, whole))


def _signs_differ(rest: Tensor, b: Tensor | float) -> Tensor:
    return torch.copysign(rest, b) != rest  # not where the rest is 0, of either sign


PARTS: dict[str, Callable[..., Tensor]] = {
    "relu": _relu, "reciprocal": _reciprocal, "log2": _log2, "sinh": _sinh, "cosh": _cosh, "tan": _tan, "asin": _asin,
    "acos": _acos, "atan2": _atan2, "hypot": _hypot, "ceil": _ceil, "trunc": _trunc, "remainder": _remainder,
    "div": _rounded_quotient,  # with a rounding mode; OPERATORS has it without
}  # fmt: skip
"""PyTorch's name -> a function that computes the same by simpler operators."""
