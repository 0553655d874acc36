"""Writing of shards of tokens from documents that are tokenised in order."""

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
    """The written files differ from the expected ones."""


@contextlib.contextmanager
def encoded_chunks(
    section: Section, start: dict | None, validation: int, encoder: Encoder, processes: int
) -> Iterator[Chunks]:
    """Return tokenised chunks from the position `start` on; before it there were `validation` validation tokens."""
    if section.val_tokens is not None:
        processes = 0  # few tokens: reading ahead would take longer
    with contextlib.closing(encode_in_order(section.chunks(start), encoder, processes)) as encoded:
        yield encoded if section.val_tokens is None else _until(section.val_tokens, validation, encoded)


def _until(enough: int, tokens: int, encoded: Chunks) -> Chunks:
    """Yield chunks until there are `enough` tokens, of which `tokens` existed before."""
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
    """Write the next shard of at least `shard_tokens` tokens; return it, or None if no chunks are left.

    A shard ends with a chunk, so it may have up to a chunk more tokens; the last one may have fewer.

    Raises:
        OtherTokens: the files would differ from those of `expected`; nothing is replaced.
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
    """Writes the file of one split of a shard."""

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
