"""The tokens of a corpus in one flat file per split, memory-mapped, and blocks of it as training samples.

A folder holds train.bin and validation.bin (documents one after the other, each closed by the end-of-text token), the
tokenizer, and manifest.json, which is written last: a folder without it, or with files of other sizes, is incomplete.
"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from data.tokenization import Encode

TRAIN, VALIDATION = "train", "validation"
DOCUMENTS_AT_ONCE = 256  # encoded together, on all cores
COUNTED_AT_ONCE = 2**24  # tokens; counting converts them to int64


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    identity: dict  # the source, tokenizer and options that the tokens were made from
    hash: str  # of the identity; also in the folder's name
    vocab_size: int
    end_of_text: int  # token id
    dtype: str
    splits: dict[str, Split]

    def write(self, folder: Path) -> None:
        partial = folder / "manifest.json.partial"
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        partial.replace(folder / "manifest.json")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises ValueError unless the folder is complete."""
        try:
            fields = json.loads((folder / "manifest.json").read_text())
            fields["splits"] = {name: Split(**split) for name, split in fields["splits"].items()}
            manifest = cls(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} has no valid manifest.json: {error}") from error
        for name, split in manifest.splits.items():
            path = folder / f"{name}.bin"
            expected = split.tokens * np.dtype(manifest.dtype).itemsize
            actual = path.stat().st_size if path.exists() else 0
            if actual != expected:
                raise ValueError(f"{path} has {actual} bytes instead of {expected}")
        return manifest


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def documents_to_tokens(texts: list[str], encode: Encode, end_of_text: int, vocab_size: int) -> list[np.ndarray]:
    """The token ids of each document, closed by `end_of_text`."""
    documents = [np.array([*ids, end_of_text]) for ids in encode(texts)]
    largest = max(int(ids.max()) for ids in documents)
    if largest >= vocab_size:
        raise ValueError(f"the tokenizer gave token {largest}, but its vocabulary ends at {vocab_size - 1}")
    return [ids.astype(token_dtype(vocab_size)) for ids in documents]


def pack(
    documents: Iterable[tuple[str, str]],
    folder: Path,
    splits: Sequence[str],
    encode: Encode,
    end_of_text: int,
    vocab_size: int,
    enough: int | None = None,
) -> dict[str, Split]:
    """Writes the tokens of all (split, text) whose split is asked for, until each split has `enough` tokens."""
    tokens = dict.fromkeys(splits, 0)
    counts = dict.fromkeys(splits, 0)
    wanted = ((split, text) for split, text in documents if split in tokens)
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in splits}
        while chunk := list(itertools.islice(wanted, DOCUMENTS_AT_ONCE)):
            encoded = documents_to_tokens([text for _, text in chunk], encode, end_of_text, vocab_size)
            for (split, _), ids in zip(chunk, encoded, strict=True):
                ids.tofile(files[split])
                tokens[split] += len(ids)
                counts[split] += 1
            if enough is not None and min(tokens.values()) >= enough:
                break
    return {split: Split(tokens[split], counts[split]) for split in splits}


def blocks_to_batch(blocks: np.ndarray, reset_after: int | None) -> dict[str, torch.Tensor]:
    """Blocks of tokens [B, T+1] to input_ids and labels, int64 [B, T]: the target of a position is the next token.

    With a token `reset_after`, also reset, bool [B, T]: True behind that token, where a document starts.
    """
    tokens = torch.from_numpy(blocks.astype(np.int64))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    if reset_after is not None:
        batch["reset"] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        batch["reset"][:, 1:] = batch["input_ids"][:, :-1] == reset_after
    return batch


class PackedBlocks(Dataset):
    """Maps block indices [B] to a batch. Block i is tokens i*T ... i*T+T of a file, each token is a label once."""

    def __init__(
        self, path: Path, dtype: str, context_length: int, reset_after: int | None = None, limit: int | None = None
    ):
        self.path = path
        self.dtype = np.dtype(dtype)
        self.context_length = context_length
        self.reset_after = reset_after
        tokens = path.stat().st_size // self.dtype.itemsize
        available = (tokens - 1) // context_length
        if available < 1:
            raise ValueError(
                f"{path} has {tokens} tokens, fewer than one block of context_length + 1 = {context_length + 1}; "
                "use a smaller context_length, more text, or for validation a larger val_fraction"
            )
        self.length = available if limit is None else min(limit, available)

    def __len__(self) -> int:
        return self.length

    def tokens(self) -> np.ndarray:
        """All tokens, memory-mapped. Mapped anew each time: a map kept in `self` would be sent to workers as a copy."""
        return np.memmap(self.path, self.dtype, mode="r")

    def label_counts(self, vocab_size: int) -> np.ndarray:
        """How often each token is a label, int64 [vocab_size]."""
        labels = self.tokens()[1 : self.length * self.context_length + 1]
        counts = np.zeros(vocab_size, np.int64)
        for start in range(0, len(labels), COUNTED_AT_ONCE):
            counts += np.bincount(labels[start : start + COUNTED_AT_ONCE], minlength=vocab_size)
        return counts

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        starts = np.asarray(indices)[:, None] * self.context_length
        return blocks_to_batch(self.tokens()[starts + np.arange(self.context_length + 1)], self.reset_after)
