"""Files that are whole or not there, however the process that writes them ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


@contextmanager
def replacing(path: Path, *, backup: Path | None = None, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, beside `path`, that takes its place when the block ends without an error. Makes the folder.

    Args:
        path: of the file; an OSError names it.
        backup: where the file goes that stood at `path` before.
        durable: the disk has content and name in the end, so that they outlive a loss of power. One process writes at a
            time, over what a killed one left. Otherwise, for what can be made again at once, any number of them may.
    """
    partial = path.with_name(f"{path.name}.partial" if durable else f"{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if backup is not None and path.exists():
            path.replace(backup)
        partial.replace(path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
