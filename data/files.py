"""Rows of files, read by `datasets`: JSON lines or plain text, compressed or not, parquet, and arrow.

Each file is opened separately, so that errors can name it and text documents end with it. JSON lines are read as lines
of text, because the JSON reader of `datasets` fails if the type of an unused column changes, turns numbers into
strings, and does not report the number of a broken line (docs/dev/log.md, "Reading files by datasets").
"""

import contextlib
import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from datasets import Features, IterableDataset, Value, load_dataset

READ = "bytes_read"  # key of a row: number of stored bytes read so far
DOCUMENT_CHARS = 16 * 1024
ROWS_AT_ONCE = 256
LINES = Features({"line": Value("string")})
COMPRESSED = r"\.(?:gz|bz2|xz|zst)"
JSON_LINES = re.compile(rf"\.jsonl?({COMPRESSED})?$")
TABLES = re.compile(rf"\.[ct]sv({COMPRESSED})?$")

Rows = Iterator[tuple[dict, int]]  # a row, and its number of characters in the file; 0 if unknown


def read_rows(files: list[str], starts: list[int], column: str) -> Iterator[dict]:
    """Return rows {column: text, READ: bytes}; `starts` are the bytes of all files before each file.

    Bytes of compressed files, parquet and arrow are only counted at the end of each file: readers do not report them.
    """
    for name, read in zip(files, starts, strict=True):
        compressed = re.search(rf"{COMPRESSED}$", name)
        for row, length in READERS[kind(name)](name, column):
            if column not in row:
                raise missing_column(name, column, row)
            read += 0 if compressed else length
            yield {column: row[column], READ: read}


def read_joined(groups: list[list[str]], ends: list[int], column: str) -> Iterator[dict]:
    """Return rows as in `read_rows`, each with all text files of a group, which are preceded by lines with their names.

    `ends` are the bytes of all files up to the end of each group.
    """
    for names, end in zip(groups, ends, strict=True):
        yield {column: "".join(map(_named_text, names)), READ: end}


def _named_text(name: str) -> str:
    return f"# {Path(name).name}\n{''.join(_lines(name))}\n"


def read_json_lines(name: str) -> Iterator[dict]:
    """Return the objects of a file of JSON lines, compressed or not."""
    if kind(name) != "JSON lines":
        raise ValueError(f"{name} is not a JSON lines file: expected .jsonl or .json, compressed or not")
    return (row for row, _ in _json_lines(name, ""))


def kind(name: str) -> str:
    """Return the key of READERS that reads a file."""
    if name.endswith((".parquet", ".arrow")):
        return name.rpartition(".")[2]
    if TABLES.search(name):
        raise ValueError(f"{name} is a table and cannot be read as text: convert it to parquet or JSON lines")
    return "JSON lines" if JSON_LINES.search(name) else "text"


def missing_column(where: str, column: str, columns: Iterable[str]) -> ValueError:
    return ValueError(f"{where} has no column {column!r}; set `column` to one of: {', '.join(columns)}")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the file to the errors of all compressions and storages."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not in UTF-8 ({error}): convert it, for example with iconv") from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be read: {reason}; if it is damaged, download it again") from error


def _values(name: str, rows: IterableDataset) -> Iterator:
    """Return the values of the first column of a file."""
    with _naming(name):
        # Not iter(), which would split the rows among DataLoader workers a second time.
        for batch in rows.with_format("arrow").iter(ROWS_AT_ONCE):
            yield from batch.column(0).to_pylist()


def _lines(name: str) -> Iterator[str]:
    with _naming(name):
        rows = IterableDataset.from_text(glob.escape(name), features=LINES, keep_linebreaks=True)
    return _values(name, rows)


def _text(name: str, column: str) -> Rows:
    """Return parts of about DOCUMENT_CHARS that end at line ends; only longer lines are split."""
    document, size = [], 0
    for line in _lines(name):
        start = 0
        while start < len(line):
            document.append(line[start : start + 2 * DOCUMENT_CHARS - size])
            start += len(document[-1])
            size += len(document[-1])
            if size >= DOCUMENT_CHARS:
                yield {column: "".join(document)}, size
                document, size = [], 0
    if document:
        yield {column: "".join(document)}, size


def _json_lines(name: str, column: str) -> Rows:
    for number, line in enumerate(_lines(name), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number} is not JSON: {error}; is the file complete?") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number} is not a JSON object: {line[:80].strip()}")
        yield row, len(line)


def _parquet(name: str, column: str) -> Rows:
    path = glob.escape(name)
    with _naming(name):
        rows = IterableDataset.from_parquet(path, columns=[column], batch_size=ROWS_AT_ONCE)
        others = [] if rows.column_names else IterableDataset.from_parquet(path).column_names
    if others:
        raise missing_column(name, column, others)
    for text in _values(name, rows):
        yield {column: text}, 0


def _arrow(name: str, column: str) -> Rows:
    """Return the rows of a file that `datasets` wrote by `save_to_disk`."""
    with _naming(name):
        rows = load_dataset("arrow", data_files=glob.escape(name), split="train", streaming=True)
    if column not in rows.column_names:
        raise missing_column(name, column, rows.column_names)
    for text in _values(name, rows.select_columns([column])):
        yield {column: text}, 0


READERS: dict[str, Callable[[str, str], Rows]] = {
    "JSON lines": _json_lines,
    "parquet": _parquet,
    "arrow": _arrow,
    "text": _text,
}
