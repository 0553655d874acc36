"""Layouts of sequences in a batch [B, T]: one sequence per row, or several sequences of different lengths."""

import heapq
from collections.abc import MutableMapping
from functools import cache, cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from flashrnn._torch_private import autograd_alone, current_stream
from flashrnn.cuda.dtype_kernel import loaded
from flashrnn.cuda.gather_rows import DTYPE, KERNEL, gather_rows, serves
from flashrnn.problem import KernelUnavailable, on_gpu


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
        self._rows, self._length, self._sequence, self._time = rows, lengths, sequence, time
        self._initial, self._reset = initial, reset
        self._batch, self._steps = len(rows), max(map(self._used, rows))
        self._places: dict[bool, tuple[Tensor, Tensor]] = {}
        self._sources: dict[bool, Tensor] = {}
        self._masks: dict[bool, Tensor | None] = {}

    @cached_property
    def _lengths(self) -> Tensor:
        return _moved(self._length, self._sequence.device)

    @property
    def all_states(self) -> bool:
        """Return whether `ends` needs the states after every step."""
        return self._initial and self._padded

    @property
    def alike(self) -> bool:
        """Return whether both directions have the same resets."""
        return self._reset is None and self._batch == len(self._length)

    @property
    def _padded(self) -> bool:
        return self._batch * self._steps > len(self._sequence)

    def batch(self, x: Tensor) -> int:
        return self._batch

    def spread(self, x: Tensor, backward: bool) -> Tensor:
        """Return x [steps, ...] as [B, T, ...], with time outermost in memory. Padding is copies of the first step,
        because gradients of a cell may not be finite at zero."""
        rows = _Spread.apply(x, self._source(backward), self._place(backward), True)
        return rows.unflatten(0, (self._steps, self._batch)).transpose(0, 1)

    def gather(self, h: Tensor, backward: bool) -> Tensor:
        return _Gather.apply(h.transpose(0, 1).flatten(0, 1), self._source(backward), self._place(backward))

    def resets(self, backward: bool) -> Tensor | None:
        """Return the reset mask [B, T].

        It is True in the padding, where states could otherwise overflow and make gradients NaN.
        """
        if backward not in self._masks:
            self._masks[backward] = self._mask(backward)
        return self._masks[backward]

    def _mask(self, backward: bool) -> Tensor | None:
        if not self._padded and self._reset is None and self._batch == len(self._length):
            return None
        place, starts = self._place_and_starts(backward)
        reset = self._source(backward) < 0
        if not self._initial:
            reset.index_fill_(0, starts, True)
        if self._reset is not None:
            # read backwards, a document starts right after the first step of the next one
            time = self._time + 1 if backward else self._time
            within = time < self._lengths[self._sequence]
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
            time = self._lengths[self._sequence] - 1 - self._time if backward else self._time
            first = starts.index_select(0, self._sequence)
            self._places[backward] = torch.add(first, time, alpha=self._batch), starts
        return self._places[backward]

    def _starts(self, backward: bool) -> list[int]:
        starts = [0] * len(self._length)
        for b, row in enumerate(self._rows):
            t = 0 if self._initial else self._steps - self._used(row)
            for number in reversed(row) if backward else row:
                starts[number] = t * self._batch + b
                t += self._length[number]
        return starts

    def _used(self, row: list[int]) -> int:
        return sum(self._length[number] for number in row)


