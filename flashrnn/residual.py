"""The residual: what a forward pass in training saves for its backward pass."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.memory_format import empty_in_format, in_format
from flashrnn.products import varying

GateFormat = Literal["GND", "NGD", "NDG", "PNDG", "NDV"]
"""The axes of one step's gates in memory, the outermost first.

G are the gates in the cell's order, N the heads, D the units of a head. P are G pieces of a head's units: a piece lies
where format GND has one gate of that head. V are the gates that vary with time, in the cell's order; the others equal
the biases b.
"""


class Residual(NamedTuple):
    """The inputs, results and gates of a forward pass with `training`.

    The gates are the pre-activations, saturated to `residual_dtype`. Every backend writes and reads them in the format
    of its kernels, its `gate_format`, and converts gates in another format.
    """

    R: Tensor
    states: Tensor | None  # the initial states that the forward was given
    reset: Tensor | None
    h: Tensor  # [B, T, N, D], in the memory format of Wx, as aux and gates
    aux: Tensor  # [S-1, B, T, N, D]
    gates: Tensor  # [B, T, *the axes of gate_format]
    gate_format: GateFormat
    donated: bool = False  # the backward pass may overwrite the gates: nobody reads them after it
    b_dtype: torch.dtype | None = None  # of the gradient of b; None: state dtype
    b: Tensor | None = None  # [G, N, D], for format NDV

    def gates_in(self, wanted: GateFormat, cell: Cell) -> Tensor:
        """Return gates [B, T, *the axes of `wanted`], in the memory format of h."""
        return converted(in_format(self.gates, self.h), self.gate_format, wanted, cell, self.b)


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gates, and states where a cell allows it, are saved for the backward pass.

    It is float16 for both half types: its rounding error is an eighth of bfloat16's. Numbers beyond its range become
    its largest number.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`; numbers beyond its range become its largest number."""
    largest = torch.finfo(dtype).max
    return x.to(dtype) if largest >= torch.finfo(x.dtype).max else x.clamp(-largest, largest).to(dtype)


def empty_gates(cell: Cell, Wx: Tensor, training: bool, gate_format: GateFormat) -> Tensor:
    """Return an empty tensor [B, T, *the axes of `gate_format`], without time steps if there is no training."""
    G, (N, D) = len(cell.gates), Wx.shape[3:]
    V = len(varying(cell))
    inner = {"GND": (G, N, D), "NGD": (N, G, D), "NDG": (N, D, G), "PNDG": (G, N, D // G, G), "NDV": (N, D, V)}[
        gate_format
    ]
    return empty_in_format(Wx, *inner, steps=None if training else 0, dtype=residual_dtype(Wx.dtype))


def converted(gates: Tensor, given: GateFormat, wanted: GateFormat, cell: Cell, b: Tensor | None) -> Tensor:
    """Return the gates of `cell` in format `wanted`, dense; not copied if they have that format."""
    if given == wanted:
        return gates
    by_gate = as_gnd(gates, given, cell, b)
    if wanted == "PNDG":
        pieces = by_gate.unflatten(4, (by_gate.shape[2], -1))  # [B, T, G, N, P, D/P]
        return in_format(pieces.permute(0, 1, 4, 3, 5, 2), gates)
    if wanted == "NDV":
        by_gate = by_gate[:, :, [cell.gates.index(gate) for gate in varying(cell)]]
    axes = {"GND": (2, 3, 4), "NGD": (3, 2, 4), "NDG": (3, 4, 2), "NDV": (3, 4, 2)}[wanted]
    return in_format(by_gate.permute(0, 1, *axes), gates)


def as_gnd(gates: Tensor, given: GateFormat, cell: Cell, b: Tensor | None) -> Tensor:
    """Return gates as [B, T, G, N, D], a view if there is one."""
    if given == "NDV":
        all_gates = saturated(b, gates.dtype).expand(*gates.shape[:2], *b.shape).clone()
        all_gates[:, :, [cell.gates.index(gate) for gate in varying(cell)]] = gates.permute(0, 1, 4, 2, 3)
        return all_gates
    if given == "PNDG":
        return gates.permute(0, 1, 5, 3, 2, 4).flatten(4)
    axes = {"GND": (2, 3, 4), "NGD": (3, 2, 4), "NDG": (4, 2, 3)}[given]
    return gates.permute(0, 1, *axes)
