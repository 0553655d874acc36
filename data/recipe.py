"""Recipes of prepared tokens: corpora, tokenizer and options, and the order in which documents are read."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data import tokenization
from data.corpora import Corpus, Documents, held_out
from data.manifest import TRAIN, VALIDATION

SECTION_BYTES = 2**31  # size of stored files, or of a hub dataset, per section
SHARD_TOKENS = 2**27  # 256 MiB at 2 bytes each; a killed process loses at most this much work
CHUNK_CHARS = 2**20  # characters tokenised in one call
TOKENIZER_BYTES = 64 * 2**20  # size of the text that a tokenizer is trained on
FORMAT = 3  # version of the folder's layout and of how text is cut into documents
READABLE = 40  # number of characters of the source's name in that of the folder


@dataclass
class Chunk:
    """Documents that are tokenised together."""

    texts: list[str]
    splits: list[str]  # the split of each text
    end: dict[str, Any]  # position in the corpus after these documents
    fraction: float | None  # fraction of the corpus that has been read after these documents


@dataclass(frozen=True)
class Section:
    """Documents that are prepared one after the other."""

    name: str
    parts: list[tuple[Corpus, Callable[[str], str]]]  # corpora, each with a function from documents to their split
    max_bytes: int | None = None  # largest number of bytes of text per corpus
    val_tokens: int | None = None  # if set, read only validation documents

    def chunks(self, start: dict[str, Any] | None) -> Iterator[Chunk]:
        """Yield all documents after the end of an earlier chunk; None starts with the first document."""
        first = start["part"] if start else 0
        for part, (corpus, split) in enumerate(self.parts[first:], first):
            position = start["documents"] if start and part == first else None
            documents = Documents(corpus, max_bytes=self.max_bytes, position=position)
            texts, splits, size = [], [], 0
            for text in documents:
                name = split(text)
                if self.val_tokens is not None and name == TRAIN:
                    continue
                texts.append(text)
                splits.append(name)
                size += len(text)
                if size >= CHUNK_CHARS:
                    fraction = documents.fraction if part == len(self.parts) - 1 else None
                    yield Chunk(texts, splits, {"part": part, "documents": documents.position}, fraction)
                    texts, splits, size = [], [], 0
            if documents.limited:
                print(
                    f"read {documents.bytes / 1e6:.1f} MB of text of {corpus.source}: data.max_bytes={self.max_bytes}"
                )
            if documents.empty and corpus.section is None:
                raise ValueError(f"source {corpus.source!r} has no text")
            yield Chunk(texts, splits, {"part": part + 1, "documents": None}, None)


@dataclass(frozen=True)
class Recipe:
    """Everything from which the tokens of a folder are made."""

    corpus: Corpus
    val_corpus: Corpus | None  # None: hold out `val_fraction` of the documents of `corpus` instead
    tokenizer: str  # see `data.tokenization`
    val_fraction: float
    max_bytes: int | None  # read only this many bytes of text from the start of each corpus; None: all
    val_tokens: int | None  # prepare only about this many tokens of validation; None: prepare everything

    @cached_property
    def _tokenizer_identity(self) -> dict[str, str]:
        return tokenization.identity(self.tokenizer)  # cached, because it may load a tokenizer from a folder

    def identity(self) -> dict[str, Any]:
        """Return everything that the tokens depend on, in a form that JSON can represent."""
        return {
            "format": FORMAT,
            **self.corpus.identity(),
            **self._tokenizer_identity,
            "held_out": self.val_corpus.identity() if self.val_corpus else self.val_fraction,
            "max_bytes": self.max_bytes,
            "val_tokens": self.val_tokens,
            "shard_tokens": SHARD_TOKENS,
        }

    def hash(self) -> str:
        """Return a hash of the identity."""
        content = json.dumps(self.identity(), sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def folder(self, cache_dir: Path) -> Path:
        """Return the folder of the tokens."""
        names = self.corpus.source[-READABLE:], Path(self.tokenizer).name
        readable = "-".join(re.sub(r"[^\w.]+", "-", name).strip("-.") for name in names)
        return cache_dir / f"{readable}-{self.hash()}"

    def at_revision(self, revision: str | None) -> "Recipe":
        """Return the same recipe at a commit of the hub, with which an interrupted preparation is continued."""
        if revision is None:
            return self
        corpora = {"corpus": self.corpus, "val_corpus": self.val_corpus}
        on_hub = {name: corpus for name, corpus in corpora.items() if corpus and corpus.files is None}
        return replace(self, **{name: replace(corpus, revision=revision) for name, corpus in on_hub.items()})

    def split(self, text: str) -> str:
        """Return the split of a document of the corpus."""
        held = self.val_corpus is None and held_out(text, self.val_fraction)
        return VALIDATION if held else TRAIN

    def whole(self) -> Section:
        """Return everything as a single section."""
        return Section(self.corpus.source, self._parts([self.corpus]), self.max_bytes, self.val_tokens)

    def sections(self) -> list[Section]:
        """Return everything in sections of about SECTION_BYTES.

        A corpus with limited size is a single section, because its end depends on everything before it.
        """
        if self.max_bytes is not None or self.val_tokens is not None:
            return [self.whole()]
        corpora = self.corpus.sections(SECTION_BYTES)
        if len(corpora) == 1:
            return [self.whole()]
        parts = self._parts(corpora)
        names = (f"{self.corpus.source}, section {number} of {len(parts)}" for number in range(1, len(parts) + 1))
        return [Section(name, [part]) for name, part in zip(names, parts, strict=True)]

    def _parts(self, corpora: list[Corpus]) -> list[tuple[Corpus, Callable[[str], str]]]:
        """Return the parts of a section, with the validation corpus first."""
        parts: list[tuple[Corpus, Callable[[str], str]]] = [(corpus, self.split) for corpus in corpora]
        if not self.val_corpus:
            return parts
        return [(self.val_corpus, _of_validation), *(parts if self.val_tokens is None else [])]

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, or train it on the corpus."""
        size = tokenization.trained_size(self.tokenizer)
        if size is None:
            return tokenization.load(self.tokenizer)
        limit = min(self.max_bytes or TOKENIZER_BYTES, TOKENIZER_BYTES)
        texts = (text for text in Documents(self.corpus, max_bytes=limit) if self.split(text) == TRAIN)
        shown = tqdm(texts, "reading for the tokenizer", unit=" documents", disable=None)
        return tokenization.train(shown, size)


def _of_validation(text: str) -> str:
    return VALIDATION
