"""Batches of blocks made while a corpus is read, without storing it."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from data.corpora import Corpus, Documents, held_out
from data.encoding import Encoder, token_dtype
from data.packing import blocks_to_batch

DOCUMENTS_AT_ONCE = 64  # encoded together


class StreamedBlocks(IterableDataset):
    """Endless batches from the documents of one rank, from the beginning of the corpus again at its end.

    Shuffled: blocks, within windows of `shuffle_blocks` of them (rounded up to whole batches) that follow one another
    in the corpus. Not shuffled: files and documents. Of several ranks each reads documents of its own: whole files
    where their number divides by that of the ranks, else every rank reads all and keeps its share.

    Each batch carries under "position" what it takes to go on behind it: where its window begins in the corpus, the
    tokens read before but not used, and how many batches of the window are taken. Going on reads the window again.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        batch_size: int,
        context_length: int,
        *,
        shuffle_blocks: int = 0,
        skip_fraction: float = 0.0,
        reset_at_documents: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        position: dict | None = None,
    ):
        self.corpus = corpus
        self.encoder = encoder
        self.batch_size = batch_size
        self.context_length = context_length
        self.window_batches = max(1, -(-shuffle_blocks // batch_size))
        self.shuffle = shuffle_blocks > 0
        self.skip_fraction = skip_fraction  # of the documents, held out for validation
        self.reset_at = encoder.end_of_text if reset_at_documents else None
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.position = position

    def __iter__(self) -> Iterator[dict]:
        window, taken, place = 0, 0, None
        tokens = np.empty(0, token_dtype(self.encoder.vocab_size))
        if self.position is not None:
            window, taken, place = (self.position[key] for key in ("window", "taken", "documents"))
            tokens = self.position["tokens"].numpy().astype(tokens.dtype)
        source = self._read(place)
        window_tokens = self.window_batches * self.batch_size * self.context_length
        while True:
            position = {"window": window, "documents": place, "tokens": torch.from_numpy(tokens.astype(np.int32))}
            while len(tokens) <= window_tokens:
                new, place = next(source)
                tokens = np.concatenate([tokens, new])
            for batches, blocks in enumerate(self._batches(tokens, window), 1):
                if batches > taken:
                    batch = blocks_to_batch(blocks, self.reset_at)
                    yield batch | {"position": position | {"taken": batches}}
            window, taken, tokens = window + 1, 0, tokens[window_tokens:]

    def _read(self, place: dict[str, Any] | None) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Return tokens from a place in the corpus on, without end, and the place behind them."""
        while True:
            found = place is not None
            documents = Documents(self.corpus, rank=self.rank, world_size=self.world_size, position=place)
            while read := list(islice(documents, DOCUMENTS_AT_ONCE)):
                texts = [text for text in read if not held_out(text, self.skip_fraction)]
                found |= bool(texts)
                yield self.encoder(texts).tokens, documents.position
            if not found:
                raise ValueError(f"source {self.corpus.source!r} has no text for rank {self.rank}")
            place = None

    def _batches(self, tokens: np.ndarray, window: int) -> Iterator[np.ndarray]:
        """Return the batches of a window, tokens [batch_size, context_length + 1] each."""
        order = np.arange(self.window_batches * self.batch_size)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.rank, window]).permutation(order)
        for blocks in order.reshape(self.window_batches, self.batch_size):
            yield tokens[blocks[:, None] * self.context_length + np.arange(self.context_length + 1)]
