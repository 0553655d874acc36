"""Language modelling on text, which is either tokenised once and cached, or tokenised while it is streamed."""

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from data import storage, tokenization
from data.corpora import Corpus
from data.encoding import Encoder
from data.long_documents import WINDOW, LongDocuments
from data.manifest import TOKENIZER, TRAIN, VALIDATION, Manifest
from data.module import check_at_least
from data.packing import PackedBlocks
from data.preparation import load_tokenizer, prepare, prepare_part
from data.recipe import Recipe
from data.streaming import StreamedBlocks, StreamingDataModule


class Text(StreamingDataModule):
    """Packed blocks of a text corpus: input_ids, labels and, optionally, reset. configs/data/ explains the arguments.

    prepare_data() reads and tokenises the corpus once, into a folder of `cache_dir` whose name contains a hash of the
    source, the tokenizer and the options (`python -m scripts.prepare_data` does this ahead of training). Validation
    uses `val_split`, or otherwise the fraction `val_fraction` of the documents, selected by a hash of their text. The
    order of the blocks is random, and new in every epoch.

    With `streaming`, only the validation tokens are stored. Training tokenises the source while it reads, with blocks
    shuffled by StreamedBlocks. Each worker of each rank reads its own documents; resuming needs the same numbers of
    workers and ranks.

    With `stateful`, consecutive blocks form lanes of `lane_tokens` tokens, so that a model can carry its state from
    block to block, and batches also contain `continues`. Each row of an optimizer step reads a lane to its end, and
    then starts another one. The order of the lanes is random, and new in every epoch. In validation, each row of the
    batches is a lane.
    """

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte")
    may_change = StreamingDataModule.may_change | {
        *("val_split", "val_fraction", "max_val_blocks"),
        *("eval_length", "eval_documents", "eval_context"),
        *("cache_dir", "prepare_processes", "shuffle_blocks", "reset_at_documents"),
        "tokenizer",  # only to another name of the same tokenizer
    }

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
        shuffle_blocks: int = 1024,
        max_bytes: int | None = None,
        val_fraction: float = 0.005,
        max_val_blocks: int | None = None,
        tokenizer: str = "gpt2",
        context_length: int = 1024,
        reset_at_documents: bool = False,
        stateful: bool = False,
        lane_tokens: int | None = None,
        eval_length: int | None = None,
        eval_documents: int = 64,
        eval_context: int | None = None,
        batch_size: int = 8,
        cache_dir: str = "corpora",
        prepare_processes: int | None = 0,
        seed: int = 0,
        num_workers: int = 0,
    ):
        super().__init__(batch_size, num_workers, seed)
        check_at_least(1, context_length=context_length, max_bytes=max_bytes, max_val_blocks=max_val_blocks)
        check_at_least(1, eval_documents=eval_documents, lane_tokens=lane_tokens)
        check_at_least(0, shuffle_blocks=shuffle_blocks, prepare_processes=prepare_processes)
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1")
        if streaming:
            _check_streaming(max_val_blocks, max_bytes, stateful)
        self.recipe = Recipe(
            *_corpora(source, column, subset, split, val_split, revision),
            tokenizer=tokenizer,
            val_fraction=val_fraction,
            max_bytes=max_bytes,
            val_tokens=max_val_blocks * context_length + 1 if streaming else None,
        )
        tokenization.trained_size(tokenizer)  # raises ValueError for a tokenizer that cannot be trained
        self.streaming = streaming
        self.shuffle_blocks = shuffle_blocks
        self.max_val_blocks = max_val_blocks
        self.context_length = context_length
        self.reset_at_documents = reset_at_documents
        self.stateful = stateful
        self.lane_tokens = lane_tokens
        self.eval_length = eval_length
        self.eval_documents = eval_documents
        self.eval_context = eval_context
        self.cache_dir = storage.path(cache_dir)
        self.prepare_processes = len(os.sched_getaffinity(0)) if prepare_processes is None else prepare_processes
        self.manifest: Manifest | None = None  # setup() reads the manifest and the tokenizer from the folder
        self.tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def vocab_size(self) -> int:
        if self.manifest is None:
            raise RuntimeError("the vocabulary size is only known after prepare_data() and setup()")
        return self.manifest.tokenizer["vocab_size"]

    @property
    def num_classes(self) -> int:
        return self.vocab_size

    @property
    def folder(self) -> Path:
        """The folder of the prepared tokens."""
        return self.recipe.folder(self.cache_dir)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer of the prepared tokens, written by save_pretrained()."""
        return storage.local_folder(self.folder / TOKENIZER)

    def take_tokenizer(self, saved: Path) -> None:
        """Use the saved tokenizer of an earlier run, because the one that the recipe names may have changed since.

        Tokens that were prepared with it are reused.
        """
        known = str(self.tokenizer_folder) if self.tokenizer_folder.is_dir() else self.recipe.tokenizer
        if not tokenization.same(known, saved):
            self.recipe = replace(self.recipe, tokenizer=str(saved))

    def prepare_data(self) -> None:
        prepare(self.recipe, self.cache_dir, self.prepare_processes)

    def prepare_part(self, part: int, parts: int) -> int:
        return prepare_part(self.recipe, self.cache_dir, self.prepare_processes, part, parts)

    def setup(self, stage: str | None = None) -> None:
        folder = self.folder
        manifest = Manifest.read_if_there(folder)
        if manifest is None or not manifest.complete:
            raise RuntimeError(f"call prepare_data() before setup(): {folder} is missing or incomplete")
        self.tokenizer = load_tokenizer(manifest, folder)
        shape = (self.context_length, self.reset_at_documents)
        if not self.streaming:
            self.train_data = PackedBlocks(folder, TRAIN, *shape)
        self.val_data = PackedBlocks(folder, VALIDATION, *shape, limit=self.max_val_blocks)
        self.manifest = manifest
        if self.eval_length is not None:
            _ = self._long_documents  # raise its errors now, not after the training

    def train_dataloader(self) -> DataLoader:
        if not self.streaming:
            return self.training_loader(self.train_data, len(self.train_data), self._lane_blocks)
        return self.streaming_loader()

    def stream(self, reader: int, readers: int, position: dict | None, batch_size: int | None = None) -> StreamedBlocks:
        recipe = self._streamed
        return StreamedBlocks(
            recipe.corpus,
            Encoder(self.tokenizer),
            batch_size or self.batch_size,
            self.context_length,
            shuffle_blocks=self.shuffle_blocks,
            skip_fraction=0.0 if recipe.val_corpus else recipe.val_fraction,
            reset_at_documents=self.reset_at_documents,
            seed=self.seed,
            reader=reader,
            readers=readers,
            position=position,
        )

    def val_dataloader(self) -> DataLoader:
        size = len(self.val_data)
        run = -(-size // (self.batch_size * self.world_size)) if self.stateful else None
        return self.evaluation_loader(self.val_data, size, run)

    def test_dataloader(self) -> DataLoader:
        documents = self._long_documents
        return self.evaluation_loader(documents, len(documents), documents.windows)

    @cached_property
    def _long_documents(self) -> LongDocuments:
        return LongDocuments(self.folder, VALIDATION, self.eval_length, self.eval_documents, self.eval_context)

    def samples(self, number: int, length: int) -> torch.Tensor:
        """Return the beginnings of the first validation blocks, [at most number, length]."""
        return self.val_data[range(min(number, len(self.val_data)))]["input_ids"][:, :length]

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """Return perplexity and bits per byte on the validation text, and the perplexity of a unigram model on it.

        With `eval_length`, the result also contains the loss by position in documents.
        """
        metrics = trainer.validate(module, datamodule=self, verbose=False)[0]
        limit = trainer.limit_val_batches
        whole = isinstance(limit, float) and limit == 1.0  # the int 1 means one batch
        # of the same text, or it is no comparison
        unigram = self.unigram_perplexity() if whole and not self.streaming else None
        found = {name: metrics[f"val/{name}"] for name in self.metrics}
        found |= {"unigram_perplexity": unigram}
        return found if self.eval_length is None else found | {"by_position": self._by_position(trainer, module)}

    def _by_position(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """Return the mean loss of every window of long documents, and the size of the model's state per document."""
        trainer.test(module, datamodule=self, verbose=False)
        position, sizes, labels, losses = module.test_windows.to(torch.float64).unbind(dim=1)
        windows = (position / WINDOW).long()
        zeros = torch.zeros(self._long_documents.windows, dtype=torch.float64)
        state_mib = zeros.index_put((windows,), sizes / 2**20)  # equal for all documents
        labels, losses = (zeros.index_add(0, windows, part) for part in (labels, losses))
        described = {"window": WINDOW, "documents": self._long_documents.documents, "context": self.eval_context}
        return described | {"losses": (losses / labels).tolist(), "state_mib": state_mib.tolist()}

    @cached_property
    def bytes_per_label(self) -> float:
        """The average number of bytes of text per validation label, for bits per byte."""
        counts = self.val_data.label_counts()
        return float(counts @ tokenization.token_bytes(self.tokenizer)[: len(counts)] / counts.sum())

    def check_evaluation_of(self, changed: Iterable[str]) -> None:
        """Raise ValueError for another source if validation has its own files."""
        validation = self.recipe.val_corpus
        of_files = validation is not None and validation.files is not None
        if of_files and "data.source" in changed and "data.val_split" not in changed:
            raise ValueError(
                f"data.source is not what is evaluated: the run validates on data.val_split={validation.source}; name "
                "the files there, or set data.val_split=null to hold out data.val_fraction of the source"
            )

    def prepared(self) -> dict[str, dict[str, int]]:
        """Tokenise the corpus and check every file; return the counts of documents, tokens and shards per split."""
        self.prepare_data()
        self.setup()
        self.manifest.verify(self.folder)
        return self.manifest.totals

    def unigram_perplexity(self) -> float:
        """Return the perplexity of a unigram model (training counts plus one) on the validation labels."""
        if self.streaming:
            raise ValueError("a unigram model needs the training tokens, which streaming=true does not store")
        train = self.train_data.label_counts() + 1
        validation = self.val_data.label_counts()
        return float(np.exp(-(validation * np.log(train / train.sum())).sum() / validation.sum()))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lanes": self._lanes}

    @property
    def _lanes(self) -> int | None:
        """The lanes that training reads; None if blocks are read in a random order."""
        return self.batch_size * self.world_size * self.accumulate if self.stateful else None

    def stream_identity(self) -> dict[str, int | str]:
        shape = {key: getattr(self, key) for key in ("batch_size", "context_length", "shuffle_blocks", "seed")}
        return shape | {"source": self._streamed.corpus.extent}

    @property
    def _streamed(self) -> Recipe:
        return self.recipe.at_revision(self.manifest.revision)

    @property
    def _lane_blocks(self) -> int | None:
        """The number of blocks per lane, few enough that every row of a step has a lane; None without lanes."""
        if not self.stateful:
            return None
        asked = np.inf if self.lane_tokens is None else self.lane_tokens // self.context_length
        return int(max(1, min(asked, len(self.train_data) // self._lanes)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (before := state_dict.get("lanes")) != self._lanes:
            raise ValueError(
                f"the checkpoint has {before} lanes, but this run {self._lanes} (None: data.stateful=false): a resumed "
                "run must keep its order of blocks, and the number of sequences per optimizer step"
            )
        super().load_state_dict(state_dict)


def _check_streaming(max_val_blocks: int | None, max_bytes: int | None, stateful: bool) -> None:
    if stateful:
        raise ValueError("stateful=true cuts all tokens into lanes, for which they must be stored: set streaming=false")
    if max_val_blocks is None:
        raise ValueError("streaming=true needs data.max_val_blocks: how many blocks to read ahead for validation")
    if max_bytes is not None:
        raise ValueError(f"max_bytes={max_bytes} limits stored text, and streaming=true stores none: set it to null")


def _corpora(
    source: str, column: str, subset: str | None, split: str, val_split: str | None, revision: str | None
) -> tuple[Corpus, Corpus | None]:
    """Return the corpus and that of `val_split`, which names other files, or another split of a hub dataset."""
    corpus = Corpus(source, column, subset, split, revision)
    if corpus.files is None:
        if val_split == split:
            raise ValueError(f"val_split={val_split!r} is the split that is trained on; take another, or null")
        return corpus, Corpus(source, column, subset, val_split, revision) if val_split else None
    if (subset, split, revision) != (None, "train", None):
        raise ValueError(f"source {source!r} is local; subset, split and revision are for hub datasets")
    validation = Corpus(val_split, column) if val_split else None
    if validation is not None and validation.files is None:
        raise FileNotFoundError(
            f"no file matches val_split {val_split!r}: the source is local, so name the files to validate on, or set "
            "data.val_split=null to hold out data.val_fraction of the documents"
        )
    if validation is not None and (both := set(corpus.files) & set(validation.files)):
        raise ValueError(
            f"val_split={val_split!r} has {min(both)}, which source {source!r} trains on too: name other files, or set "
            "data.val_split=null to hold out data.val_fraction of the documents"
        )
    return corpus, validation
