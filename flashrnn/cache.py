"""The folder where compiled kernels are kept from one process to the next.

What lies there is run as code. So others must not be able to write to it, unless the user has named such a folder.
"""

import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4


def cache_folder() -> Path:
    """Return $FLASHRNN_CACHE, as it is; or flashrnn in the user's cache folder, if it is the user's own; or a folder
    for temporary files."""
    if chosen := os.environ.get("FLASHRNN_CACHE"):
        return Path(chosen).expanduser()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrnn"
    except RuntimeError:  # a user without a home, as in containers
        return _temporary_folder()
    reason = _refusal(folder)
    if reason is None:
        return folder
    instead = _temporary_folder()
    _warn_refused(folder, reason, instead)
    return instead


def _temporary_folder() -> Path:
    """Return the first folder by the user's number that is the user's own: there, anybody can take any name first."""
    shared, name = Path(tempfile.gettempdir()), f"flashrnn-{os.getuid()}" if hasattr(os, "getuid") else "flashrnn"
    for folder in (shared / name, *sorted(shared.glob(f"{name}-*"))):
        try:
            make_folder(folder)
        except OSError:  # a file, or a folder for temporary files that takes none
            continue
        if not folder.is_symlink() and _refusal(folder) is None:
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _refusal(folder: Path) -> str | None:
    """Return why what lies in the folder may be somebody else's; None if it cannot, or if there is no folder."""
    try:
        status = folder.stat()
    except OSError:
        return None
    if not hasattr(os, "getuid"):  # Windows, where all these folders are the user's
        return None
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    return "others may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def make_folder(folder: Path) -> None:
    """Make a folder, for this user alone, and those that it lies in; what is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def store(files: dict[Path, bytes]) -> None:
    """Write files in this order, each complete or not at all, whoever else writes them at the same time.

    A folder that takes no files costs time at the next start, nothing else.
    """
    for path, content in files.items():
        try:
            _write(path, content)
        except OSError as error:
            warn_not_kept(path.parent, error.strerror)


def _write(path: Path, content: bytes) -> None:
    make_folder(path.parent)
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Run the block in one thread of one process at a time, by a lock on the file `path`, which is gone afterwards.

    The operating system frees the lock of a process that is killed. Where it has no such locks, or the folder takes no
    files, nobody waits: then several may do the same at once.
    """
    file = None
    with suppress(ImportError, OSError):
        import fcntl

        make_folder(path.parent)
        file = path.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)  # who waits for it has it open, and finds what has been stored
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child has the file open too
            file.close()


@cache
def warn_not_kept(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}), so every process compiles them again; "
        "set FLASHRNN_CACHE to a folder that can be written to",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def _warn_refused(folder: Path, reason: str, instead: Path) -> None:
    warnings.warn(
        f"compiled kernels are not read from {folder}, because {reason}, but kept in {instead}; make it yours alone "
        f"(chmod go-w {folder}), or set FLASHRNN_CACHE to a folder that you trust",
        RuntimeWarning,
        stacklevel=3,
    )
