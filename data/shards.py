"""Shards of tokens, written from documents that are tokenised in order."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm.auto import tqdm

from data.atomic_file import replacing
from data.encoding import Encoded, Encoder, encode_in_order
from data.manifest import Shard, ShardFile, path
from data.recipe import Chunk, Section

Chunks = Iterator[tuple[Chunk, Encoded]]


class OtherTokens(Exception):
    """Files differ from those that were expected."""


@contextlib.contextmanager
def encoded_chunks(
    section: Section, start: dict | None, validation: int, encoder: Encoder, processes: int
) -> Iterator[Chunks]:
    """Return tokenised chunks from `start` on, a place before which there are `validation` tokens of validation."""
    if section.val_tokens is not None:
        processes = 0  # few tokens: reading ahead would take longer
    with contextlib.closing(encode_in_order(section.chunks(start), encoder, processes)) as encoded:
        yield encoded if section.val_tokens is None else _until(section.val_tokens, validation, encoded)


def _until(enough: int, tokens: int, encoded: Chunks) -> Chunks:
    """Return chunks until there are `enough` tokens; `tokens` were there before."""
    while tokens < enough and (pair := next(encoded, None)):
        tokens += len(pair[1].tokens)
        yield pair


def write_shard(
    folder: Path,
    number: int,
    chunks: Chunks,
    shard_tokens: int,
    progress: tqdm,
    expected: dict[str, ShardFile] | None = None,
) -> Shard | None:
    """Write the next shard, of `shard_tokens` tokens or up to a chunk more; return None if no chunks are left.

    Raises:
        OtherTokens: the files would not be those `expected`; nothing is replaced.
    """
    files: dict[str, _SplitWriter] = {}
    tokens, end = 0, None
    with contextlib.ExitStack() as stack:
        for chunk, encoded in chunks:
            end = chunk.end
            splits = np.array(chunk.splits, dtype=object)
            for split in dict.fromkeys(chunk.splits):
                if split not in files:
                    files[split] = _SplitWriter(stack.enter_context(replacing(path(folder, split, number))))
                own = splits == split
                files[split].write(encoded.tokens[np.repeat(own, encoded.lengths)], int(own.sum()))
            tokens += len(encoded.tokens)
            if chunk.fraction:
                progress.total = int((progress.n + len(encoded.tokens)) / chunk.fraction)
            progress.update(len(encoded.tokens))
            if tokens >= shard_tokens:
                break
        written = {split: file.written() for split, file in files.items()}
        if expected is not None and written != expected:
            raise OtherTokens
    return Shard(written, end) if written else None


class _SplitWriter:
    """One split's file of a shard."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._sha256 = hashlib.sha256()
        self._tokens = self._documents = 0

    def write(self, tokens: np.ndarray, documents: int) -> None:
        content = tokens.tobytes()
        self._file.write(content)
        self._sha256.update(content)
        self._tokens += len(tokens)
        self._documents += documents

    def written(self) -> ShardFile:
        return ShardFile(self._tokens, self._documents, self._sha256.hexdigest())
