"""The residual: what a forward pass in training saves for its backward pass."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cells.gates import varying
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.trace import trace
from flashrnn.memory_format import aux_in_format, empty_in_format, in_format
from flashrnn.products import write_previous

GateFormat = Literal["GND", "NGD", "NDG", "NDG+", "PNDG", "NDV", "NDV+"]
"""The axes of one step's gates in memory, the outermost first.

G are the gates in the cell's order, N the heads, D the units of a head. P are G pieces of a head's units; a piece
occupies the memory of one gate of that head in format GND. V are the gates that vary with time, in the cell's order;
all other gates equal their biases b. In format NDG+, the elements [D, G] of a head are one axis, padded to whole cache
lines (`filled`). In format NDV+, the elements [D, V] of a head, normalised if the gradient needs only that, and its
statistics as float32 (`cells.statistics`) are one axis.
"""


class Residual(NamedTuple):
    """The inputs, results and gates of a forward pass with `training`.

    The gates are the pre-activations, saturated to `residual_dtype`. Every backend writes and reads them in the format
    of its kernels, its `gate_format`, and converts gates in another format.
    """

    R: Tensor
    states: Tensor | None  # the initial states that the forward was given
    reset: Tensor | None
    h: Tensor  # [B, T, N, D], in the memory format of Wx, like aux and gates
    aux: Tensor  # [S-1, B, T, N, D]
    gates: Tensor  # [B, T, *the axes of gate_format]
    gate_format: GateFormat
    donated: bool = False  # the backward pass may overwrite the gates, because they are not read again
    b_dtype: torch.dtype | None = None  # dtype of the gradient of b; None: state dtype
    b: Tensor | None = None  # [G, N, D], for the formats NDV and NDV+
    bidirectional: bool = False  # the second half of the heads went through time backwards; only in `cuda_fused`

    def gates_in(self, wanted: GateFormat, cell: Cell) -> Tensor:
        """Return gates [B, T, *the axes of `wanted`], in the memory format of h."""
        gates = in_format(self.gates, self.h)
        if wanted != "NDV+" or self.gate_format == wanted:
            return converted(gates, self.gate_format, wanted, cell, self.b, self.R.shape[-1])
        return in_format(self._with_statistics(cell), gates)

    def one_way(self, cell: Cell) -> "Residual":
        """Return the residual of a bidirectional call, converted to that of a call whose heads all go forwards."""
        gates = turned(as_gnd(self.gates, self.gate_format, cell, self.b, self.R.shape[-1]), 3)
        h, aux = turned(self.h, 2), turned(self.aux.movedim(0, -1), 2).movedim(-1, 0)
        h = in_format(h, self.h)
        return self._replace(
            h=h,
            aux=aux_in_format(aux, h),
            gates=in_format(gates, h),
            gate_format="GND",
            donated=False,
            bidirectional=False,
        )

    def _with_statistics(self, cell: Cell) -> Tensor:
        """Return gates and statistics of every step in format NDV+."""
        gates = as_gnd(self.gates, self.gate_format, cell, self.b, self.R.shape[-1])
        gates = gates.to(torch.promote_types(gates.dtype, torch.float32))
        before = self.h.new_empty(len(cell.states), *self.h.shape, dtype=gates.dtype)
        for i, (out, state) in enumerate(zip(before, (self.h, *self.aux), strict=True)):
            initial = 0.0 if self.states is None else saturated(self.states[i], state.dtype)
            write_previous(out, state, initial, self.reset, slice(0, self.h.shape[1]))
        graph = trace(cell).statistics.forward
        by_name = dict(zip((*cell.gates, *cell.states), (*gates.unbind(2), *before), strict=True))
        for state, after in zip(cell.states[1:], self.aux, strict=True):
            by_name[f"after_{state}"] = after.to(gates.dtype)
        function = torch_function(graph, list(by_name), tuple(graph.outputs))
        by_name |= zip(graph.outputs, function(*by_name.values()), strict=True)
        stored = torch.stack([by_name.get(f"stored_{gate}", by_name[gate]) for gate in varying(cell)], dim=-1)
        statistics = [by_name[name][..., 0] for name in trace(cell).statistics.names]
        padding = [torch.zeros_like(statistics[0])] * (statistics_floats(cell) - len(statistics))
        of_head = torch.stack([*statistics, *padding], dim=-1).float().view(self.gates.dtype)
        return torch.cat([saturated(stored, of_head.dtype).flatten(3), of_head], dim=3)


def turned(x: Tensor, heads: int) -> Tensor:
    """Return x [B, T, ...] with time reversed in the second half of its axis `heads`."""
    forwards, backwards = x.chunk(2, dim=heads)
    return torch.cat([forwards, backwards.flip(1)], dim=heads)


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gates, and states if the cell allows it, are saved for the backward pass.

    It is float16 for both half types, because its rounding error is an eighth of that of bfloat16. Numbers beyond its
    range are replaced by its largest number.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, with numbers beyond its range replaced by its largest number."""
    largest = torch.finfo(dtype).max
    return x.to(dtype) if largest >= torch.finfo(x.dtype).max else x.clamp(-largest, largest).to(dtype)


