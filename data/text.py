"""Language modelling on text: tokenised once, packed into blocks and cached; or tokenised while it streams."""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from data import tokenization
from data.corpora import Corpus, held_out
from data.module import ResumableDataModule
from data.packing import TRAIN, VALIDATION, Manifest, PackedBlocks, pack, token_dtype
from data.streaming import StreamedBlocks

log = logging.getLogger(__name__)

TOKENIZER_BYTES = 64 * 2**20  # of text are enough to train a tokenizer on


class Text(ResumableDataModule):
    """Packed blocks of a text corpus: input_ids, labels and, if asked for, reset. configs/data/ explains the arguments.

    prepare_data() reads, tokenises and packs the corpus once, into a folder of `cache_dir` that has a hash of the
    source, the tokenizer and the options in its name. Validation is `val_split` of a hub dataset, or else the
    `val_fraction` of the documents that a hash of their text selects.

    With `streaming`, validation alone is packed, and training reads the source while it goes, in the order of the
    source; resuming then needs the same number of ranks.
    """

    def __init__(
        self,
        source: str = "stdlib",
        *,
        column: str = "text",
        subset: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        max_bytes: int | None = None,
        val_fraction: float = 0.005,
        max_val_blocks: int | None = None,
        tokenizer: str = "gpt2",
        context_length: int = 1024,
        reset_at_documents: bool = False,
        batch_size: int = 8,
        cache_dir: str = "corpora",
        seed: int = 0,
        num_workers: int = 0,
    ):
        super().__init__(batch_size, num_workers, seed)
        limits = {"context_length": context_length, "max_bytes": max_bytes, "max_val_blocks": max_val_blocks}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1")
        if streaming and max_val_blocks is None:
            raise ValueError("streaming=true needs max_val_blocks: how many blocks to read ahead for validation")
        if streaming and max_bytes is not None:
            raise ValueError(f"max_bytes={max_bytes} limits what is packed; streaming=true packs no training data")
        if streaming and num_workers > 1:
            raise ValueError(f"num_workers={num_workers}: streaming=true reads in order, with at most 1 worker")
        self.corpus = Corpus(source, column, subset, split, revision)
        self.val_corpus = Corpus(source, column, subset, val_split, revision) if val_split else None
        if self.corpus.files is not None and (subset, split, val_split, revision) != (None, "train", None, None):
            raise ValueError(f"source {source!r} is local; subset, split, val_split and revision are for hub datasets")
        self.tokenizer_name = tokenizer
        self.bpe_size = tokenization.trained_size(tokenizer)
        self.streaming = streaming
        self.max_bytes = max_bytes
        self.val_fraction = val_fraction
        self.max_val_blocks = max_val_blocks
        self.context_length = context_length
        self.reset_at_documents = reset_at_documents
        self.cache_dir = Path(cache_dir)
        self.manifest: Manifest | None = None  # this and the tokenizer are read from the cache by setup()
        self.tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def vocab_size(self) -> int:
        if self.manifest is None:
            raise RuntimeError("the vocabulary is known after prepare_data() and setup()")
        return self.manifest.vocab_size

    @property
    def num_classes(self) -> int:
        return self.vocab_size

    def prepare_data(self) -> None:
        folder, identity, digest = self._cache()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # of several processes one builds, the others wait
            try:
                Manifest.read(folder)
            except ValueError as error:
                if folder.exists():
                    log.warning("Packing %s again: %s", self.corpus.source, error)
                    shutil.rmtree(folder)
                self._build(folder, identity, digest)

    def setup(self, stage: str | None = None) -> None:
        folder, _, _ = self._cache()
        try:
            manifest = Manifest.read(folder)
        except ValueError as error:
            raise RuntimeError(f"prepare_data() has to come before setup(): {error}") from error
        self.tokenizer = tokenization.load(str(folder / "tokenizer"))
        reset_after = manifest.end_of_text if self.reset_at_documents else None
        shape = (manifest.dtype, self.context_length, reset_after)
        if not self.streaming:
            self.train_data = PackedBlocks(folder / f"{TRAIN}.bin", *shape)
        self.val_data = PackedBlocks(folder / f"{VALIDATION}.bin", *shape, limit=self.max_val_blocks)
        self.manifest = manifest

    def train_dataloader(self) -> DataLoader:
        if not self.streaming:
            return self.training_loader(self.train_data, len(self.train_data))
        dataset = StreamedBlocks(
            self.corpus,
            self.tokenizer,
            self.batch_size,
            self.context_length,
            skip_fraction=0.0 if self.val_corpus else self.val_fraction,
            reset_at_documents=self.reset_at_documents,
            rank=self.rank,
            world_size=self.world_size,
            position=self._position or None,
        )
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=self.num_workers,
            multiprocessing_context="spawn" if self.num_workers else None,  # the tokenizer's threads die in a fork
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def val_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.val_data, len(self.val_data))

    def unigram_perplexity(self) -> float:
        """Perplexity on the validation labels of the training tokens' frequencies, one added to each count."""
        if self.streaming:
            raise ValueError("a unigram model needs the training tokens, which streaming=true does not store")
        train = self.train_data.label_counts(self.vocab_size) + 1
        validation = self.val_data.label_counts(self.vocab_size)
        return float(np.exp(-(validation * np.log(train / train.sum())).sum() / validation.sum()))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.streaming:  # every rank reads documents of its own
            positions = [state["position"]]
            if self.world_size > 1:
                positions = [None] * self.world_size
                torch.distributed.all_gather_object(positions, state["position"])
            state["position"] = positions
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = state_dict["position"]
        if isinstance(position, list) != self.streaming:
            raise ValueError(f"streaming={self.streaming} now, but not in the run that wrote the checkpoint")
        if self.streaming:
            if len(position) != self.world_size:
                raise ValueError(
                    f"the checkpoint is of a run on {len(position)} ranks, this one has {self.world_size}; "
                    "with streaming=true they must be the same number"
                )
            position = position[self.rank]
        super().load_state_dict({"position": position})

    def _next_position(self, batch: dict) -> Any:
        return batch.pop("position") if self.streaming else super()._next_position(batch)

    def _cache(self) -> tuple[Path, dict[str, Any], str]:
        """The folder of the packed tokens, all that they depend on, and the hash of it."""
        identity = {
            **self.corpus.identity(),
            **tokenization.identity(self.tokenizer_name),
            "max_bytes": self.max_bytes,
            "held_out": self.val_corpus.split if self.val_corpus else self.val_fraction,
            "val_tokens": self._val_tokens(),
        }
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
        readable = re.sub(r"[^\w.]+", "-", f"{Path(self.corpus.source).name}-{Path(self.tokenizer_name).name}")
        return self.cache_dir / f"{readable}-{digest}", identity, digest

    def _val_tokens(self) -> int | None:
        """How many validation tokens to pack; None: all there are."""
        return self.max_val_blocks * self.context_length + 1 if self.streaming else None

    def _build(self, folder: Path, identity: dict[str, Any], digest: str) -> None:
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if self.bpe_size is None:
            tokenizer = tokenization.load(self.tokenizer_name)
        else:
            limit = min(self.max_bytes or TOKENIZER_BYTES, TOKENIZER_BYTES)
            texts = (text for split, text in self._training_documents(limit) if split == TRAIN)
            tokenizer = tokenization.train(texts, self.bpe_size)
        tokenizer.save_pretrained(partial / "tokenizer")
        vocab_size = tokenization.vocab_size(tokenizer)
        splits = pack(
            self._documents(),
            partial,
            [VALIDATION] if self.streaming else [TRAIN, VALIDATION],
            tokenization.encoder(tokenizer),
            tokenizer.eos_token_id,
            vocab_size,
            enough=self._val_tokens(),
        )
        dtype = token_dtype(vocab_size).name
        Manifest(identity, digest, vocab_size, tokenizer.eos_token_id, dtype, splits).write(partial)
        partial.rename(folder)

    def _documents(self) -> Iterator[tuple[str, str]]:
        """Every document as (split, text)."""
        if self.val_corpus is not None:
            yield from ((VALIDATION, text) for text in self.val_corpus.read(self.max_bytes, self.streaming))
        yield from self._training_documents(self.max_bytes)

    def _training_documents(self, max_bytes: int | None) -> Iterator[tuple[str, str]]:
        """The documents of the corpus as (split, text): with no validation split of its own, some are held out."""
        for text in self.corpus.read(max_bytes, self.streaming):
            validation = self.val_corpus is None and held_out(text, self.val_fraction)
            yield VALIDATION if validation else TRAIN, text
