"""Repeated single steps on the CPU that use the same memory, so that the kernel's arguments are prepared once."""

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cpu.backend import prepared


class Step:
    """A step of a cell that changes `states` in place; see `Recurrence.stepper`.

    Args:
        cell: the cell.
        R: [Gr, N, D, D]; it is copied.
        b: [G, N, D]; it is copied. None means zeros.
        states: [S, B, N, D], contiguous, in the dtype of R.
    """

    @torch.no_grad()
    def __init__(self, cell: Cell, R: Tensor, b: Tensor | None, states: Tensor) -> None:
        _, B, N, D = states.shape
        self._x = states.new_empty(B, len(cell.input_gates), N, D)
        self._h = states.new_empty(B, 1, N, D)
        b = R.new_zeros(len(cell.gates), N, D) if b is None else b.to(states.dtype, copy=True)
        self._kernel = prepared("forward", cell, self._h)
        # The kernel reads a head's states before it writes them.
        self._arguments = {
            "h": self._h,
            "weights": R.clone(memory_format=torch.contiguous_format),
            "b": b.contiguous(),
            "initial": states.unbind(),
            "last": states.unbind(),
        }

    def __call__(self, Wx: Tensor) -> Tensor:
        """Return h [B, N, D] for Wx [B, Gi, N, D]; the next call overwrites it."""
        if Wx.shape != self._x.shape or Wx.dtype != self._x.dtype:
            raise ValueError(f"Wx is {list(Wx.shape)} in {Wx.dtype}, expected {list(self._x.shape)} in {self._x.dtype}")
        self._kernel.run(x=Wx.contiguous(), **self._arguments)
        return self._h[:, 0]
