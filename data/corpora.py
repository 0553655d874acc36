"""Sources of text: datasets on the Hugging Face hub, files, and the sources of installed Python packages."""

import glob
import hashlib
import itertools
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.distributed import split_dataset_by_node

from data import hub, storage
from data.files import READ, kind, missing_column, read_joined, read_rows

JOINED_BYTES = 384 * 1024  # about 100,000 tokens
HUB_FILES = 64  # of a dataset of unknown size are a section
_INSTALLED = ("stdlib", "purelib", "platlib")
JOINED = "joined"
PYTHON_FOLDERS = {"stdlib": ("stdlib",), "installed": _INSTALLED, JOINED: _INSTALLED}  # as sysconfig names them
LOOKS_LOCAL = re.compile(r"[*?\[]|^[./~]|/.*/|\.(txt|md|py|parquet|arrow|jsonl?)(\.\w+)?$")


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    `source` is one of:
    - "stdlib": the sources of the Python standard library;
    - "installed": these, and the sources of all installed packages;
    - "joined": the same, with neighbouring files joined to long documents of about JOINED_BYTES;
    - a file or glob, local or as a URL (s3://bucket/**/*.jsonl.zst, which needs the package of that fsspec storage);
    - the name of a dataset on the hub.

    Files are JSON lines (.jsonl, .json, compressed or not), .parquet, .arrow, or otherwise plain text. Plain text is
    split at line ends into documents of about 16 KiB (32 KiB without line ends), so that a large file can be streamed
    and partly held out.
    """

    source: str
    column: str = "text"  # that holds the document, in JSON lines, parquet, arrow and hub datasets
    subset: str | None = None  # the rest is for the hub
    split: str = "train"
    revision: str | None = None
    # Of local files the first and the end, of a hub dataset which of how many parts; None: all of it.
    section: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise TypeError(
                f"source={self.source}: expected one name or pattern, such as 'texts/*.txt'; data=mix takes several"
            )

    @cached_property
    def files(self) -> list[str] | None:
        """Return the local files in sorted order; None if the source is on the hub."""
        if self.source in PYTHON_FOLDERS:
            found = _python_files(*PYTHON_FOLDERS[self.source])
        else:
            found = local_files(self.source)
        return found[slice(*self.section)] if found and self.section else found

    def sections(self, size: int) -> list["Corpus"]:
        """Return the corpus in parts of whole files of about `size` stored bytes; they depend only on the files."""
        if self.files is not None:
            return [replace(self, section=part) for part in _parts(_starts(self.files), size)]
        rows = hub.open_dataset(self.source, self.subset, self.split, self.revision)
        split = (rows.info.splits or {}).get(self.split)
        count = split.num_bytes // size if split and split.num_bytes else rows.num_shards // HUB_FILES
        count = max(1, min(count, rows.num_shards))
        return [replace(self, section=(number, count)) for number in range(count)]

    def identity(self) -> dict[str, str | None]:
        """Return everything that distinguishes this corpus from others and is known without a download."""
        if self.files is None:
            hub_names = {"subset": self.subset, "split": self.split, "revision": self.revision}
            return {"source": self.source, "column": self.column, **hub_names}
        return {"source": self.source, "column": self.column, "files": fingerprint(self.files)}

    @cached_property  # slow for thousands of files, and stored in every checkpoint
    def extent(self) -> str:
        """What a position in the corpus depends on: names and sizes of files, without folders, or names on the hub."""
        if self.files is None:
            return " ".join(filter(None, (self.source, self.subset, self.split, self.revision)))
        files = [(Path(name).name, storage.info(name).size) for name in self.files]
        digest = hashlib.blake2b(repr(files).encode(), digest_size=4).hexdigest()
        return f"{len(files)} files of {sum(size for _, size in files)} bytes ({digest})"

    def rows(self) -> tuple[datasets.IterableDataset, int | None]:
        """Return rows with the column `self.column`, and their total size: bytes of files, or rows of a hub dataset.

        The number of rows of a hub dataset may be unknown; the size is None then.
        """
        if self.files is None:
            rows = hub.open_dataset(self.source, self.subset, self.split, self.revision)
            if rows.column_names is not None:
                if self.column not in rows.column_names:
                    raise missing_column(f"source {self.source!r}", self.column, rows.column_names)
                rows = rows.select_columns([self.column])
            split = (rows.info.splits or {}).get(self.split)
            size = split.num_examples if split else None
            if self.section:
                number, count = self.section
                rows, size = rows.shard(num_shards=count, index=number), size and size // count
            return rows, size
        kinds = {kind(name) for name in self.files}
        if len(kinds) > 1:
            raise ValueError(f"source {self.source!r} mixes {' and '.join(sorted(kinds))} files; select one kind")
        starts = _starts(self.files)
        if self.source == JOINED:
            parts = _parts(starts, JOINED_BYTES)
            arguments = {"groups": [self.files[a:b] for a, b in parts], "ends": [starts[b] for _, b in parts]}
            read = read_joined
        else:
            arguments, read = {"files": self.files, "starts": starts[:-1]}, read_rows
        # What is a list here is what a checkpoint of the rows counts: whole files or groups of them.
        rows = datasets.IterableDataset.from_generator(read, gen_kwargs=arguments | {"column": self.column})
        return rows, starts[-1]


class Documents(Iterator[str]):
    """Iterates over the documents of a corpus that contain text; each of several readers gets its own documents.

    max_bytes: read only documents that begin within the first `max_bytes` of text.
    position: the position of an earlier iteration over the same corpus with as many readers, which is continued.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        max_bytes: int | None = None,
        reader: int = 0,
        readers: int = 1,
        position: dict[str, Any] | None = None,
    ):
        self._corpus = corpus
        self._max_bytes = max_bytes
        rows, self._size = corpus.rows()
        self._rows = split_dataset_by_node(rows, reader, readers)
        self._row, self._bytes, self._read = 0, 0, 0
        if position is not None:
            self._rows.load_state_dict(position["rows"])
            self._row, self._bytes = position["row"], position["bytes"]
        # Not iter(), which would split the rows among DataLoader workers a second time.
        self._iterator = ({name: values[0] for name, values in row.items()} for row in self._rows.iter(1))

    @property
    def position(self) -> dict[str, Any]:
        """The position after the last document, as JSON: position in the files, rows and bytes of text read so far."""
        return {"rows": self._rows.state_dict(), "row": self._row, "bytes": self._bytes}

    @property
    def fraction(self) -> float | None:
        """The fraction of the corpus, or of max_bytes, that has been read; None if the size is unknown."""
        of_limit = self._bytes / self._max_bytes if self._max_bytes else 0.0
        if not self._size:
            return of_limit or None
        return min(1.0, max(of_limit, self._read / self._size))

    @property
    def bytes(self) -> int:
        """The number of bytes of text that have been read."""
        return self._bytes

    @property
    def limited(self) -> bool:
        """Whether the documents ended at max_bytes."""
        return self._max_bytes is not None and self._bytes >= self._max_bytes

    @property
    def empty(self) -> bool:
        """Whether no text has been found so far."""
        return self._bytes == 0

    def __iter__(self) -> "Documents":
        return self

    def __next__(self) -> str:
        while self._max_bytes is None or self._bytes < self._max_bytes:
            row = self._next_row()
            self._row += 1
            self._read = row.get(READ, self._row)
            text, size = self._text(row)
            if text and not text.isspace():
                self._bytes += size
                return text
        raise StopIteration

    def _next_row(self) -> dict:
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:  # libraries that download raise many kinds
            if self._corpus.files is not None:
                raise
            raise ConnectionError(f"source {self._corpus.source!r}, after {self._row} rows: {error}") from error

    def _text(self, row: dict) -> tuple[str, int]:
        """Return the document of a row, and its size in bytes."""
        source, column = self._corpus.source, self._corpus.column
        if column not in row:
            raise missing_column(f"source {source!r}", column, row)
        text = row[column]
        if text is None:  # some datasets contain empty rows
            return "", 0
        if not isinstance(text, str):
            raise ValueError(f"source {source!r}, row {self._row}: {column!r} is {text!r}, not text")
        try:
            return text, len(text.encode())
        except UnicodeEncodeError:  # JSON may contain one half of a surrogate pair
            text = text.encode("utf-8", "replace").decode()
            return text, len(text.encode())


