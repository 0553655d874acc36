"""The tables of docs/backends.md: the backend that `auto` selects, and the largest head sizes. No GPU is needed.

    python -m docs.tools.backend_tables

rewrites them, between the comments that name them.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.markdown import Table, filled, markdown
from flashrnn import registered_cells
from flashrnn.gpu import NAMED
from flashrnn.limits import NOTE, limits, table
from flashrnn.plan import auto_backend

PAGE = Path(__file__).parents[1] / "backends.md"
DTYPES = ("bfloat16", "float16", "float32", "float64")
HEAD_DIMS = (32, 63, 64, 128, 256, 512, 768, 1001, 1024, 2048, 4096)


def choices() -> Table:
    """Return a row for each dtype, head size and cell: the backend that `auto` selects for training on each device."""
    devices = {**NAMED, "CPU": None}
    rows = [
        [
            dtype,
            str(head_dim),
            cell,
            *(auto_backend(cell, 1, head_dim, getattr(torch, dtype), d) for d in devices.values()),
        ]
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
        for cell in registered_cells()
    ]
    return [["dtype", "head size", "cell", *devices], *rows]


def largest_heads() -> Table:
    return table(limit for gpu in NAMED.values() for limit in limits(gpu))


def shared(rows: Table, labels: int) -> Table:
    """Merge rows that differ only in one of their first `labels` entries, and then columns that are equal."""
    header, *rows = rows
    for place in reversed(range(labels)):
        rows = merged(rows, place)
    columns = merged(zip(header, *rows, strict=True), 0)
    return [list(row) for row in zip(*columns, strict=True)]


def merged(rows: Iterable[Sequence[str]], place: int) -> list[Sequence[str]]:
    """Merge rows that differ only at index `place`; the merged row lists their values there."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault((*row[:place], *row[place + 1 :]), []).append(row[place])
    return [(*rest[:place], ", ".join(values), *rest[place:]) for rest, values in groups.items()]


def page() -> str:
    """Return the text of docs/backends.md with up-to-date tables."""
    heads = markdown(shared(largest_heads(), labels=2))
    made = {"choices": markdown(shared(choices(), labels=3)), "limits": f"{heads}\n\n{NOTE.rstrip()}"}
    return filled(PAGE.read_text(), made)


if __name__ == "__main__":
    ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    PAGE.write_text(page())
    print(PAGE)
