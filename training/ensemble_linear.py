"""Linear layers for small models whose weight gradients use the whole GPU."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ROWS = 128  # smallest number of rows per part


class Linear(torch.autograd.Function):
    """F.linear that computes the gradient of the weight as a sum of products over parts of the rows (split-K).

    A small model has thousands of rows for a weight of few tiles, and cuBLAS sums all rows of a tile on one
    multiprocessor.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, d_rows = x.flatten(0, -2), d_y.flatten(0, -2)
        parts = math.gcd(len(rows), 1 << max(1, len(rows) // ROWS).bit_length() - 1)
        d_weight = d_rows.unflatten(0, (parts, -1)).mT @ rows.unflatten(0, (parts, -1))
        return d_y @ weight, d_weight.sum(0), d_rows.sum(0) if ctx.has_bias else None


class InParts(TorchFunctionMode):
    """A context in which F.linear is replaced by `Linear`."""

    def __torch_function__(
        self, function: Callable, types: Sequence, args: Sequence = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.linear:
            return _linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Linear.apply(input, weight, bias)
