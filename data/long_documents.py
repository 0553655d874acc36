"""Long documents as consecutive windows, starting at their beginnings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from data.manifest import Manifest
from data.packing import blocks_to_batch

WINDOW = 128  # tokens
_READ_AT_ONCE = 2**24  # tokens


class LongDocuments(Dataset):
    """Maps indices [B] of windows to a batch.

    A batch contains input_ids and labels, int64 [B, WINDOW]; `position`, the position of the first label in its
    document; and `begins`, True if the model starts without a state. Window i of document d has the index
    d * windows + i, and all windows of a batch have the same i. As in generation, the first input of a document is the
    end-of-text token, and the first label is the first token of the document.

    Args:
        folder: folder of prepared tokens.
        split: name of the split in the manifest.
        length: number of tokens read from each document, a multiple of WINDOW; shorter documents are omitted.
        limit: largest number of documents.
        context: number of tokens after which the model starts without a state again, a multiple of WINDOW; None means
            never.
    """

    def __init__(self, folder: Path, split: str, length: int, limit: int, context: int | None = None) -> None:
        for name, value in {"data.eval_length": length, "data.eval_context": context}.items():
            if value is not None and (value < WINDOW or value % WINDOW):
                raise ValueError(f"{name}={value} must be a positive multiple of {WINDOW}")
        manifest = Manifest.read(folder)
        self.windows = length // WINDOW
        self.context = context
        self._dtype = np.dtype(manifest.dtype)
        self._end = manifest.tokenizer["end_of_text"]
        self._starts: list[tuple[Path, int]] = []
        longest = 0
        for path in manifest.paths(folder, split):
            starts, lengths = _documents(path, self._dtype, self._end)
            longest = max(longest, lengths.max(initial=0))
            self._starts += [(path, int(start)) for start in starts[lengths >= length]]
            if len(self._starts) >= limit:
                break
        self._starts = self._starts[:limit]
        if not self._starts:
            raise ValueError(
                f"data.eval_length={length}: the longest of the {split} documents in {folder} has {longest} tokens; "
                "take a smaller length, or validate on longer text (data.val_split, data.val_fraction)"
            )

    @property
    def documents(self) -> int:
        return len(self._starts)

    def __len__(self) -> int:
        return self.documents * self.windows

    def __getitem__(self, indices: Sequence[int]) -> dict[str, Any]:
        document, window = np.divmod(np.asarray(indices), self.windows)
        blocks = np.stack([self._read(*pair) for pair in zip(document, window, strict=True)])
        position = int(window[0]) * WINDOW
        begins = position % (self.context or len(self) * WINDOW) == 0
        return blocks_to_batch(blocks, None) | {"position": position, "begins": begins}

    def _read(self, document: int, window: int) -> np.ndarray:
        """Return the tokens of a window and the token before it [WINDOW + 1]."""
        path, start = self._starts[document]
        first = start + int(window) * WINDOW
        if window:
            return np.fromfile(path, self._dtype, WINDOW + 1, offset=(first - 1) * self._dtype.itemsize)
        tokens = np.fromfile(path, self._dtype, WINDOW, offset=first * self._dtype.itemsize)
        return np.concatenate([np.array([self._end], self._dtype), tokens])


def _documents(path: Path, dtype: np.dtype, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each document in a file, and its number of tokens without the end-of-text token."""
    ends, read = [np.empty(0, np.int64)], 0
    while (tokens := np.fromfile(path, dtype, _READ_AT_ONCE, offset=read * dtype.itemsize)).size:
        ends.append(np.flatnonzero(tokens == end) + read)
        read += tokens.size
    ends = np.concatenate(ends)
    starts = np.concatenate([[0], ends[:-1] + 1]) if ends.size else ends
    return starts, ends - starts