def _moved(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
    """Copy a few numbers to `device` asynchronously."""
    # safe from pageable memory, which the driver has read when the call returns
    return torch.as_tensor(numbers).to(device, non_blocking=True)


def _numbered(sizes: list[int] | Tensor, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the group of each of `count` items in groups of these sizes, and the index of the item in its group.

    `sizes` are on the CPU, where they are summed, because on a GPU every small operation takes as long as a launch.
    """
    sizes = torch.as_tensor(sizes)
    ends = sizes.cumsum(0)
    ends, before = _moved(torch.stack([ends, ends - sizes]), device)
    items = torch.arange(count, device=device)
    group = torch.bucketize(items, ends, right=True)
    return group, items - before.index_select(0, group)


def _spread(x: Tensor, source: Tensor, place: Tensor, first: bool) -> Tensor:
    """Return the batch [T * B, ...] of the steps x [steps, ...]. Padding is zeros or, if `first`, copies of the first
    step."""
    if _by_kernel(x, len(source)):
        return gather_rows(x, source, first)
    if first:
        return x.index_select(0, source.clamp(min=0))
    return x.new_zeros(len(source), *x.shape[1:]).index_copy_(0, place, x)


def _gathered(x: Tensor, place: Tensor) -> Tensor:
    """Return the steps [steps, ...] of the batch x [T * B, ...]."""
    return gather_rows(x, place) if _by_kernel(x, len(place)) else x.index_select(0, place)


def _by_kernel(x: Tensor, rows: int) -> bool:
    return on_gpu(x) and autograd_alone() and serves(x, rows) and _has_kernel(x.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    try:
        return loaded(KERNEL, DTYPE, device.index) is not None
    except KernelUnavailable:
        return False


class _Spread(torch.autograd.Function):
    """`_spread`, with padding that has no gradient. `source` and `place` are those of SideBySide."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, source, place, first):
        return _spread(x, source, place, first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *indices, ctx.first = inputs
        ctx.save_for_backward(*indices)
        ctx.save_for_forward(*indices)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _spread(tangent, *ctx.saved_tensors, ctx.first)


class _Gather(torch.autograd.Function):
    """`_gathered`. Its gradient is a copy, and not a sum as in PyTorch, because the indices are all different."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, source, place):
        return _gathered(x, place)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        return _Spread.apply(grad, *ctx.saved_tensors, False), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _gathered(tangent, ctx.saved_tensors[1])


class Packed(SideBySide):
    """The sequences of a PackedSequence, with the longest first. `reset` [B, T] is in the order before packing."""

    def __init__(self, x: PackedSequence, initial: bool, reset: Tensor | None):
        B, sizes = int(x.batch_sizes[0]), x.batch_sizes
        shorter = torch.bincount(sizes, minlength=B + 1).cumsum(0)  # steps with at most 0, 1, ... sequences
        lengths = (len(sizes) - shorter[:B]).tolist()
        time, sequence = _numbered(sizes, len(x.data), x.data.device)
        if reset is not None and x.sorted_indices is not None:
            reset = reset[x.sorted_indices]
        super().__init__([[b] for b in range(B)], lengths, sequence, time, initial, reset)

    def ends(self, h: Tensor, last, others: tuple[Tensor, ...], backward: bool):
        if not self.all_states:
            return last
        numbers, steps = torch.arange(self._batch, device=h.device), self._lengths - 1
        return [state[numbers, steps].to(last[0].dtype) for state in (h, *others)]


class Documents(SideBySide):
    """The documents of one sequence [1, T, ...].

    The last states are those after the last document or, in the backward direction, after the first one. This document
    is the last one of its row.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        sequence, time = _numbered(lengths, sum(lengths), device)
        super().__init__(_rows_of_documents(lengths), lengths, sequence, time)

    def spread(self, x: Tensor, backward: bool) -> Tensor:
        return super().spread(x[0], backward)

    def gather(self, h: Tensor, backward: bool) -> Tensor:
        return super().gather(h, backward).unsqueeze(0)

    def ends(self, h: Tensor, last, others: tuple[Tensor, ...], backward: bool):
        end = 0 if backward else len(self._length) - 1
        row = next(b for b, numbers in enumerate(self._rows) if end in numbers)
        return [state[row : row + 1] for state in last]


def _rows_of_documents(lengths: list[int]) -> list[list[int]]:
    """Distribute documents over rows as long as the longest document; all rows but one are at least half full."""
    rows, used = [], []  # `used` is a heap of (length, number) of the rows
    longest = max(lengths)
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if used and used[0][0] + lengths[number] <= longest:
            length, row = heapq.heappop(used)
        else:
            length, row = 0, len(rows)
            rows.append([])
        rows[row].append(number)
        heapq.heappush(used, (length + lengths[number], row))
    return [sorted(row) for row in rows]


def of_cu_seqlens(cu_seqlens: Tensor, x: Tensor) -> Whole | Documents:
    """Return the layout of the documents of x [1, T, ...] with cumulative lengths 0 = c_0 <= c_1 <= ... <= T.

    Documents run in parallel if this at least halves the number of time steps; otherwise, a reset mask separates them.
    Compiled code and CUDA graphs always use the mask, because a compiler does not know the lengths, and a graph may be
    replayed with others. Reading the lengths from a GPU waits for the GPU, once per tensor until the tensor changes.

    Raises:
        ValueError, TypeError: x has several rows, or cu_seqlens are not cumulative lengths of its documents.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be an integer tensor, got {type(cu_seqlens).__name__}")
    if x.shape[0] != 1 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be one-dimensional, for one packed sequence: batch size is {x.shape[0]}, "
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; for several sequences give reset [B, T]"
        )
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens must be an integer tensor, got {cu_seqlens.dtype}")
    if _has_values(cu_seqlens, x) and (documents := _documents(cu_seqlens, x.shape[1], x.device)) is not None:
        return documents
    position = torch.arange(x.shape[1], device=x.device)
    return Whole(torch.isin(position, cu_seqlens.to(x.device))[None])


def _has_values(cu_seqlens: Tensor, x: Tensor) -> bool:
    """Return whether the values can be read now. Compiled code and captured CUDA graphs may run with others later."""
    if torch.compiler.is_compiling() or cu_seqlens.device.type not in ("cpu", "cuda"):
        return False
    return not (x.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


_KNOWN: MutableMapping[Tensor, tuple] = WeakIdKeyDictionary()
"""The documents of each cu_seqlens and what they were made from. The layers of a model share the tensor, and reading it
on a GPU waits until the GPU has finished all work before it."""


def _documents(cu_seqlens: Tensor, steps: int, device: torch.device) -> Documents | None:
    """Return the documents in parallel rows, or None if this does not halve the number of time steps."""
    if cu_seqlens.is_inference():  # an inference tensor has no version
        return _read(cu_seqlens, steps, device)
    stream = current_stream(device.index) if device.type == "cuda" else None
    given = cu_seqlens._version, steps, device, stream, torch.is_inference_mode_enabled()
    known, documents = _KNOWN.get(cu_seqlens, (None, None))
    if known != given:
        documents = _read(cu_seqlens, steps, device)
        _KNOWN[cu_seqlens] = given, documents
    return documents


def _read(cu_seqlens: Tensor, steps: int, device: torch.device) -> Documents | None:
    ends = cu_seqlens.tolist()
    if not ends or ends[0] != 0 or ends[-1] != steps or ends != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0 to the time steps, {steps}, got {ends}")
    lengths = [end - start for start, end in pairwise(ends) if end > start]
    return Documents(lengths, device) if 2 * max(lengths) <= steps else None
