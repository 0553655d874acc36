"""Blocks of prepared tokens as training samples."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from data import storage
from data.manifest import REMEDY, TRAIN, VALIDATION, Manifest

COUNTED_TOKENS = 2**26  # number of tokens from which their frequencies are estimated
_ADVICE = {
    TRAIN: "use more text or a smaller data.context_length",
    VALIDATION: "hold out more documents with data.val_fraction=0.2 (each 16 KiB of a .txt file count as one), name "
    "other text with data.val_split=FILE, or set a smaller data.context_length",
}


def blocks_to_batch(blocks: np.ndarray, reset_at: int | None) -> dict[str, torch.Tensor]:
    """Return input_ids and labels, int64 [B, T], of blocks of tokens [B, T+1]; each label is the next token.

    With an end-of-text token `reset_at`, also return reset, bool [B, T], True where this token is the input. As a
    label, the token ends a document; as an input, it starts the next one, as in generation.
    """
    tokens = torch.from_numpy(blocks.astype(np.int64))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    if reset_at is not None:
        batch["reset"] = batch["input_ids"] == reset_at
    return batch


class PackedBlocks(Dataset):
    """Maps block indices [B] to a batch. Block i of a shard is its tokens i*T ... i*T+T, so that each is a label once.

    The remaining tokens of a shard, fewer than T, are not used. Blocks are numbered across all shards of the split.
    """

    def __init__(
        self, folder: Path, split: str, context_length: int, reset_at_documents: bool = False, limit: int | None = None
    ):
        manifest = Manifest.read(folder)
        self.context_length = context_length
        self.paths = manifest.paths(folder, split)
        self._dtype = np.dtype(manifest.dtype)
        self._vocab_size = manifest.tokenizer["vocab_size"]
        self._reset_at = manifest.tokenizer["end_of_text"] if reset_at_documents else None
        tokens = [shard.files[split].tokens for shard in manifest.shards if split in shard.files]
        self._ends = np.cumsum([max(0, count - 1) // context_length for count in tokens], dtype=np.int64)
        available = int(self._ends[-1]) if tokens else 0
        if available < 1:
            raise ValueError(
                f"{folder} has {sum(tokens)} {split} tokens, fewer than one block of context_length + 1 = "
                f"{context_length + 1}; {_ADVICE[split]}"
            )
        self.length = available if limit is None else min(limit, available)

    def __len__(self) -> int:
        return self.length

    def label_counts(self) -> np.ndarray:
        """Return the number of occurrences of each token among the first COUNTED_TOKENS labels, int64 [vocabulary]."""
        counts = np.zeros(self._vocab_size, np.int64)
        at_once = max(1, 2**20 // self.context_length)
        for start in range(0, min(self.length, -(-COUNTED_TOKENS // self.context_length)), at_once):
            blocks = self._read(range(start, min(start + at_once, self.length)))
            counts += np.bincount(blocks[:, 1:].ravel(), minlength=self._vocab_size)
        return counts

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return blocks_to_batch(self._read(indices), self._reset_at)

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        """Return blocks [B, T+1]. Files are not memory-mapped, so that a truncated file is an error, not a crash."""
        indices = np.asarray(indices)
        shards = np.searchsorted(self._ends, indices, side="right")
        numbers = indices - np.concatenate([[0], self._ends])[shards]
        blocks = np.empty((len(indices), self.context_length + 1), self._dtype)
        files = [self.paths[shard] for shard in shards]
        starts = (numbers * self.context_length * self._dtype.itemsize).tolist()
        size = (self.context_length + 1) * self._dtype.itemsize
        for block, file, found in zip(blocks, files, storage.read_ranges(files, starts, size), strict=True):
            if len(found) < size:
                raise ValueError(f"{file} is damaged: it ends too early; {REMEDY}")
            block[:] = np.frombuffer(found, self._dtype)
        if blocks.max(initial=0) >= self._vocab_size:
            row = int((blocks >= self._vocab_size).any(axis=1).argmax())
            raise ValueError(
                f"{self.paths[shards[row]]} is damaged: it has token {blocks[row].max()}, but the vocabulary ends at "
                f"{self._vocab_size - 1}; {REMEDY}"
            )
        return blocks
