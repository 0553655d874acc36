"""A corpus tokenised once, into shards. A killed process leaves whole ones, and the next one goes on behind them.

A large corpus is cut into sections, each of which is prepared by itself: by one process one after the other, or by
several machines that share a folder, with the same result.
"""

import contextlib
import errno
import hashlib
import json
import logging
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from multiprocessing import current_process
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data import hub, storage, tokenization
from data.atomic_file import replacing
from data.corpora import Corpus, Documents, held_out
from data.encoding import Encoded, Encoder, encode_in_order, token_dtype, vocab_size
from data.manifest import TRAIN, VALIDATION, Manifest, Shard, ShardFile, path, section_folder

log = logging.getLogger(__name__)

SECTION_BYTES = 2**31  # of files as stored, or of a hub dataset
SHARD_TOKENS = 2**27  # 256 MiB at 2 bytes each; what a killed process has to do again is at most this
CHUNK_CHARS = 2**20  # tokenised in one go
TOKENIZER_BYTES = 64 * 2**20  # of text are enough to train a tokenizer on
FORMAT = 3  # of the folder, and of what is a document
TOKENIZER = "tokenizer"  # its folder in that of the tokens
READABLE = 40  # characters of the source that go into the folder's name


@dataclass
class Chunk:
    """Documents that are tokenised together."""

    texts: list[str]
    splits: list[str]  # of each text
    end: dict[str, Any]  # where the corpus goes on behind them
    fraction: float | None  # of the corpus that is read with them


Chunks = Iterator[tuple[Chunk, Encoded]]


