"""The folder where compiled kernels are kept from one process to the next."""

import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from uuid import uuid4


def cache_folder() -> Path:
    """$FLASHRNN_CACHE, or flashrnn in the user's cache folder."""
    if chosen := os.environ.get("FLASHRNN_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrnn"
    except RuntimeError:  # a user without a home, as in containers
        return Path(tempfile.gettempdir()) / f"flashrnn-{os.getuid()}"


def store(files: dict[Path, bytes]) -> None:
    """Writes files in this order, each complete or not at all, whoever else writes them at the same time.

    A folder that takes no files costs time at the next start, nothing else.
    """
    for path, content in files.items():
        try:
            _write(path, content)
        except OSError as error:
            warn_not_kept(path.parent, error.strerror)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@cache
def warn_not_kept(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}), so every process compiles them again; "
        "set FLASHRNN_CACHE to a folder that can be written to",
        RuntimeWarning,
        stacklevel=3,
    )
