"""What a training forward leaves for its backward."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.memory_format import empty_in_format, in_format

GateFormat = Literal["GND", "NGD", "NDG", "PNDG"]
"""The axes of one step's gates in memory, the outermost first.

G are the gates in the cell's order, N the heads, D the units of a head. P are G pieces, into which the units of a head
are cut: what one piece of a head takes lies where a gate of that head lies in format GND.
"""


class Residual(NamedTuple):
    """Inputs, results and gates of a forward with `training`.

    The gates are the pre-activations, saturated to `residual_dtype`. Every backend writes and reads them in the format
    that suits its kernels, and says which one that is by its `gate_format`. Those in another format it converts.
    """

    R: Tensor
    states: Tensor | None  # the initial ones, as the forward had them
    reset: Tensor | None
    h: Tensor  # [B, T, N, D], in the memory format of Wx, as aux and gates
    aux: Tensor  # [S-1, B, T, N, D]
    gates: Tensor  # [B, T, *the axes of gate_format]
    gate_format: GateFormat
    donated: bool = False  # nobody reads gates after this backward pass, which may overwrite them
    b_dtype: torch.dtype | None = None  # that the gradient of b should have; None: state dtype

    def gates_in(self, wanted: GateFormat) -> Tensor:
        """Return gates [B, T, *the axes of `wanted`], in the memory format of h."""
        return converted(in_format(self.gates, self.h), self.gate_format, wanted)


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gates, and of states where a cell allows it, that are there for the backward alone.

    Of the half types it is float16. Its error, 2^-11 of a number, is that of an exponential gate of size 1. That of
    bfloat16 would be eight times as much. Numbers beyond its range become its largest number.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def empty_gates(cell: Cell, Wx: Tensor, training: bool, gate_format: GateFormat) -> Tensor:
    """Return an empty tensor [B, T, *the axes of `gate_format`], without time steps if there is no training."""
    G, (N, D) = len(cell.gates), Wx.shape[3:]
    inner = {"GND": (G, N, D), "NGD": (N, G, D), "NDG": (N, D, G), "PNDG": (G, N, D // G, G)}[gate_format]
    return empty_in_format(Wx, *inner, steps=None if training else 0, dtype=residual_dtype(Wx.dtype))


def converted(gates: Tensor, given: GateFormat, wanted: GateFormat) -> Tensor:
    """Return gates in another format, dense; in the same one they are not copied."""
    if given == wanted:
        return gates
    by_gate = as_gnd(gates, given)
    if wanted == "PNDG":
        pieces = by_gate.unflatten(4, (by_gate.shape[2], -1))  # [B, T, G, N, P, D/P]
        return in_format(pieces.permute(0, 1, 4, 3, 5, 2), gates)
    axes = {"GND": (2, 3, 4), "NGD": (3, 2, 4), "NDG": (3, 4, 2)}[wanted]
    return in_format(by_gate.permute(0, 1, *axes), gates)


def as_gnd(gates: Tensor, given: GateFormat) -> Tensor:
    """Return gates as [B, T, G, N, D], a view if there is one."""
    if given == "PNDG":
        return gates.permute(0, 1, 5, 3, 2, 4).flatten(4)
    axes = {"GND": (2, 3, 4), "NGD": (3, 2, 4), "NDG": (4, 2, 3)}[given]
    return gates.permute(0, 1, *axes)
