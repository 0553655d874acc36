"""What fused backends do after the time loop of the backward: d_R as one product over all steps."""

from typing import NamedTuple

from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.problem import is_time_major, rows_like


def recurrent_only(cell: Cell) -> tuple[str, ...]:
    """The gates without an input, whose gradients the backward keeps apart."""
    return tuple(gate for gate in cell.recurrent_gates if gate not in cell.input_gates)


def places(cell: Cell, names: tuple[str, ...]) -> tuple[int, ...]:
    """Where each gate stands among `names`, -1 if it does not."""
    return tuple(names.index(gate) if gate in names else -1 for gate in cell.gates)


def row_strides(Wx: Tensor) -> tuple[int, int]:
    """Distance of batch and time steps in rows of [.., N, D]."""
    B, T = Wx.shape[:2]
    return (1, B) if is_time_major(Wx) else (T, 1)


def _flat(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B*T, ...] in memory order."""
    return (x.transpose(0, 1) if is_time_major(x) else x).flatten(0, 1)


def previous_h(h: Tensor, initial: Tensor | float, reset: Tensor | None) -> Tensor:
    """h before every step, [B, T, N, D] in the memory order of h."""
    before = rows_like(h, *h.shape[2:])
    before[:, 0] = initial
    before[:, 1:] = h[:, :-1]
    return before if reset is None else before.masked_fill_(reset[:, :, None, None], 0)


def gate_views(cell: Cell, d_Wx: Tensor, d_u: Tensor) -> list[Tensor]:
    """Where the gradients of the recurrent gates stand: [N, B*T, D] for each, or, where they lie side by side (one
    head), one [1, B*T, Gr*D] for all."""
    only = recurrent_only(cell)
    if d_Wx.shape[3] == 1 and cell.recurrent_gates == cell.input_gates:
        return [_flat(d_Wx).flatten(1)[None]]
    with_input, without = (_flat(x).permute(1, 2, 0, 3).unbind() for x in (d_Wx, d_u))
    return [
        without[only.index(gate)] if gate in only else with_input[cell.input_gates.index(gate)]
        for gate in cell.recurrent_gates
    ]


class Part(NamedTuple):
    """Rows of the gates [N, B*T, D], and what to add for them: their product with `h`, `sign` times."""

    rows: slice
    h: Tensor  # [N, as many, D]
    sign: int = 1


def whole(h_before: Tensor) -> list[Part]:
    """All rows, with h before every step [B, T, N, D]."""
    rows = _flat(h_before).transpose(0, 1)
    return [Part(slice(None), rows)]


def rows_before(h: Tensor, states: Tensor | None, reset: Tensor | None) -> list[Part]:
    """All rows, with h before every step: a copy of h where `reset` changes it, otherwise h itself, shifted by a row.

    Initial states [S, B, N, D], None: zeros. The largest product comes last, because sums of products are rounded.
    """
    if reset is not None:
        return whole(previous_h(h, 0 if states is None else states[0], reset))
    (B, T), rows = h.shape[:2], _flat(h).transpose(0, 1)
    if is_time_major(h) or B == 1 or T == 1:
        first, parts = slice(0, B), [Part(slice(B, None), rows[:, :-B])]
    else:
        others = rows[:, T - 1 : -1 : T]  # the last h of a sequence stands in front of the next one
        first, parts = slice(0, None, T), [Part(slice(T, None, T), others, sign=-1), Part(slice(1, None), rows[:, :-1])]
    return parts if states is None else [Part(first, states[0].transpose(0, 1).to(h.dtype)), *parts]


def outer_products(d_gates: list[Tensor], parts: list[Part]) -> Tensor:
    """d_R [Gr, N, D, D]: the sum over all steps and sequences of the gate's gradient times the h it saw."""
    (N, _, width), D = d_gates[0].shape, parts[0].h.shape[2]
    d_R = d_gates[0].new_empty(len(d_gates), N, width, D)
    for to, d_gate in zip(d_R, d_gates, strict=True):
        for k, (rows, h, sign) in enumerate(parts):
            to.baddbmm_(d_gate[:, rows].transpose(1, 2), h, beta=min(k, 1), alpha=sign)
    return d_R.view(-1, N, D, D)
