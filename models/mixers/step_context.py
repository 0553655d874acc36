"""What the mixers of a model share while it generates: positions of rows, and values computed once per step."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(D: int, base: float, device: torch.device) -> Tensor:
    """Return the angles of a rotary embedding between two positions, float32 [D/2]."""
    return base ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)


class StepContext:
    """The positions of a batch in single-step decoding, in static tensors that a CUDA graph can read.

    Attributes:
        position: int64 [rows], position of a row's next token, from 0, left padding included.
        first: int64 [rows], the first position that a row attends to: before it is padding or another document.
        capacity: number of positions; a row that has ended stays at the last one.
        window: number of positions, from 0, that the current step attends to where nothing limits it to fewer.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.first = torch.zeros(rows, dtype=torch.int64, device=device)
        self.capacity = self.window = capacity
        self._places = torch.arange(capacity, device=device)
        self._of_step: dict[tuple, Tensor] = {}  # shared by all blocks
        self._of_all_steps: dict[Hashable, Any] = {}

    def begin(self, window: int) -> None:
        """Start a step that attends to `window` positions."""
        self.window = window
        self._of_step.clear()

    def tick(self) -> None:
        """Move all rows on by one position."""
        torch.clamp(self.position + 1, max=self.capacity - 1, out=self.position)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for this key in the first step."""
        if key not in self._of_all_steps:
            self._of_all_steps[key] = make()
        return self._of_all_steps[key]

    def angles(self, D: int, base: float) -> Tensor:
        """Return cosines and sines of the rotary embedding at each row's position, float32 [2, rows, 1, D/2]."""
        if (D, base) not in self._of_step:
            frequencies = rotary_frequencies(D, base, self.position.device)
            angles = torch.outer(self.position.float(), frequencies)[:, None]
            self._of_step[D, base] = torch.stack((angles.cos(), angles.sin()))
        return self._of_step[D, base]

    def visible(self, read: int, slots: int) -> Tensor:
        """Return which tokens a row's token attends to, its own included, bool [rows, 1, 1, read].

        Args:
            read: slots that are read, from the first one.
            slots: of the cache, in which position p has slot p % slots.
        """
        if (read, slots) not in self._of_step:
            position = self.position[:, None]
            held = position - (position - self._places[:read]) % slots  # the last position that each slot has had
            self._of_step[read, slots] = (held >= self.first[:, None])[:, None, None]
        return self._of_step[read, slots]
