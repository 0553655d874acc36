"""Files that are written atomically: whole or not at all, however the process ends."""

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
    """Open a temporary file that replaces `path` when the block ends without an error; make the folder.

    Content and name are flushed to the disk, so that they survive a loss of power. One process at a time may write a
    path. On other storage the file appears when it is uploaded whole.

    Args:
        path: of the file; an OSError names it.
        backup: where the file goes that stood at `path` before.
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
