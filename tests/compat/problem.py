"""Random calls of FlashRNN 1.0.8 in any of its layouts, and their states and gradients."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn import get_cell

AXES = {"input_shape": "BTGHD", "recurrent_shape": "GHDP", "bias_shape": "GHD", "output_shape": "SBTHD"}
"""The default layouts."""

OTHERS = (
    {"input_shape": "TBGHD", "recurrent_shape": "HPGD", "bias_shape": "HGD", "output_shape": "STBHD"},
    {"input_shape": "TBHDG", "recurrent_shape": "HDGP", "bias_shape": "HDG", "output_shape": "SBHTD"},
    {"input_shape": "DHGTB", "recurrent_shape": "PDHG", "bias_shape": "DGH", "output_shape": "DHTBS"},
)


class Call(NamedTuple):
    """The tensor arguments of a call."""

    Wx: Tensor
    R: Tensor
    b: Tensor
    states: Tensor | None

    def permuted(self, layouts: Mapping[str, str]) -> "Call":
        """Return the same call in other layouts."""
        pairs = zip(self, AXES, strict=True)
        return Call(*(x if x is None else permuted(x, AXES[field], layouts[field]) for x, field in pairs))


def permuted(x: Tensor, layout: str, wanted: str) -> Tensor:
    return x.permute([layout.index(axis) for axis in wanted])


def random_call(
    function: str, dtype: torch.dtype, T: int = 7, initial: bool = True, B: int = 3, N: int = 2, D: int = 5
) -> Call:
    cell = get_cell(function)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    Wx, b = randn(B, T, len(cell.input_gates), N, D), randn(len(cell.gates), N, D)
    R = randn(len(cell.recurrent_gates), N, D, D) / D**0.5
    states = randn(len(cell.states), B, 1, N, D)
    if "n" in cell.states:
        states[cell.states.index("n")].abs_().add_(1)
    return Call(*(None if x is None else x.to(dtype) for x in (Wx, R, b, states if initial else None)))


def results(run: Callable[..., tuple[Tensor, Tensor]], call: Call, **options) -> dict[str, Tensor]:
    """Return all states and last states of `run`, and the gradients of a random mix of both."""
    inputs = Call(*(x if x is None else x.detach().clone().requires_grad_() for x in call))
    outputs = run(*inputs, **options)
    generator = torch.Generator().manual_seed(1)
    mix = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    gradients = torch.autograd.grad(outputs, [*given.values()], mix)
    named = {f"gradient of {name}": gradient for name, gradient in zip(given, gradients, strict=True)}
    return {"all states": outputs[0].detach(), "last states": outputs[1].detach()} | named
