"""Element-wise operations that a step may use, and one cell that uses all of them."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrnn import Cell

OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "acos": torch.acos, "asin": torch.asin, "atan": torch.atan, "ceil": torch.ceil, "cosh": torch.cosh, "elu": F.elu,
    "erfc": torch.erfc, "exp2": torch.exp2, "expm1": torch.expm1, "floor": torch.floor, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "hardtanh": F.hardtanh, "leaky_relu": F.leaky_relu,
    "log1p": torch.log1p, "log2": torch.log2, "mish": F.mish, "round": torch.round, "selu": F.selu, "silu": F.silu,
    "sinh": torch.sinh, "softplus": F.softplus, "tan": torch.tan, "tanh": torch.tanh, "trunc": torch.trunc,
}  # fmt: skip
OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": torch.atan2, "copysign": torch.copysign, "fmod": torch.fmod, "hypot": torch.hypot,
    "remainder": torch.remainder,
}  # fmt: skip


def _every_operation() -> Cell:
    """Return a cell with a state per operation; operands are the gates x_<name> and, if there are two, y_<name>."""
    gates = [f"x_{name}" for name in OF_ONE | OF_TWO] + [f"y_{name}" for name in OF_TWO]

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        of = dict(zip(gates, values, strict=False))
        one = [f(of[f"x_{name}"]) for name, f in OF_ONE.items()]
        return *one, *(f(of[f"x_{name}"], of[f"y_{name}"]) for name, f in OF_TWO.items())

    states = tuple(OF_ONE | OF_TWO)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    step.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in (*gates, *states)])
    return Cell("every_operation", step, states)


EVERY_OPERATION = _every_operation()
