"""One time step on the CPU, again and again on the same memory: the kernel's arguments are prepared once."""

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cpu.backend import columns, prepared


class Step:
    """A step of a cell that changes `states` in place; see `Recurrence.stepper`.

    Args:
        cell: the cell.
        R: [Gr, N, D, D], which is copied.
        b: [G, N, D], which is copied; None: zeros.
        states: [S, B, N, D], contiguous, in the dtype of R.
    """

    @torch.no_grad()
    def __init__(self, cell: Cell, R: Tensor, b: Tensor | None, states: Tensor) -> None:
        _, B, N, D = states.shape
        self._h = states.new_empty(B, 1, N, D)
        b = R.new_zeros(len(cell.gates), N, D) if b is None else b.to(states.dtype, copy=True)
        given = {
            "x": states.new_empty(B, 1, len(cell.input_gates), N, D),
            "weights": columns(R.transpose(2, 3)),
            "b": b,
        }
        aux, gates = states.new_empty(len(cell.states) - 1, 0), states.new_empty(0)
        # A head's states are read before they are written.
        memory = {"initial": states, "last": states, "aux": aux, "pre": gates}
        self._call = prepared("forward", cell, self._h, None, **memory, **given)
        self._words, self._x = self._call.data.words.numpy(), self._call.fields.index("x")
        self._counters = self._call.counters.numpy()
        self._shape = given["x"][:, 0].shape

    def __call__(self, Wx: Tensor) -> Tensor:
        """Wx [B, Gi, N, D] -> h [B, N, D], which the next call writes over."""
        Wx = Wx.contiguous()
        if Wx.shape != self._shape or Wx.dtype != self._h.dtype:
            raise ValueError(f"Wx is {list(Wx.shape)} in {Wx.dtype}, expected {list(self._shape)} in {self._h.dtype}")
        self._words[self._x] = Wx.data_ptr()
        self._counters[:] = 0
        self._call.run()
        return self._h[:, 0]
