"""Documents that are concatenated in one sequence: run in the rows of a padded batch, or separated by resets."""

import heapq
from collections.abc import MutableMapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flashrnn._torch_private import current_stream
from flashrnn.sequences import SideBySide, Whole, numbered


class Documents(SideBySide):
    """The documents of one sequence [1, T, ...].

    The last states are those after the last document or, in the backward direction, after the first one. This document
    is the last one of its row.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        sequence, time = numbered(lengths, sum(lengths), device)
        super().__init__(_rows_of_documents(lengths), lengths, sequence, time)

    def spread(self, x: Tensor, backward: bool) -> Tensor:
        return super().spread(x[0], backward)

    def gather(self, h: Tensor, backward: bool) -> Tensor:
        return super().gather(h, backward).unsqueeze(0)

    def ends(self, h: Tensor, last, others: tuple[Tensor, ...], backward: bool):
        end = 0 if backward else len(self._lengths) - 1
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
