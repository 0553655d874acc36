"""The cache folder, where compiled kernels are kept from one process to the next.

Its files are run as code, so other users must not be able to write to it, unless the user has chosen such a folder.
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
    """Return $FLASHRNN_CACHE if it is set.

    Otherwise return `flashrnn` in the user's cache folder if it belongs to the user alone, or else a temporary folder.
    """
    if chosen := os.environ.get("FLASHRNN_CACHE"):
        return Path(chosen).expanduser()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrnn"
    except RuntimeError:  # a user without a home folder, as in containers
        return _temporary_folder()
    reason = _refusal(folder)
    if reason is None:
        return folder
    instead = _temporary_folder()
    _warn_refused(folder, reason, instead)
    return instead


def _temporary_folder() -> Path:
    """Return the first temporary folder named after the user that belongs to the user alone, or a new one.

    Anybody may have made a folder of any name there.
    """
    shared, name = Path(tempfile.gettempdir()), f"flashrnn-{os.getuid()}" if hasattr(os, "getuid") else "flashrnn"
    for folder in (shared / name, *sorted(shared.glob(f"{name}-*"))):
        try:
            make_folder(folder)
        except OSError:  # a file has the name, or nothing can be written
            continue
        if not folder.is_symlink() and _refusal(folder) is None:
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _refusal(folder: Path) -> str | None:
    """Return why the files of a folder may be somebody else's; None if they cannot be, or if there is no folder."""
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
    """Make a folder for this user alone, and its parents; folders that exist do not change."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def store(files: dict[Path, bytes]) -> None:
    """Write files in this order, each atomically, so that several processes may write the same one.

    If a file cannot be written, a warning says so: the next process compiles again.
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
    """Run the block in one thread of one process at a time, by a lock on the file `path`, which is deleted afterwards.

    The operating system releases the lock of a process that is killed. Without file locks, or in a folder that cannot
    be written, nobody waits, and several may do the same work at once.
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
            path.unlink(missing_ok=True)  # those who wait have it open, and will find the stored result
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
