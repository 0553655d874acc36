"""Instruction data: prompts and responses, of which the responses alone are learnt."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data import hub, tokenization
from data.atomic_file import replacing
from data.corpora import fingerprint, held_out, local_files
from data.encoding import vocab_size
from data.files import read_json_lines
from data.manifest import TOKENIZER, TRAIN, VALIDATION
from data.module import ResumableDataModule, check_at_least
from data.tasks import IGNORE

EXAMPLES = "examples.npz"  # its folder is whole when it is there
FORMAT = 1


class Instructions(ResumableDataModule):
    """Rows of examples from JSON lines or a dataset of the hub: input_ids, labels and perhaps reset.

    An example is {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}. Labels are the
    tokens of responses, or of the assistant's messages, and the end of text; all others are IGNORE. Messages are
    written by the tokenizer's chat template, as in generation; so are prompts, where there is one. Without one, a
    response follows its prompt as it is.

    Args:
        source: a file or glob of JSON lines, or the name of a dataset on the hub.
        subset, split, revision: of a hub dataset.
        val_split: other files or another split to validate on; None holds out `val_fraction` of the examples.
        val_fraction: chosen by a hash of their text.
        max_val_blocks: evaluate on at most this many rows; None takes all.
        tokenizer: a folder or a name on the hub.
        chat_template: a file with a Jinja template in place of the tokenizer's own, which is kept with it.
        context_length: tokens of a row. What an example has beyond it is cut off.
        reset_at_documents: True packs several examples into a row and resets the state before each; False gives each
            a row of its own.
        batch_size: rows per device.
        cache_dir: folder for the tokens.
        seed: of the order of the rows, new in every epoch.
        num_workers: processes that load batches.
    """

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
        self.tokenizer: PreTrainedTokenizerBase | None = None  # of the folder, by setup()

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
                f"tokenizer={self._tokenizer_name}: instructions train none; begin with a model that has one "
                "(init_from=...), or name one"
            )
        tokenizer = tokenization.load(self._tokenizer_name)
        if self._template is not None:
            tokenizer.chat_template = self._template
        tokenizer.save_pretrained(self.tokenizer_folder)
        examples: dict[str, list[Example]] = {TRAIN: [], VALIDATION: []}
        for name, split, held in self._sources():
            for number, row in enumerate(tqdm(_rows(name, self.subset, split, self.revision), name, disable=None), 1):
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
        """Return what to read: a name, its split on the hub, and whether it is for validation; None: in part."""
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
                Rows(*(arrays[f"{split}_{part}"] for part in ("tokens", "scored", "lengths")), *shape)
                for split in (TRAIN, VALIDATION)
            )
        if self.train_data.cut:
            warnings.warn(
                f"{self.train_data.cut} of {self.train_data.examples} examples are longer than context_length="
                f"{self.context_length} and are cut off",
                stacklevel=2,
            )

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self.train_data, len(self.train_data))

    def val_dataloader(self) -> DataLoader:
        size = len(self.val_data)
        return self.evaluation_loader(self.val_data, min(size, self.max_val_blocks or size))

    def samples(self, number: int, length: int) -> torch.Tensor:
        return self.val_data[range(min(number, len(self.val_data)))]["input_ids"][:, :length]

    @cached_property
    def bytes_per_label(self) -> float:
        """The bytes of text that a scored validation label stands for on average."""
        labels = self.val_data[range(len(self.val_data))]["labels"]
        return float(tokenization.token_bytes(self.tokenizer)[labels[labels != IGNORE].numpy()].mean())

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """Return perplexity and bits per byte of the responses held out."""
        metrics = trainer.validate(module, datamodule=self, verbose=False)[0]
        return {name: metrics[f"val/{name}"] for name in ("perplexity", "bits_per_byte")}

    def prepared(self) -> dict[str, dict[str, int]]:
        self.prepare_data()
        self.setup()
        splits = {TRAIN: self.train_data, VALIDATION: self.val_data}
        return {name: {"documents": s.examples, "tokens": s.tokens, "shards": 1} for name, s in splits.items()}


class Example(NamedTuple):
    tokens: np.ndarray  # int32 [length], of which the last ends the text
    scored: np.ndarray  # bool [length]


def encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    """Return the tokens of an example, and which of them are learnt; `where` it is goes into errors."""
    pieces = list(_pieces(row, tokenizer, where))
    tokens, scored = [], []
    for text, of_response in pieces:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        scored += [of_response] * len(ids)
    if not any(scored):
        raise ValueError(f"{where}: there is no response to learn")
    if tokens[-1] != tokenizer.eos_token_id:
        tokens.append(tokenizer.eos_token_id)
        scored.append(True)
    return Example(np.array(tokens, np.int32), np.array(scored, bool))


def _pieces(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[tuple[str, bool]]:
    """Return the text of an example in parts, and whether each is a response.

    Prompts end where the template would have a model go on, so that training and generation cut text into tokens at
    the same place.
    """
    messages = _messages(row, where)
    if tokenizer.chat_template is None:
        if "messages" in row:
            raise ValueError(f"{where} has messages, and the tokenizer no chat template: set data.chat_template=FILE")
        yield from ((message["content"], message["role"] == "assistant") for message in messages)
        return
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, whole = (
            tokenizer.apply_chat_template(messages[: number + added], tokenize=False, add_generation_prompt=not added)
            for added in (0, 1)
        )
        if not (before.startswith(done) and whole.startswith(before)):
            raise ValueError(
                f"{where}: the chat template writes earlier messages otherwise when another one follows, so that "
                "responses cannot be told apart; set data.chat_template to one that does not"
            )
        yield before[len(done) :], False
        yield whole[len(before) :], True
        done = whole


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    if {"prompt", "response"} <= row.keys():
        given = [("user", row["prompt"]), ("assistant", row["response"])]
        messages = [{"role": role, "content": content} for role, content in given]
    elif isinstance(row.get("messages"), list):
        messages = row["messages"]
    else:
        raise ValueError(f"{where} has {', '.join(row)}: expected prompt and response, or messages")
    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str) and message.get("role")):
            raise ValueError(f"{where}: {message!r} is no message: expected a role and a content that is text")
    return [dict(message) for message in messages]


def _rows(name: str, subset: str | None, split: str, revision: str | None) -> Iterable[dict[str, Any]]:
    files = local_files(name)
    if files is None:
        return hub.open_dataset(name, subset, split, revision)
    return (row for file in files for row in read_json_lines(file))


class Rows(Dataset):
    """Maps row numbers [B] to a batch; row i of a batch holds one example, or as many in order as fit.

    The target of a position is the next token; an example begins behind an end of text, as documents do.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        scored: np.ndarray,
        lengths: np.ndarray,
        context_length: int,
        packed: bool,
        end_of_text: int,
    ):
        self._tokens, self._scored, self._end_of_text = tokens, scored, end_of_text
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._length, self._packed = context_length, packed
        self.examples, self.tokens = len(lengths), len(tokens)
        self.cut = int((lengths > context_length).sum())
        self._first = self._first_examples(np.minimum(lengths, context_length))

    def _first_examples(self, lengths: np.ndarray) -> np.ndarray:
        """Return the first example of each row, and the number of examples at the end."""
        first, used = [], self._length + 1
        for number, length in enumerate(lengths.tolist()):
            if not self._packed or used + length > self._length:
                first.append(number)
                used = 0
            used += length
        return np.array([*first, len(lengths)])

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        shape = (len(rows), self._length)
        inputs = np.full(shape, self._end_of_text, np.int64)
        labels, reset = np.full(shape, IGNORE, np.int64), np.zeros(shape, bool)
        for place, row in enumerate(rows):
            start = 0
            for example in range(self._first[row], self._first[row + 1]):
                own = slice(self._starts[example], min(self._starts[example + 1], self._starts[example] + self._length))
                tokens, end = self._tokens[own], start + own.stop - own.start
                inputs[place, start + 1 : end] = tokens[:-1]
                labels[place, start:end] = np.where(self._scored[own], tokens, IGNORE)
                reset[place, start] = True
                start = end
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        return batch | {"reset": torch.from_numpy(reset)} if self._packed else batch
