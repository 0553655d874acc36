"""Rows of files: JSON lines or plain text, compressed or not, and parquet.

The loaders of `datasets` do not serve corpora of the web. That of JSON ends where a column that nobody asked for
changes its type, that of text holds a whole file in memory, all take a name with brackets for a pattern, and their
errors name no file. A row here also has the number of bytes that were read, which is the progress. Measurements are in
docs/dev/log.md, "Reading JSON lines ourselves". `datasets` divides the rows among readers, and goes on where one ended.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

import pyarrow
import pyarrow.parquet
from backports import zstd

from data import storage

READ = "bytes_read"  # key of a row: bytes, as stored, of all files that have been read so far
DOCUMENT_CHARS = 16 * 1024
JSON_LINES = re.compile(r"\.jsonl?(\.(gz|bz2|xz|zst))?$")
TABLES = re.compile(r"\.[ct]sv(\.(gz|bz2|xz|zst))?$")
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstd.open}
DAMAGES = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError, pyarrow.ArrowException)

Rows = Iterator[tuple[dict, int]]  # row, and bytes of the file read so far


def read_rows(files: list[str], starts: list[int], column: str) -> Iterator[dict]:
    """Return rows {column: text, READ: bytes}; `starts` are the bytes of all files before each file."""
    for name, start in zip(files, starts, strict=True):
        with _naming_damage(name):
            for row, read in READERS[kind(name)](name, column):
                if column not in row:
                    raise missing_column(name, column, row)
                yield {column: row[column], READ: start + read}


def read_joined(groups: list[list[str]], ends: list[int], column: str) -> Iterator[dict]:
    """Return rows as `read_rows` does, each the text files of a group, each file after a line with its name; `ends` are
    the bytes of all files up to the end of each group."""
    for names, end in zip(groups, ends, strict=True):
        yield {column: "".join(map(_named_text, names)), READ: end}


def _named_text(name: str) -> str:
    with _naming_damage(name), _open(name) as (file, _):
        return f"# {Path(name).name}\n{file.read()}\n"


def read_json_lines(name: str) -> Iterator[dict]:
    """Return the objects of a file of JSON lines, compressed or not."""
    if kind(name) != "JSON lines":
        raise ValueError(f"{name} is no file of JSON lines: expected .jsonl or .json, compressed or not")
    with _naming_damage(name):
        for row, _ in _json_lines(name, ""):
            yield row


def kind(name: str) -> str:
    """Return the key of READERS that reads a file."""
    if name.endswith(".parquet"):
        return "parquet"
    if TABLES.search(name):
        raise ValueError(f"{name} is a table, which is not read as text: convert it to parquet or JSON lines")
    return "JSON lines" if JSON_LINES.search(name) else "text"


def missing_column(where: str, column: str, columns: Iterable[str]) -> ValueError:
    return ValueError(f"{where} has no column {column!r}; set `column` to one of: {', '.join(columns)}")


@contextlib.contextmanager
def _naming_damage(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error
    except DAMAGES as error:
        raise ValueError(f"{name} cannot be read: {error}; if it is cut off or damaged, get it again") from error


@contextlib.contextmanager
def _open(name: str) -> Iterator[tuple[TextIO, Callable[[], int]]]:
    """Return the text of a file, and a function that returns how many of its bytes have been read."""
    opener = OPENERS.get(Path(name).suffix, _as_it_is)
    with storage.open_binary(name) as raw, opener(raw, "rt", encoding="utf-8") as text:
        yield text, raw.tell


def _as_it_is(raw: BinaryIO, mode: str, encoding: str) -> TextIO:
    return io.TextIOWrapper(raw, encoding=encoding)


def _text(name: str, column: str) -> Rows:
    with _open(name) as (file, tell):
        while text := file.read(DOCUMENT_CHARS):
            if not text.endswith("\n"):
                text += file.readline(DOCUMENT_CHARS)  # to the end of the line, if it has one
            yield {column: text}, tell()


def _json_lines(name: str, column: str) -> Rows:
    with _open(name) as (file, tell):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}, line {number} is not JSON: {error}; is the file whole?") from error
            if not isinstance(row, dict):
                raise ValueError(f"{name}, line {number} is not a JSON object: {line[:80].strip()}")
            yield row, tell()


def _parquet(name: str, column: str) -> Rows:
    with storage.open_binary(name) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        columns = file.schema_arrow.names
        if column not in columns:
            raise missing_column(name, column, columns)
        size, rows, number = storage.info(name).size, file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield {column: text}, size * number // rows


READERS: dict[str, Callable[[str, str], Rows]] = {"JSON lines": _json_lines, "parquet": _parquet, "text": _text}