def statistics_floats(cell: Cell) -> int:
    """Return the number of floats for the statistics of a head in format NDV+, rounded up to vectors of four."""
    return -(-len(trace(cell).statistics.names) // 4) * 4


_CACHE_LINE = 128  # bytes
# Head size above which gates are padded. With padding, a forward pass took 440 instead of 462 us for 12 heads of 200,
# 432 instead of 469 for 248, but 276 instead of 265 for 136; for 56 it was not faster.
_WHOLE_LINES_ABOVE = 192


def filled(cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the gates of each head are padded to whole cache lines, so that no two heads share one."""
    wide = heads > 1 and head_dim > _WHOLE_LINES_ABOVE and head_dim % 16 > 0 and dtype.itemsize == 2
    return wide and len(varying(cell)) == len(cell.gates) and not trace(cell).statistics.names


def head_numbers(cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements per head in the cell's format, NDG, NDG+, NDV or (with statistics) NDV+."""
    size = residual_dtype(dtype).itemsize
    numbers = head_dim * len(varying(cell)) + statistics_floats(cell) * 4 // size
    line = _CACHE_LINE // size if filled(cell, heads, head_dim, dtype) else 1
    return -(-numbers // line) * line


def empty_gates(cell: Cell, Wx: Tensor, training: bool, gate_format: GateFormat) -> Tensor:
    """Return an empty tensor [B, T, *the axes of `gate_format`], with T = 0 without `training`."""
    G, (N, D) = len(cell.gates), Wx.shape[3:]
    if gate_format.endswith("+"):
        inner: tuple[int, ...] = (N, head_numbers(cell, N, D, Wx.dtype))
    else:
        sizes = {"G": G, "N": N, "D": D, "V": len(varying(cell))}
        inner = (G, N, D // G, G) if gate_format == "PNDG" else tuple([sizes[axis] for axis in gate_format])
    return empty_in_format(Wx, *inner, steps=None if training else 0, dtype=residual_dtype(Wx.dtype))


def converted(
    gates: Tensor, given: GateFormat, wanted: GateFormat, cell: Cell, b: Tensor | None, head_dim: int
) -> Tensor:
    """Return the gates of `cell` in format `wanted`, dense, and without a copy if they have that format."""
    if given == wanted:
        return gates
    by_gate = as_gnd(gates, given, cell, b, head_dim)
    if wanted == "PNDG":
        pieces = by_gate.unflatten(4, (by_gate.shape[2], -1))  # [B, T, G, N, P, D/P]
        return in_format(pieces.permute(0, 1, 4, 3, 5, 2), gates)
    if wanted == "NDV":
        by_gate = by_gate[:, :, [cell.gates.index(gate) for gate in varying(cell)]]
    if wanted == "NDG+":
        of_heads = by_gate.permute(0, 1, 3, 4, 2).flatten(3)
        more = head_numbers(cell, by_gate.shape[3], head_dim, gates.dtype) - of_heads.shape[3]
        return in_format(pad(of_heads, (0, more)), gates)
    axes = {"GND": (2, 3, 4), "NGD": (3, 2, 4), "NDG": (3, 4, 2), "NDV": (3, 4, 2)}[wanted]
    return in_format(by_gate.permute(0, 1, *axes), gates)


def as_gnd(gates: Tensor, given: GateFormat, cell: Cell, b: Tensor | None, head_dim: int) -> Tensor:
    """Return gates as [B, T, G, N, D], a view if there is one."""
    if given == "NDV+":
        return as_gnd(_without_statistics(gates, cell, head_dim), "NDV", cell, b, head_dim)
    if given == "NDG+":
        gates, given = gates[..., : head_dim * len(cell.gates)].unflatten(3, (head_dim, -1)), "NDG"
    if given == "NDV":
        all_gates = saturated(b, gates.dtype).expand(*gates.shape[:2], *b.shape).clone()
        all_gates[:, :, [cell.gates.index(gate) for gate in varying(cell)]] = gates.permute(0, 1, 4, 2, 3)
        return all_gates
    if given == "PNDG":
        return gates.permute(0, 1, 5, 3, 2, 4).flatten(4)
    axes = {"GND": (2, 3, 4), "NGD": (3, 2, 4), "NDG": (4, 2, 3)}[given]
    return gates.permute(0, 1, *axes)


def _without_statistics(gates: Tensor, cell: Cell, head_dim: int) -> Tensor:
    """Convert gates from format NDV+ to NDV, undoing the normalisation of normalised gates."""
    numbers = head_dim * len(varying(cell))
    found, statistics = gates[..., :numbers].unflatten(3, (head_dim, -1)).clone(), trace(cell).statistics
    values = gates[..., numbers:].contiguous().view(torch.float32).unbind(3)
    by_name = dict(zip(statistics.names, values, strict=False))
    for gate, (scale, mean) in statistics.normalised.items():
        of_gate = found[..., varying(cell).index(gate)]
        offset = 0.0 if mean is None else by_name[mean][..., None]
        of_gate.copy_(saturated(of_gate / by_name[scale][..., None] + offset, gates.dtype))
    return found
