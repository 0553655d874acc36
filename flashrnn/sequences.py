"""Layouts of sequences in a batch [B, T]: one sequence per row, or several sequences of different lengths."""

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from flashrnn.padded_rows import Gather, Spread


class Whole:
    """A batch [B, T, ...] without padding. Each row is one sequence, or several if a `reset` mask [B, T] divides it."""

    all_states = False

    def __init__(self, reset: Tensor | None):
        self._reset = reset

    @property
    def alike(self) -> bool:
        """Return whether both directions have the same resets."""
        return self._reset is None

    def batch(self, x: Tensor) -> int:
        """Return the number of rows that x is spread over."""
        return x.shape[0]

    def spread(self, x: Tensor, backward: bool) -> Tensor:
        """Return x in the order in which a direction reads it."""
        return x.flip(1) if backward else x

    def gather(self, h: Tensor, backward: bool) -> Tensor:
        """Undo `spread`."""
        return h.flip(1) if backward else h

    def resets(self, backward: bool) -> Tensor | None:
        """Return the mask in the order of `spread`."""
        if self._reset is None or not backward:
            return self._reset
        first = self._reset.flip(1)  # read backwards, a document starts right after the first step of the next one
        return torch.cat([torch.zeros_like(first[:, :1]), first[:, :-1]], dim=1)

    def ends(self, h: Tensor, last, others: tuple[Tensor, ...], backward: bool):
        """Return the last states of the sequences, a tensor [sequences, N, D] for each state.

        Args:
            h: h after every step, in the order of `spread`.
            last: all states after the last step of each row.
            others: the other states after every step, if `all_states`.
            backward: whether the direction is backward.
        """
        return last


class SideBySide:
    """Sequences of different lengths in the rows of a padded batch. A row may contain several short sequences.

    Without initial states, all rows end at the same step, so that the last states are those of the batch, and states
    are reset where a sequence starts. With initial states, all rows start at the same step.

    Args:
        rows: the indices of the sequences in each row.
        lengths: the length of each sequence.
        sequence: [steps], the index of the sequence to which each step of the data belongs, on the data's device.
        time: [steps], the position of each step in its sequence, on the same device.
        initial: there are initial states; each row is then one sequence.
        reset: [B, T], further resets by sequence and time.
    """

    def __init__(
        self,
        rows: list[list[int]],
        lengths: list[int],
        sequence: Tensor,
        time: Tensor,
        initial: bool = False,
        reset: Tensor | None = None,
    ):
        self._rows, self._lengths, self._sequence, self._time = rows, lengths, sequence, time
        self._initial, self._reset = initial, reset
        self._batch, self._steps = len(rows), max(map(self._used, rows))
        self._places: dict[bool, tuple[Tensor, Tensor]] = {}
        self._sources: dict[bool, Tensor] = {}
        self._masks: dict[bool, Tensor | None] = {}

    @cached_property
    def _device_lengths(self) -> Tensor:
        return _moved(self._lengths, self._sequence.device)

    @property
    def all_states(self) -> bool:
        """Return whether `ends` needs the states after every step."""
        return self._initial and self._padded

    @property
    def alike(self) -> bool:
        """Return whether both directions have the same resets."""
        return self._reset is None and self._batch == len(self._lengths)

    @property
    def _padded(self) -> bool:
        return self._batch * self._steps > len(self._sequence)

    def batch(self, x: Tensor) -> int:
        return self._batch

    def spread(self, x: Tensor, backward: bool) -> Tensor:
        """Return x [steps, ...] as [B, T, ...], with time outermost in memory.

        Padding is copies of the first step, because gradients of a cell may not be finite at zero.
        """
        rows = Spread.apply(x, self._source(backward), self._place(backward), True)
        return rows.unflatten(0, (self._steps, self._batch)).transpose(0, 1)

    def gather(self, h: Tensor, backward: bool) -> Tensor:
        return Gather.apply(h.transpose(0, 1).flatten(0, 1), self._source(backward), self._place(backward))

    def resets(self, backward: bool) -> Tensor | None:
        """Return the reset mask [B, T].

        It is True in the padding, where states could otherwise overflow and make gradients NaN.
        """
        if backward not in self._masks:
            self._masks[backward] = self._mask(backward)
        return self._masks[backward]

    def _mask(self, backward: bool) -> Tensor | None:
        if self.alike and not self._padded:
            return None
        place, starts = self._place_and_starts(backward)
        reset = self._source(backward) < 0
        if not self._initial:
            reset.index_fill_(0, starts, True)
        if self._reset is not None:
            # read backwards, a document starts right after the first step of the next one
            time = self._time + 1 if backward else self._time
            within = time < self._device_lengths[self._sequence]
            given = self._reset[self._sequence, torch.where(within, time, 0)] & within
            reset[place] = reset[place] | given
        return reset.view(self._steps, self._batch).T

    def _place(self, backward: bool) -> Tensor:
        """Return the index t * B + b in the batch for each step of the data [steps]."""
        return self._place_and_starts(backward)[0]

    def _source(self, backward: bool) -> Tensor:
        """Return the step of the data for each index in the batch [T * B]; -1 for padding."""
        if backward not in self._sources:
            place = self._place(backward)
            source = place.new_full((self._steps * self._batch,), -1)
            steps = torch.arange(len(place), device=place.device)
            self._sources[backward] = source.index_copy_(0, place, steps)
        return self._sources[backward]

    def _place_and_starts(self, backward: bool) -> tuple[Tensor, Tensor]:
        """Return the indices in the batch of the steps of the data [steps] and of the sequences' starts [sequences]."""
        if backward not in self._places:
            starts = _moved(self._starts(backward), self._sequence.device)
            time = self._device_lengths[self._sequence] - 1 - self._time if backward else self._time
            first = starts.index_select(0, self._sequence)
            self._places[backward] = torch.add(first, time, alpha=self._batch), starts
        return self._places[backward]

    def _starts(self, backward: bool) -> list[int]:
        starts = [0] * len(self._lengths)
        for b, row in enumerate(self._rows):
            t = 0 if self._initial else self._steps - self._used(row)
            for number in reversed(row) if backward else row:
                starts[number] = t * self._batch + b
                t += self._lengths[number]
        return starts

    def _used(self, row: list[int]) -> int:
        return sum(self._lengths[number] for number in row)


