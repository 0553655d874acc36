"""Atomic writing of files: however the process ends, a file is written completely or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.storage import is_url


@contextmanager
def replacing(path: Path, *, backup: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block ends without an error. Missing folders are created.

    Content and name are flushed to the disk, so that they survive a loss of power. Only one process at a time may write
    a path. On remote storage, the file appears once it has been uploaded completely.

    Args:
        path: the path of the file; it is named in an OSError.
        backup: new path of a file that existed at `path` before; None means that it is overwritten.
    """
    if is_url(path):
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:
                shutil.copyfileobj(file, target)
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if backup is not None and path.exists():
            path.replace(backup)
        partial.replace(path)
        _sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
