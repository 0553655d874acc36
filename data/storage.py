"""Files on a disk or on any storage that fsspec supports by a URL, such as s3://bucket/folder or gs://bucket/folder."""

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from filelock import FileLock

VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")  # keys, by storage


class Info(NamedTuple):
    size: int  # bytes
    version: Any  # changes with the content


def is_url(name: object) -> bool:
    return "://" in str(name)


def path(name: str | Path) -> Path:
    """Return a Path or, for a URL, a UPath, which has the same methods."""
    if not is_url(name):
        return Path(name)
    from upath import UPath  # only needed for URLs

    return UPath(name)


def find(pattern: str) -> list[str]:
    """Return the files of a URL, which may be a glob, in sorted order."""
    system, inner = fsspec.url_to_fs(pattern)
    found = {inner: {"type": "file"}} if system.isfile(inner) else system.glob(inner, detail=True)
    return sorted(system.unstrip_protocol(name) for name, about in found.items() if about["type"] == "file")


def info(name: str) -> Info:
    if not is_url(name):
        status = Path(name).stat()
        return Info(status.st_size, status.st_mtime_ns)
    system, inner = fsspec.url_to_fs(name)
    about = system.info(inner)
    return Info(about["size"], next((str(about[key]) for key in VERSIONS if about.get(key)), None))


def sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, by their relative names."""
    if not is_url(folder):
        files = (file for file in folder.rglob("*") if file.is_file())
        return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    found = folder.fs.find(folder.path, detail=True)
    return {name[len(folder.path) :].lstrip("/"): about["size"] for name, about in found.items()}


def read_ranges(files: Sequence[Path], starts: Sequence[int], size: int) -> list[bytes]:
    """Return `size` bytes of each file from its start on, or fewer if the file ends; URLs are read concurrently."""
    if not is_url(files[0]):
        found = []
        for file, start in zip(files, starts, strict=True):
            with file.open("rb", buffering=0) as content:
                content.seek(start)
                found.append(content.read(size))
        return found
    ends = [start + size for start in starts]
    return files[0].fs.cat_ranges([file.path for file in files], list(starts), ends, on_error="raise")


def lock(name: Path) -> AbstractContextManager:
    """Return a lock between processes for a name on a disk.

    Remote storage has no locks. None is needed there: files appear complete, and all processes write the same content.
    """
    return nullcontext() if is_url(name) else FileLock(name)


def local_folder(folder: Path) -> Path:
    """Return a local folder; for a URL, a copy on this machine that exists as long as the process."""
    if not is_url(folder) or not folder.exists():
        return folder
    if str(folder) not in _copies:
        copy = tempfile.TemporaryDirectory(prefix="flashrnn-lm-")
        for name in sizes(folder):
            target = Path(copy.name, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((folder / name).read_bytes())
        _copies[str(folder)] = copy
    return Path(_copies[str(folder)].name)


_copies: dict[str, tempfile.TemporaryDirectory] = {}  # by URL


def upload(source: Path, target: Path) -> None:
    """Copy a local folder to a path or URL."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sizes(source):
        (target / name).write_bytes((source / name).read_bytes())
