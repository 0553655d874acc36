"""Atomic replacement of files: after any failure, the file is either the old or the new one."""

import os
import signal
import subprocess
import sys

import pytest

from data.atomic_file import replacing


def write(path, content, **options):
    with replacing(path, **options) as file:
        file.write(content)


def test_replacing_leaves_only_the_file(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"long content", b"short"):
        write(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_error_does_not_change_the_old_file(tmp_path):
    path, backup = tmp_path / "file", tmp_path / "backup"
    write(path, b"old")
    with pytest.raises(TypeError, match="bytes-like"):
        write(path, "text", backup=backup)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_systems_that_cannot_open_folders(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECTORY")  # as on Windows
    monkeypatch.setattr(os, "open", lambda path, *_: pytest.fail(f"{path} cannot be opened"))
    write(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_old_file_is_moved_to_the_backup(tmp_path):
    path, backup = tmp_path / "file", tmp_path / "backup"
    for content in (b"1", b"2", b"3"):
        write(path, content, backup=backup)
    assert (backup.read_bytes(), path.read_bytes()) == (b"2", b"3")


def test_killed_writer_does_not_change_the_old_file(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    code = (
        "import os, sys, pathlib; from data.atomic_file import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    write(path, b"new")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"new"}


def test_error_of_a_full_disk_names_the_file(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device: .*/file'"),
        replacing(tmp_path / "file"),
        open("/dev/full", "wb", buffering=0) as disk,
    ):
        disk.write(b"x")
    assert not list(tmp_path.iterdir())
