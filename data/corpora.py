"""Where text comes from: a dataset of the Hugging Face hub, local files, or the Python standard library's sources."""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import datasets
import fsspec
import huggingface_hub
import pyarrow
from datasets.distributed import split_dataset_by_node
from tqdm.auto import tqdm

STDLIB = "stdlib"
JSON_LINES = re.compile(r"\.jsonl?(\.(gz|bz2|xz|zst))?$")
LOOKS_LOCAL = re.compile(r"[*?\[]|^[./~]|/.*/|\.(txt|md|py|parquet|jsonl?)(\.\w+)?$")
DOCUMENT_CHARS = 16 * 1024


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    source: "stdlib", a local file or glob, or the name of a dataset on the hub. Local files are JSON lines (.jsonl,
    .json, compressed or not), .parquet, or else plain text, which is cut at line ends into documents of about 16 KiB,
    so that one large file streams, and can be held out in part.
    """

    source: str
    column: str = "text"  # that holds the document, in JSON lines, parquet and hub datasets
    subset: str | None = None  # the rest is for the hub
    split: str = "train"
    revision: str | None = None

    @cached_property
    def files(self) -> list[str] | None:
        """The local files in sorted order; None: the source is on the hub."""
        if self.source == STDLIB:
            return _stdlib_files()
        if Path(self.source).is_dir():
            raise ValueError(
                f"source {self.source!r} is a folder; name its files: '{self.source.rstrip('/')}/**/*.txt'"
            )
        found = sorted(name for name in glob.glob(self.source, recursive=True) if Path(name).is_file())
        if found:
            return [str(Path(name).resolve()) for name in found]
        if LOOKS_LOCAL.search(self.source):
            raise FileNotFoundError(f"no file matches source {self.source!r} (working folder: {Path.cwd()})")
        return None

    def identity(self) -> dict[str, str | None]:
        """What tells this corpus from others, as far as it is known without a download."""
        if self.files is None:
            hub = {"subset": self.subset, "split": self.split, "revision": self.revision}
            return {"source": self.source, "column": self.column, **hub}
        return {"source": self.source, "column": self.column, "files": fingerprint(self.files)}

    def rows(self, streaming: bool = False, rank: int = 0, world_size: int = 1) -> datasets.IterableDataset:
        """Rows with the column `self.column`; of several ranks each gets its own. Its state_dict() resumes it.

        streaming: a hub dataset is read while it is used; otherwise it is downloaded first. Local files are always
        read in place.
        """
        with self._naming_errors():
            rows = self._open(streaming)
        if rows.column_names is not None:
            if self.column not in rows.column_names:
                raise self._missing_column(rows.column_names)
            rows = rows.select_columns([self.column])
        return split_dataset_by_node(rows, rank, world_size)

    def _open(self, streaming: bool) -> datasets.IterableDataset:
        if self.files is None:
            dataset = _load_from_hub(self, streaming)
            return dataset if streaming else dataset.to_iterable_dataset()
        kinds = {_kind(name) for name in self.files}
        if len(kinds) > 1:
            raise ValueError(f"source {self.source!r} mixes {' and '.join(sorted(kinds))} files; name one kind")
        if kinds == {"parquet"}:
            return datasets.load_dataset("parquet", data_files=self.files, split="train", streaming=True)
        if kinds == {"JSON lines"}:
            return datasets.IterableDataset.from_generator(_read_json_lines, gen_kwargs={"files": self.files})
        arguments = {"files": self.files, "column": self.column}
        return datasets.IterableDataset.from_generator(_read_text, gen_kwargs=arguments)

    def texts(self, rows: Iterable[dict]) -> Iterator[str]:
        """The documents of `rows` that have any text."""
        rows = iter(rows)
        for number in itertools.count(1):
            with self._naming_errors():
                row = next(rows, None)
            if row is None:
                return
            if self.column not in row:
                raise self._missing_column(row)
            text = row[self.column]
            if not isinstance(text, str):
                raise ValueError(f"source {self.source!r}, row {number}: {self.column!r} is {text!r}, not text")
            if text.strip():
                yield text.encode("utf-8", "replace").decode()  # JSON may hold halves of a surrogate pair

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"source {self.source!r} cannot be read: {error}") from error

    def _missing_column(self, columns: Iterable[str]) -> ValueError:
        return ValueError(
            f"source {self.source!r} has no column {self.column!r}; set `column` to one of: {', '.join(columns)}"
        )

    def read(self, max_bytes: int | None = None, streaming: bool = False) -> Iterator[str]:
        """Documents from the start, as many as begin within the first `max_bytes` of text; shows a progress bar."""
        size = 0
        with tqdm(total=max_bytes, desc=f"reading {self.source}", unit="B", unit_scale=True, disable=None) as progress:
            for text in self.texts(self.rows(streaming)):
                if max_bytes is not None and size >= max_bytes:
                    break
                yield text
                step = len(text.encode())
                size += step
                progress.update(step)
        if not size:
            raise ValueError(f"source {self.source!r} has no text")


def held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: a function of its text alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def fingerprint(files: Iterable[str]) -> str:
    """Changes when a file is added, removed or edited. Contents are not read: they may be terabytes."""
    entries = []
    for name in files:
        status = Path(name).stat()
        entries.append((name, status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(repr(entries).encode(), digest_size=16).hexdigest()


def check_hub(kind: str, name: str) -> None:
    """One quick request before the real ones, which try for half a minute when there is no network."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    api = huggingface_hub.HfApi()
    ask = {"dataset": api.dataset_info, "tokenizer": api.model_info}[kind]
    try:
        ask(name, timeout=5)
    except huggingface_hub.errors.GatedRepoError as error:
        raise PermissionError(
            f"the {kind} {name!r} asks for a login: accept its terms there, then `hf auth login`"
        ) from error
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.HFValidationError) as error:
        raise FileNotFoundError(f"{kind} {name!r} is neither a local path nor public on {api.endpoint}") from error
    except Exception as error:  # which HTTP library raises it depends on the version of huggingface_hub
        raise ConnectionError(
            f"{kind} {name!r}: cannot reach {api.endpoint} ({error}). "
            "If it was downloaded before, set HF_HUB_OFFLINE=1; else give a local path"
        ) from error


def _load_from_hub(corpus: Corpus, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    check_hub("dataset", corpus.source)
    try:
        return datasets.load_dataset(
            corpus.source, corpus.subset, split=corpus.split, revision=corpus.revision, streaming=streaming
        )
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        hint = "not downloaded before, and HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else error
        raise FileNotFoundError(f"dataset {corpus.source!r} cannot be loaded: {hint}") from error


def _stdlib_files() -> list[str]:
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _kind(name: str) -> str:
    if name.endswith(".parquet"):
        return "parquet"
    return "JSON lines" if JSON_LINES.search(name) else "text"


@contextlib.contextmanager
def _open_text(name: str) -> Iterator[Iterable[str]]:
    if name.endswith(".zst") and "zstd" not in fsspec.compression.available_compressions():
        raise ValueError(f"{name} needs `pip install zstandard` to be read")
    try:
        with fsspec.open(name, "rt", encoding="utf-8", compression="infer") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error


def _read_text(files: list[str], column: str) -> Iterator[dict[str, str]]:
    for name in files:
        with _open_text(name) as file:
            while lines := file.readlines(DOCUMENT_CHARS):
                yield {column: "".join(lines)}


def _read_json_lines(files: list[str]) -> Iterator[dict]:
    for name in files:
        with _open_text(name) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{name}, line {number} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{name}, line {number} is not a JSON object: {line[:80].strip()}")
                yield row