def _moved(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
    """Copy a few numbers to `device` asynchronously."""
    # safe from pageable memory, which the driver has read when the call returns
    return torch.as_tensor(numbers).to(device, non_blocking=True)


def numbered(sizes: list[int] | Tensor, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the group of each of `count` items in groups of these sizes, and the index of the item in its group.

    `sizes` are on the CPU, where they are summed, because on a GPU every small operation takes as long as a launch.
    """
    sizes = torch.as_tensor(sizes)
    ends = sizes.cumsum(0)
    ends, before = _moved(torch.stack([ends, ends - sizes]), device)
    items = torch.arange(count, device=device)
    group = torch.bucketize(items, ends, right=True)
    return group, items - before.index_select(0, group)


class Packed(SideBySide):
    """The sequences of a PackedSequence, with the longest first. `reset` [B, T] is in the order before packing."""

    def __init__(self, x: PackedSequence, initial: bool, reset: Tensor | None):
        B, sizes = int(x.batch_sizes[0]), x.batch_sizes
        shorter = torch.bincount(sizes, minlength=B + 1).cumsum(0)  # steps with at most 0, 1, ... sequences
        lengths = (len(sizes) - shorter[:B]).tolist()
        time, sequence = numbered(sizes, len(x.data), x.data.device)
        if reset is not None and x.sorted_indices is not None:
            reset = reset[x.sorted_indices]
        super().__init__([[b] for b in range(B)], lengths, sequence, time, initial, reset)

    def ends(self, h: Tensor, last, others: tuple[Tensor, ...], backward: bool):
        if not self.all_states:
            return last
        numbers, steps = torch.arange(self._batch, device=h.device), self._device_lengths - 1
        return [state[numbers, steps].to(last[0].dtype) for state in (h, *others)]
