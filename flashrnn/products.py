"""The gradient of R, computed after the time loop of a backward pass by one matrix product over all steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cells.gates import recurrent_only
from flashrnn.memory_format import empty_in_format, is_time_major


def _flat(x: Tensor) -> Tensor:
    """Return x [B, T, ...] as [B*T, ...], in memory order."""
    return (x.transpose(0, 1) if is_time_major(x) else x).flatten(0, 1)


def previous_h(h: Tensor, initial: Tensor | float, reset: Tensor | None) -> Tensor:
    """Return h before every step, [B, T, N, D], in the memory format of h."""
    before = empty_in_format(h, *h.shape[2:])
    write_previous(before, h, initial, reset, slice(0, h.shape[1]))
    return before


def write_previous(out: Tensor, state: Tensor, initial: Tensor | float, reset: Tensor | None, steps: slice) -> None:
    """Write a state before each of `steps` to `out` [B, len(steps), N, D]; zeros where `reset` [B, T] is set.

    Args:
        out: the result.
        state: [B, T, N, D] the state after every step.
        initial: [B, N, D] the state before the first step.
        reset: the mask, or None.
        steps: which steps.
    """
    first = int(steps.start == 0)
    if first:
        out[:, 0] = initial
    out[:, first:] = state[:, steps.start + first - 1 : steps.stop - 1]
    if reset is not None:
        out.masked_fill_(reset[:, steps, None, None], 0)


def gate_views(cell: Cell, d_Wx: Tensor, d_u: Tensor) -> list[Tensor]:
    """Return views of the gradients of the recurrent gates: [N, B*T, D] for each gate.

    With one head, gates that are adjacent in memory share a view [1, B*T, gates*D] or [Gr, B*T, D].
    """
    only = recurrent_only(cell)
    if d_Wx.shape[3] == 1 and cell.recurrent_gates == cell.input_gates:
        if d_Wx.is_contiguous():
            return [d_Wx.view(1, -1, d_Wx.shape[2] * d_Wx.shape[4])]
        rows = _flat(d_Wx).squeeze(2)
        return [rows.flatten(1)[None] if rows.stride(1) == rows.shape[2] else rows.transpose(0, 1)]
    if d_Wx.shape[3] == 1 and all(x.shape[2] < 2 or x.stride(2) == x.shape[4] for x in (d_Wx, d_u)):
        rows = _flat(d_Wx), _flat(d_u)
        return [rows[of][:, first:stop].flatten(1)[None] for of, first, stop in _adjacent(cell)]
    with_input, without = (_flat(x).permute(1, 2, 0, 3).unbind() for x in (d_Wx, d_u))
    return [
        without[only.index(gate)] if gate in only else with_input[cell.input_gates.index(gate)]
        for gate in cell.recurrent_gates
    ]


@cache
def _adjacent(cell: Cell) -> list[tuple[int, int, int]]:
    """Return groups of recurrent gates whose gradients are adjacent: whether they are in d_u, and their range there."""
    only, found = recurrent_only(cell), []
    for gate in cell.recurrent_gates:
        in_u = gate in only
        place = (only if in_u else cell.input_gates).index(gate)
        if found and found[-1][0] == in_u and found[-1][2] == place:
            found[-1] = in_u, found[-1][1], place + 1
        else:
            found.append((in_u, place, place + 1))
    return found


def weight_gradient(cell: Cell, d_Wx: Tensor, d_u: Tensor, h_before: Tensor) -> Tensor:
    """Return d_R [Gr, N, D, D], the gates' gradients times the previous h, summed over all steps and sequences."""
    return _product(gate_views(cell, d_Wx, d_u), slice(None), _flat(h_before).transpose(0, 1))


def weight_gradient_of_states(
    cell: Cell,
    d_Wx: Tensor,
    d_u: Tensor,
    h: Tensor,
    states: Sequence[Tensor] | Tensor | None,
    reset: Tensor | None,
    bidirectional: bool = False,
) -> Tensor:
    """Return the same as `weight_gradient`, given h after every step and the initial states, S x [B, N, D] or None.

    h before a step is the row before that of the step, so that h can be read in place; only a `reset` needs
    `previous_h`. With `bidirectional`, which excludes a `reset`, the second half of the heads goes through time
    backwards.
    """
    initial = None if states is None else states[0]
    if reset is not None:
        return weight_gradient(cell, d_Wx, d_u, previous_h(h, 0 if initial is None else initial, reset))
    if not bidirectional:
        return _one_way(cell, d_Wx, d_u, h, initial)
    N = h.shape[2] // 2
    found = []
    for way, heads in enumerate((slice(N), slice(N, None))):
        d_gates, first = (d_Wx[:, :, :, heads], d_u[:, :, :, heads]), None if initial is None else initial[:, heads]
        found.append(_one_way(cell, *d_gates, h[:, :, heads], first, backwards=bool(way)))
    return torch.cat(found, dim=1)


