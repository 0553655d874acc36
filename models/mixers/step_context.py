"""Data that the mixers of a model share while it generates: positions, and values computed once per step."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(D: int, base: float, device: torch.device) -> Tensor:
    """Return the angles by which a rotary embedding turns from one position to the next, float32 [D/2]."""
    return base ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)


class StepContext:
    """The positions of a batch in single-step decoding, in static tensors that a CUDA graph can read.

    Attributes:
        position: int64 [rows], the position of each row's next token, counted from 0 with left padding.
        first: int64 [rows], the first position that each row attends to, after padding or another document.
        capacity: number of positions; a row that has ended stays at the last one.
        window: the current step reads the first `window` positions of the cache, or fewer.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.first = torch.zeros(rows, dtype=torch.int64, device=device)
        self.capacity = self.window = capacity
        self._places = torch.arange(capacity, device=device)
        self._of_step: dict[tuple, Tensor] = {}  # shared by all blocks
        self._of_all_steps: dict[Hashable, Any] = {}

    def begin(self, window: int) -> None:
        """Start a step that reads `window` positions of the cache."""
        self.window = window
        self._of_step.clear()

    def tick(self) -> None:
        """Advance all rows by one position."""
        torch.clamp(self.position + 1, max=self.capacity - 1, out=self.position)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, which is called once per key and cached for all steps."""
        if key not in self._of_all_steps:
            self._of_all_steps[key] = make()
        return self._of_all_steps[key]

    def angles(self, D: int, base: float) -> Tensor:
        """Return the cosines and sines of the rotary embedding at each row's position, float32 [2, rows, 1, D/2]."""
        if (D, base) not in self._of_step:
            frequencies = rotary_frequencies(D, base, self.position.device)
            angles = torch.outer(self.position.float(), frequencies)[:, None]
            self._of_step[D, base] = torch.stack((angles.cos(), angles.sin()))
        return self._of_step[D, base]

    def visible(self, read: int, slots: int) -> Tensor:
        """Return the mask of the cached tokens that each row's token attends to, bool [rows, 1, 1, read].

        Args:
            read: number of slots that are read, counted from the first.
            slots: number of slots of the cache; position p is stored in slot p % slots.
        """
        if (read, slots) not in self._of_step:
            position = self.position[:, None]
            held = position - (position - self._places[:read]) % slots  # the position stored last in each slot
            self._of_step[read, slots] = (held >= self.first[:, None])[:, None, None]
        return self._of_step[read, slots]