def held_out(text: str, fraction: float) -> bool:
    """Return whether a document belongs to the validation split; this depends only on its text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def _starts(files: Sequence[str]) -> list[int]:
    """Return the cumulative size of the files: the bytes before each one, and at the end the bytes of all."""
    return [0, *itertools.accumulate(storage.info(name).size for name in files)]


def _parts(starts: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return (first, end) of groups of consecutive files with about `size` bytes each.

    Args:
        starts: the result of `_starts`.
        size: a new group begins with the first file that starts at or after each multiple of `size`.
    """
    numbers = np.array(starts[:-1]) // size
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return list(itertools.pairwise(cuts))


def fingerprint(files: Iterable[str]) -> str:
    """Return a hash of names, sizes and modification times. The contents, perhaps terabytes, are not read."""
    entries = [(name, *storage.info(name)) for name in files]
    return hashlib.blake2b(repr(entries).encode(), digest_size=16).hexdigest()


def local_files(source: str) -> list[str] | None:
    """Return the files that a name, a glob or a URL matches, in sorted order; None for a name on the hub."""
    if storage.is_url(source):
        if found := storage.find(source):
            return found
        raise FileNotFoundError(f"no file matches source {source!r}")
    source = os.path.expanduser(source)
    if Path(source).is_dir():
        raise ValueError(f"source {source!r} is a folder; name its files: '{source.rstrip('/')}/**/*{_ending(source)}'")
    literal = Path(source).is_file()  # though its name may have brackets
    names = [source] if literal else glob.glob(source, recursive=True)
    found = sorted(name for name in names if Path(name).is_file())
    if found:
        return [str(Path(name).resolve()) for name in found]
    if LOOKS_LOCAL.search(source):
        raise FileNotFoundError(f"no file matches source {source!r} (working folder: {Path.cwd()})")
    return None


def _ending(folder: str) -> str:
    """Return how the names of the texts in a folder end; .txt if that is unknown."""
    names = [path.name for path in itertools.islice(Path(folder).rglob("*"), 10_000)]
    known = (".arrow", ".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
    return next((ending for ending in known if any(name.endswith(ending) for name in names)), ".txt")


def _python_files(*schemes: str) -> list[str]:
    """Return the Python sources, without tests, in the folders with these names in `sysconfig`."""
    files = set()
    for root in map(sysconfig.get_path, schemes):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = set(subfolders) - {"test", "tests", "idle_test", "site-packages", "dist-packages"}
            files.update(os.path.join(folder, name) for name in names if name.endswith(".py"))
    return sorted(files)