def _one_way(
    cell: Cell, d_Wx: Tensor, d_u: Tensor, h: Tensor, initial: Tensor | None, backwards: bool = False
) -> Tensor:
    B, T, N, D = h.shape
    steps_outside = is_time_major(h) or B == 1 or T == 1
    few = T <= _FEW_STEPS and not steps_outside
    same_gates = cell.recurrent_gates == cell.input_gates
    if N == 1 and same_gates and d_Wx.stride(2) == D and not backwards and (few or steps_outside):
        return _of_one_head(d_Wx, h, initial, few)
    d_gates = gate_views(cell, d_Wx, d_u)
    if T == 1:
        rows = torch.zeros_like(h[:, 0]) if initial is None else initial.to(h.dtype)
        return _product(d_gates, slice(None), rows.transpose(0, 1))
    if few:
        return _product(d_gates, slice(None), _flat(_one_step_later(h, initial, backwards)).transpose(0, 1))
    rows = _flat(h).transpose(0, 1)
    step, first = B if steps_outside else 1, T - 1 if backwards else 0
    d_R = None
    if initial is not None:
        first_steps = slice(first * B, first * B + B) if steps_outside else slice(first, None, T)
        d_R = _product(d_gates, first_steps, initial.transpose(0, 1).to(h.dtype))
    earlier, later = slice(None, -step), slice(step, None)
    steps, before = (earlier, rows[:, later]) if backwards else (later, rows[:, earlier])
    if steps_outside:
        return _product(d_gates, steps, before, d_R)
    # the row before the first step of a sequence is the last h of another sequence
    with _step_cleared([x for x in (d_Wx, d_u) if x.shape[2]], first):
        return _product(d_gates, steps, before, d_R)


def _of_one_head(d_Wx: Tensor, h: Tensor, initial: Tensor | None, few: bool) -> Tensor:
    """Return d_R for a dense d_Wx with as few operators as possible, because host time dominates for short sequences.

    With `few` (see `_one_way`), a copy of h is used; otherwise, time is outermost in memory.
    """
    (B, T, G, _, D), start = d_Wx.shape, d_Wx.storage_offset()
    width = G * D
    if few:
        before = _one_step_later(h, initial, backwards=False).view(-1, D)
        return torch.mm(d_Wx.as_strided((width, B * T), (1, width)), before).view(G, 1, D, D)
    d_R = None
    if T > 1 or initial is None:
        rows = B * (T - 1)
        later, earlier = d_Wx.as_strided((width, rows), (1, width), start + B * width), h.as_strided((rows, D), (D, 1))
        d_R = torch.mm(later, earlier)
    if initial is not None:
        first, before = d_Wx.as_strided((width, B), (1, width)), initial.reshape(B, D).to(h.dtype)
        d_R = torch.mm(first, before) if d_R is None else d_R.addmm_(first, before)
    return d_R.view(G, 1, D, D)


_FEW_STEPS = 32
"""Up to this number of time steps, a copy of h takes less host time than the operations that avoid it."""


def _one_step_later(h: Tensor, initial: Tensor | None, backwards: bool) -> Tensor:
    """Return h [B, T, N, D] before every step as a contiguous tensor; with `backwards`, time goes backwards."""
    if initial is None:
        return torch.constant_pad_nd(h, (0, 0, 0, 0, *((-1, 1) if backwards else (1, -1))))
    first = initial[:, None].to(h.dtype)
    return torch.cat((h[:, 1:], first) if backwards else (first, h[:, :-1]), dim=1)


def _product(d_gates: list[Tensor], steps: slice, h: Tensor, add_to: Tensor | None = None) -> Tensor:
    """Return the product of the rows `steps` of d_gates, in the format of `gate_views`, and h [N, rows, D]."""
    number, _, width = d_gates[0].shape  # number of heads, or of the gates of one head
    N, _, D = h.shape
    widths = [d_gate.shape[2] for d_gate in d_gates]
    if number == N == len(d_gates) == 1 and add_to is None:
        return torch.bmm(d_gates[0][:, steps].transpose(1, 2), h).view(-1, 1, D, D)
    d_R = h.new_empty(number * sum(widths) // (N * D), N, D, D) if add_to is None else add_to
    of_each = d_R.view(1, -1, D).split(widths, dim=1) if number == 1 else d_R.view(len(d_gates), number, width, D)
    for to, d_gate in zip(of_each, d_gates, strict=True):
        to.baddbmm_(d_gate[:, steps].transpose(1, 2), h.expand(number, -1, -1), beta=int(add_to is not None))
    return d_R


@contextmanager
def _step_cleared(gradients: list[Tensor], step: int) -> Iterator[None]:
    """A context in which one step of each gradient [B, T, ...] is zero; it is restored at the end."""
    before = [x[:, step].clone() for x in gradients]
    for x in gradients:
        x[:, step] = 0
    yield
    for x, values in zip(gradients, before, strict=True):
        x[:, step] = values
