"""Instruction data: prompts and responses, of which only the responses are trained on."""

import hashlib
import json
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data import tokenization
from data.atomic_file import replacing
from data.corpora import fingerprint, held_out, local_files
from data.encoding import vocab_size
from data.examples import Example, ExampleRows, encode, read_examples
from data.manifest import TOKENIZER, TRAIN, VALIDATION
from data.module import ResumableDataModule, check_at_least
from data.task import IGNORE

EXAMPLES = "examples.npz"  # written last, so that a folder that contains it is complete
FORMAT = 1


class Instructions(ResumableDataModule):
    """Batches of examples from JSON lines files or a hub dataset: input_ids, labels and, if packed, reset.

    An example is {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}. Labels are the
    tokens of responses, or of the assistant's messages, and the end-of-text token; all others are IGNORE. Messages, and
    prompts if the tokenizer has a chat template, are formatted by this template, as in generation. Without a template,
    the response is appended to the prompt as it is.

    Args:
        source: a file or glob of JSON lines, or the name of a dataset on the hub.
        subset, split, revision: those of a hub dataset.
        val_split: other files, or another split, to validate on; None holds out `val_fraction` of the examples.
        val_fraction: fraction of the examples to hold out, selected by a hash of their text.
        max_val_blocks: largest number of rows to evaluate on; None means all.
        tokenizer: a folder, or a name on the hub.
        chat_template: a file with a Jinja template that replaces that of the tokenizer, and is saved with it.
        context_length: number of tokens per row. Longer examples are cut off.
        reset_at_documents: True packs several examples into a row and resets the state before each; False gives each
            example its own row.
        batch_size: rows per device.
        cache_dir: folder for the tokens.
        seed: seed of the order of the rows, which changes with every epoch.
        num_workers: number of processes that load batches.
    """

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte")
    may_change = ResumableDataModule.may_change | {
        "val_split",
        "val_fraction",
        "max_val_blocks",
        "cache_dir",
        "tokenizer",
    }

    def __init__(
        self,
        source: str,
        *,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
        val_split: str | None = None,
        val_fraction: float = 0.02,
        max_val_blocks: int | None = None,
        tokenizer: str = "gpt2",
        chat_template: str | None = None,
        context_length: int = 1024,
        reset_at_documents: bool = True,
        batch_size: int = 8,
        cache_dir: str = "corpora",
        seed: int = 0,
        num_workers: int = 0,
    ):
        super().__init__(batch_size, num_workers, seed)
        check_at_least(2, context_length=context_length)
        check_at_least(1, max_val_blocks=max_val_blocks)
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1")
        self.source, self.subset, self.split, self.revision = source, subset, split, revision
        self.val_split, self.val_fraction, self.max_val_blocks = val_split, val_fraction, max_val_blocks
        self._tokenizer_name = tokenizer
        self._template = Path(chat_template).read_text() if chat_template else None
        self.context_length = context_length
        self.reset_at_documents = reset_at_documents
        self.cache_dir = Path(cache_dir)
        self.tokenizer: PreTrainedTokenizerBase | None = None  # loaded from the folder by setup()

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.tokenizer)

    @property
    def num_classes(self) -> int:
        return self.vocab_size

    @cached_property
    def folder(self) -> Path:
        """The folder of the prepared examples."""
        files = {name: local_files(name) for name in filter(None, (self.source, self.val_split))}
        about = {
            "format": FORMAT,
            "source": [self.source, self.subset, self.split, self.revision, self.val_split],
            "files": {name: fingerprint(found) for name, found in files.items() if found},
            "held_out": None if self.val_split else self.val_fraction,
            "template": self._template,
            **tokenization.identity(self._tokenizer_name),
        }
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()
        return self.cache_dir / f"instructions-{digest}"

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER

    def take_tokenizer(self, saved: Path) -> None:
        self._tokenizer_name = str(saved)
        self.__dict__.pop("folder", None)

    def prepare_data(self) -> None:
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.folder}.lock"):
            if not (self.folder / EXAMPLES).exists():
                self._prepare()

    def _prepare(self) -> None:
        if tokenization.trained_size(self._tokenizer_name) is not None:
            raise ValueError(
                f"tokenizer={self._tokenizer_name}: no tokenizer can be trained on instructions; start from a model "
                "that has one (init_from=...), or name one"
            )
        tokenizer = tokenization.load(self._tokenizer_name)
        if self._template is not None:
            tokenizer.chat_template = self._template
        tokenizer.save_pretrained(self.tokenizer_folder)
        examples: dict[str, list[Example]] = {TRAIN: [], VALIDATION: []}
        for name, split, held in self._sources():
            rows = read_examples(name, self.subset, split, self.revision)
            for number, row in enumerate(tqdm(rows, name, disable=None), 1):
                example = encode(row, tokenizer, f"{name}, example {number}")
                of_validation = held_out(json.dumps(row, sort_keys=True), self.val_fraction) if held is None else held
                examples[VALIDATION if of_validation else TRAIN].append(example)
        for split, found in examples.items():
            if not found:
                raise ValueError(f"source {self.source!r} has no examples for {split}: set another data.val_fraction")
        arrays = {}
        for split, found in examples.items():
            arrays[f"{split}_tokens"] = np.concatenate([example.tokens for example in found])
            arrays[f"{split}_scored"] = np.concatenate([example.scored for example in found])
            arrays[f"{split}_lengths"] = np.array([len(example.tokens) for example in found])
        with replacing(self.folder / EXAMPLES) as file:
            np.savez(file, **arrays)

    def _sources(self) -> Iterator[tuple[str, str, bool | None]]:
        """Return the sources: name, split on the hub, and whether it is for validation (None: a part of it)."""
        if not self.val_split:
            yield self.source, self.split, None
            return
        yield self.source, self.split, False
        local = local_files(self.source) is not None
        yield (self.val_split, self.split, True) if local else (self.source, self.val_split, True)

    def setup(self, stage: str | None = None) -> None:
        if not (self.folder / EXAMPLES).exists():
            raise RuntimeError(f"prepare_data() has to come before setup(): there is no {self.folder / EXAMPLES}")
        self.tokenizer = tokenization.load(str(self.tokenizer_folder))
        shape = (self.context_length, self.reset_at_documents, self.tokenizer.eos_token_id)
        with np.load(self.folder / EXAMPLES) as arrays:
            self.train_data, self.val_data = (
                ExampleRows(*(arrays[f"{split}_{part}"] for part in ("tokens", "scored", "lengths")), *shape)
                for split in (TRAIN, VALIDATION)
            )
        if self.train_data.cut:
            warnings.warn(
                f"{self.train_data.cut} of {self.train_data.examples} examples are longer than context_length="
                f"{self.context_length} and are cut off; {self.train_data.left_out} have no response before, and are "
                "left out",
                stacklevel=2,
            )

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self.train_data, len(self.train_data))

    def val_dataloader(self) -> DataLoader:
        size = len(self.val_data)
        return self.evaluation_loader(self.val_data, min(size, self.max_val_blocks or size))

    def samples(self, number: int, length: int) -> list[torch.Tensor]:
        """Return complete validation prompts, whatever their length."""
        return self.val_data.prompts(number)

    @cached_property
    def bytes_per_label(self) -> float:
        """The average number of bytes of text per scored validation label."""
        labels = self.val_data[range(len(self.val_data))]["labels"]
        return float(tokenization.token_bytes(self.tokenizer)[labels[labels != IGNORE].numpy()].mean())

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """Return perplexity and bits per byte of the held-out responses."""
        metrics = trainer.validate(module, datamodule=self, verbose=False)[0]
        return {name: metrics[f"val/{name}"] for name in self.metrics}

    def prepared(self) -> dict[str, dict[str, int]]:
        self.prepare_data()
        self.setup()
        splits = {TRAIN: self.train_data, VALIDATION: self.val_data}
        return {name: {"documents": s.examples, "tokens": s.tokens, "shards": 1} for name, s in splits.items()}
