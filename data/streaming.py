"""Batches of packed blocks made while a corpus is read, without storing it."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from data.corpora import Corpus, held_out
from data.packing import blocks_to_batch, documents_to_tokens, token_dtype
from data.tokenization import encoder, vocab_size

DOCUMENTS_AT_ONCE = 64  # encoded together


class StreamedBlocks(IterableDataset):
    """Endless batches from the documents of one rank, in the order of the corpus, from the beginning again at its end.

    Each batch carries under "position" what it takes to go on behind it: where the reader stands, and the tokens read
    but not used yet.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        context_length: int,
        *,
        skip_fraction: float = 0.0,
        reset_at_documents: bool = False,
        rank: int = 0,
        world_size: int = 1,
        position: dict | None = None,
    ):
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.context_length = context_length
        self.skip_fraction = skip_fraction  # of the documents, held out for validation
        self.reset_after = tokenizer.eos_token_id if reset_at_documents else None
        self.rank = rank
        self.world_size = world_size
        self.position = position

    def __iter__(self) -> Iterator[dict]:
        size = vocab_size(self.tokenizer)
        encode = encoder(self.tokenizer)
        starts = np.arange(self.batch_size)[:, None] * self.context_length
        block = starts + np.arange(self.context_length + 1)
        used = self.batch_size * self.context_length
        tokens = np.empty(0, token_dtype(size))
        position = self.position
        while True:
            rows = self.corpus.rows(streaming=True, rank=self.rank, world_size=self.world_size)
            if position is not None:
                rows.load_state_dict(position["rows"])
                tokens = position["tokens"].numpy().astype(tokens.dtype)
            texts = (text for text in self.corpus.texts(rows) if not held_out(text, self.skip_fraction))
            found = position is not None
            while chunk := list(itertools.islice(texts, DOCUMENTS_AT_ONCE)):
                found = True
                new = documents_to_tokens(chunk, encode, self.tokenizer.eos_token_id, size)
                tokens = np.concatenate([tokens, *new])
                state = rows.state_dict()
                while len(tokens) > used:
                    batch = blocks_to_batch(tokens[block], self.reset_after)
                    tokens = tokens[used:]
                    batch["position"] = {"rows": state, "tokens": torch.from_numpy(tokens.astype(np.int32))}
                    yield batch
            if not found:
                raise ValueError(f"source {self.corpus.source!r} has no text for rank {self.rank}")
            position = None
