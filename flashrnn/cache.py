"""The cache folder, where compiled kernels are stored between processes.

Its files are run as code. Other users must therefore not be able to write to it, unless the user has chosen such a
folder.
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

    Otherwise return `flashrnn` in the user's cache folder, or a temporary folder if others could write to that.
    """
    if chosen := os.environ.get("FLASHRNN_CACHE"):
        return Path(chosen).expanduser()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrnn"
    except RuntimeError:  # the user has no home folder, as in some containers
        return _temporary_folder()
    reason = _refusal(folder)
    if reason is None:
        return folder
    instead = _temporary_folder()
    _warn_refused(folder, reason, instead)
    return instead


def _temporary_folder() -> Path:
    """Return a temporary folder named after the user that only the user can write to, or create a new one.

    Other users may have created folders of any name there.
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
    """Return why others could have written files in a folder; None if they could not, or if there is no folder."""
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
    """Create a folder that only this user can access, and its parents; existing folders do not change."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def store(files: dict[Path, bytes]) -> None:
    """Write files in the given order, each atomically, so that several processes may write the same file.

    If a file cannot be written, warn that the next process will have to compile again.
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
    """A context that one thread of one process enters at a time, by a lock on the file `path`, which is then deleted.

    The operating system releases the lock of a killed process. Without file locks, or if the folder is not writable,
    there is no waiting, and several processes may do the same work.
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
            path.unlink(missing_ok=True)  # waiting processes have it open, and will find the stored result
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child has the file open too
            file.close()


@cache
def warn_not_kept(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be stored in {folder} ({reason}), so every process compiles them again; "
        "set FLASHRNN_CACHE to a folder that can be written to",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def _warn_refused(folder: Path, reason: str, instead: Path) -> None:
    warnings.warn(
        f"compiled kernels are stored in {instead} and not in {folder}, because {reason}; make it writable "
        f"by you only (chmod go-w {folder}), or set FLASHRNN_CACHE to a folder that you trust",
        RuntimeWarning,
        stacklevel=3,
    )