@dataclass(frozen=True)
class Recipe:
    """What the tokens of a folder are made from."""

    corpus: Corpus
    val_corpus: Corpus | None  # None: `val_fraction` of the corpus's documents are held out instead
    tokenizer: str  # as in data.tokenization
    val_fraction: float
    max_bytes: int | None  # of text to read from each corpus, from the start; None: all
    val_tokens: int | None  # None: all; else validation alone is prepared, and no more than about this many tokens

    @cached_property
    def _tokenizer_identity(self) -> dict[str, str]:
        return tokenization.identity(self.tokenizer)  # which loads one that is in a folder

    def identity(self) -> dict[str, Any]:
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
        content = json.dumps(self.identity(), sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def folder(self, cache_dir: Path) -> Path:
        names = self.corpus.source[-READABLE:], Path(self.tokenizer).name
        readable = "-".join(re.sub(r"[^\w.]+", "-", name).strip("-.") for name in names)
        return cache_dir / f"{readable}-{self.hash()}"

    def at_revision(self, revision: str | None) -> "Recipe":
        """Return the same recipe at a commit of the hub, so that what is read tomorrow is what was read today."""
        if revision is None:
            return self
        corpora = {"corpus": self.corpus, "val_corpus": self.val_corpus}
        on_hub = {name: corpus for name, corpus in corpora.items() if corpus and corpus.files is None}
        return replace(self, **{name: replace(corpus, revision=revision) for name, corpus in on_hub.items()})

    def split(self, text: str) -> str:
        """Return the split of a document of the corpus."""
        held = self.val_corpus is None and held_out(text, self.val_fraction)
        return VALIDATION if held else TRAIN

    def whole(self) -> "Section":
        """Return all that is to be read, validation corpus first."""
        parts: list[tuple[Corpus, Callable[[str], str]]] = []
        if self.val_corpus:
            parts.append((self.val_corpus, _of_validation))
        if not self.val_corpus or self.val_tokens is None:
            parts.append((self.corpus, self.split))
        return Section(self.corpus.source, parts, self.max_bytes, self.val_tokens)

    def sections(self) -> list["Section"]:
        """Return the same in sections. What is limited in size is one: its end depends on all before it."""
        if self.max_bytes is not None or self.val_tokens is not None:
            return [self.whole()]
        found = self.corpus.sections(SECTION_BYTES)
        if len(found) == 1:
            return [self.whole()]
        parts = [(corpus, self.split) for corpus in found]
        if self.val_corpus:
            parts.insert(0, (self.val_corpus, _of_validation))
        names = (f"{self.corpus.source}, section {number + 1} of {len(parts)}" for number in range(len(parts)))
        return [Section(name, [part], None, None) for name, part in zip(names, parts, strict=True)]

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load it, or train it on the corpus."""
        size = tokenization.trained_size(self.tokenizer)
        if size is None:
            return tokenization.load(self.tokenizer)
        limit = min(self.max_bytes or TOKENIZER_BYTES, TOKENIZER_BYTES)
        texts = (text for text in Documents(self.corpus, max_bytes=limit) if self.split(text) == TRAIN)
        shown = tqdm(texts, "reading for the tokenizer", unit=" documents", disable=None)
        return tokenization.train(shown, size)


def _of_validation(text: str) -> str:
    return VALIDATION


@dataclass(frozen=True)
class Section:
    """Documents that are prepared one after the other."""

    name: str
    parts: list[tuple[Corpus, Callable[[str], str]]]  # corpora, and what returns the split of a document
    max_bytes: int | None
    val_tokens: int | None

    def chunks(self, start: dict[str, Any] | None) -> Iterator[Chunk]:
        """Return all documents that are wanted, from a place on that an earlier chunk ended at."""
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


def prepare(recipe: Recipe, cache_dir: Path, processes: int) -> Path:
    """Make the tokens of a recipe unless they are there, or finish them, and return their folder.

    The result does not depend on the number of processes or machines, nor on where earlier ones were killed.
    """
    prepare_part(recipe, cache_dir, processes, 0, 1)
    return recipe.folder(cache_dir)


def prepare_part(recipe: Recipe, cache_dir: Path, processes: int, part: int, parts: int) -> int:
    """Do the work of one of several machines, and return how many sections are not finished by them all.

    Args:
        recipe: what to make, in `recipe.folder(cache_dir)`.
        cache_dir: shared by all machines.
        processes: that tokenise; 0: this one, with threads.
        part: which machine this is: it prepares every `parts`-th section from this one on.
        parts: machines that share the work.
    """
    _check_script()
    folder = recipe.folder(cache_dir)
    if _is_whole(folder):  # it may be somebody else's, in which nothing can be locked
        return 0
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _naming_a_full_disk():
        with storage.lock(storage.path(f"{folder}.lock")):  # of several processes one builds, the others wait
            try:
                manifest = Manifest.read(folder)
            except FileNotFoundError:
                manifest = _begin(recipe, folder)
            recipe = recipe.at_revision(manifest.revision)
            if manifest.sections == 1:
                if part == 0:
                    _prepare_section(recipe.whole(), folder, manifest, processes, load_tokenizer(manifest, folder))
                return int(not _is_whole(folder))
        sections = recipe.sections()
        if len(sections) != manifest.sections:
            raise ValueError(
                f"source {recipe.corpus.source!r} has {len(sections)} sections, and had {manifest.sections} when "
                f"{folder} was begun: delete that folder to prepare it anew"
            )
        tokenizer = load_tokenizer(manifest, folder)
        for number in range(part, len(sections), parts):
            own = section_folder(folder, number)
            own.mkdir(parents=True, exist_ok=True)
            with storage.lock(storage.path(f"{own}.lock")):
                _prepare_section(sections[number], own, replace(manifest, sections=1), processes, tokenizer)
        with storage.lock(storage.path(f"{folder}.lock")):
            return _join(folder, manifest)


def _join(folder: Path, manifest: Manifest) -> int:
    """Write the manifest of all sections when all are whole; return how many are not."""
    places = [section_folder(folder, number) for number in range(manifest.sections)]
    if left := sum(not _is_whole(place) for place in places):
        return left
    shards = [
        Shard(shard.files, {}, section, number)
        for section, place in enumerate(places)
        for number, shard in enumerate(Manifest.read(place).shards)
    ]
    if not shards:
        raise ValueError(f"source {manifest.identity['source']!r} has no text")
    replace(manifest, complete=True, shards=shards).write(folder)
    return 0


def _prepare_section(
    section: Section, folder: Path, begun: Manifest, processes: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Finish the shards of a folder, and make those again whose files were deleted."""
    try:
        manifest = Manifest.read(folder)
    except FileNotFoundError:
        manifest = begun
    missing = manifest.missing(folder)
    if not missing and manifest.complete:
        return
    encoder = Encoder(tokenizer)
    for number in missing:
        _make_again(section, folder, manifest, number, encoder, processes)
    if not manifest.complete:
        _go_on(section, folder, manifest, encoder, processes)


def _is_whole(folder: Path) -> bool:
    try:
        manifest = Manifest.read(folder)
    except FileNotFoundError:
        return False
    return manifest.complete and not manifest.missing(folder)


def _check_script() -> None:
    """Raise where a new process would run the script that started it, and wait for a lock that its parent holds."""
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing itself asks, but only behind the lock
        raise RuntimeError(
            'tokenising starts processes that import this script: put what it runs under `if __name__ == "__main__":`, '
            "or set prepare_processes=0"
        )


@contextlib.contextmanager
def _naming_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = "no space left; finished shards are kept, and the same command goes on when there is some"
        raise OSError(errno.ENOSPC, message, error.filename) from error


def load_tokenizer(manifest: Manifest, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a prepared folder."""
    place = storage.local_folder(folder / TOKENIZER)
    if tokenization.folder_hash(place) != manifest.tokenizer["sha256"]:
        raise ValueError(f"{place} is not what the tokens were made with: delete {folder} to prepare it again")
    return tokenization.load(str(place))


def _begin(recipe: Recipe, folder: Path) -> Manifest:
    """Return a manifest without shards, and the tokenizer."""
    on_hub = recipe.corpus.files is None
    revision = hub.check("dataset", recipe.corpus.source, recipe.corpus.revision) if on_hub else None
    tokenizer = recipe.at_revision(revision).make_tokenizer()
    with tempfile.TemporaryDirectory() as local:
        tokenizer.save_pretrained(local)
        storage.upload(Path(local), folder / TOKENIZER)
        digest = tokenization.folder_hash(Path(local))
    about = {
        "name": recipe.tokenizer,
        "sha256": digest,
        "vocab_size": vocab_size(tokenizer),
        "end_of_text": tokenizer.eos_token_id,
    }
    versions = {name: version(name) for name in ("datasets", "tokenizers", "transformers", "numpy")}
    versions["python"] = platform.python_version()
    dtype = token_dtype(about["vocab_size"]).name
    sections = len(recipe.at_revision(revision).sections())
    manifest = Manifest(recipe.identity(), recipe.hash(), revision, about, dtype, versions, sections=sections)
    manifest.write(folder)
    return manifest


def _go_on(section: Section, folder: Path, manifest: Manifest, encoder: Encoder, processes: int) -> None:
    """Write all shards that are still to come."""
    start = manifest.shards[-1].end if manifest.shards else None
    tokens, validation = manifest.tokens, manifest.totals[VALIDATION]["tokens"]
    with (
        _encoded(section, start, validation, encoder, processes) as chunks,
        _progress(f"tokenising {section.name}", tokens) as progress,
    ):
        since = time.perf_counter()
        while shard := _write_shard(folder, len(manifest.shards), chunks, progress):
            manifest = manifest.with_shard(shard)
            manifest.write(folder)
            if progress.disable:  # no terminal: a line per shard for the log file
                speed = (manifest.tokens - tokens) / (time.perf_counter() - since)
                log.info("%s: %.4g tokens, %.3g/s", folder.name, manifest.tokens, speed)
    replace(manifest, complete=True).write(folder)


def _make_again(
    section: Section, folder: Path, manifest: Manifest, number: int, encoder: Encoder, processes: int
) -> None:
    """Write a shard whose files were deleted."""
    start = manifest.shards[number - 1].end if number else None
    before = replace(manifest, shards=manifest.shards[:number]).totals[VALIDATION]["tokens"]
    with (
        _encoded(section, start, before, encoder, processes) as chunks,
        _progress(f"making shard {number} again", 0) as progress,
    ):
        try:
            shard = _write_shard(folder, number, chunks, progress, expected=manifest.shards[number].files)
        except _OtherTokens:
            shard = None
    if shard is None:
        raise ValueError(
            f"source {section.name!r} does not give what it gave when {folder} was made: delete that folder "
            "to prepare it anew"
        )


class _OtherTokens(Exception):
    """A shard that is made again has others than it had."""


def _progress(what: str, tokens: int) -> tqdm:
    return tqdm(desc=what, unit=" tokens", unit_scale=True, initial=tokens, mininterval=0.5, disable=None)


@contextlib.contextmanager
def _encoded(
    section: Section, start: dict | None, validation: int, encoder: Encoder, processes: int
) -> Iterator[Chunks]:
    """Return tokenised chunks from `start` on, in front of which there are `validation` tokens for validation."""
    if section.val_tokens is not None:
        processes = 0  # so little that reading further ahead than needed would take longer
    with contextlib.closing(encode_in_order(section.chunks(start), encoder, processes)) as encoded:
        yield _until(section.val_tokens, validation, encoded)


def _until(enough: int | None, tokens: int, encoded: Chunks) -> Chunks:
    """Return chunks until `enough` tokens are reached, of which there are `tokens`; None: all."""
    while enough is None or tokens < enough:
        pair = next(encoded, None)
        if pair is None:
            return
        tokens += len(pair[1].tokens)
        yield pair


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


def _write_shard(
    folder: Path, number: int, chunks: Chunks, progress: tqdm, expected: dict[str, ShardFile] | None = None
) -> Shard | None:
    """Return the next SHARD_TOKENS tokens, or somewhat more; None if there are no more.

    Raises:
        _OtherTokens: the files would not be those `expected`; nothing is replaced.
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
            if tokens >= SHARD_TOKENS:
                break
        written = {split: file.written() for split, file in files.items()}
        if expected is not None and written != expected:
            raise _OtherTokens
    return Shard(written, end) if written else None
