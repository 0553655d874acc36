"""What fused backends do around the time loop of the backward: products over all steps at once.

The recurrent sums R h of every step are recomputed by one product before the loop, and d_R is one product after it.
Both use the same room: the loop reads a gate's sum where it then puts the gate's gradient.
"""

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.problem import is_time_major, rows_like


def recurrent_only(cell: Cell) -> tuple[str, ...]:
    """The gates without an input, whose sums the backward keeps apart."""
    return tuple(gate for gate in cell.recurrent_gates if gate not in cell.input_gates)


def row_strides(Wx: Tensor) -> tuple[int, int]:
    """Distance of batch and time steps in rows of [.., N, D]."""
    B, T = Wx.shape[:2]
    return (1, B) if is_time_major(Wx) else (T, 1)


def _flat(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B*T, ...] in memory order."""
    return (x.transpose(0, 1) if is_time_major(x) else x).flatten(0, 1)


def previous_h(h: Tensor, initial: Tensor, reset: Tensor | None) -> Tensor:
    """h before every step, [B, T, N, D] in the memory order of h."""
    before = rows_like(h, *h.shape[2:])
    before[:, 0] = initial
    before[:, 1:] = h[:, :-1]
    return before if reset is None else before.masked_fill_(reset[:, :, None, None], 0)


def gate_views(cell: Cell, d_Wx: Tensor, d_u: Tensor) -> list[Tensor]:
    """Where the sums, and then the gradients, of every recurrent gate stand: Gr x [N, B*T, D]."""
    only = recurrent_only(cell)
    views = []
    for gate in cell.recurrent_gates:
        view = d_u[:, :, only.index(gate)] if gate in only else d_Wx[:, :, cell.input_gates.index(gate)]
        views.append(_flat(view).transpose(0, 1))
    return views


def recurrent_sums(sums: list[Tensor], R: Tensor, h_before: Tensor) -> None:
    """Writes R h into `sums`, for all steps at once, at the speed of the tensor cores."""
    h = _flat(h_before).transpose(0, 1)  # [N, B*T, D]
    for to, matrix in zip(sums, R.transpose(2, 3), strict=True):
        torch.bmm(h, matrix, out=to)


def outer_products(d_gates: list[Tensor], h_before: Tensor) -> Tensor:
    """d_R [Gr, N, D, D]: the sum over all steps and sequences of the gate's gradient times the h it saw."""
    h = _flat(h_before).transpose(0, 1)
    return torch.stack([d_gate.transpose(1, 2) @ h for d_gate in d_gates])
