"""The cache folder: complete files, and a folder that other users cannot write to."""

import os
import tempfile
from pathlib import Path

import pytest

from flashrnn import cache


def test_store_replaces_a_file_and_leaves_no_temporary_files(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"long content", b"short"):
        cache.store({path: content})
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_folder_that_is_not_writable_causes_a_warning(tmp_path):
    (tmp_path / "file").touch()
    cache.warn_not_kept.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"/file/cache \(Not a directory\)"):
        cache.store({tmp_path / "file" / "cache" / "kernel": b"content"})


def test_error_does_not_change_the_old_file(tmp_path):
    path = tmp_path / "file"
    cache.store({path: b"old"})
    with pytest.raises(TypeError):
        cache.store({path: "text"})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def shared(monkeypatch, tmp_path) -> Path:
    """Return the folder for temporary files of a user without a home folder."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLASHRNN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._warn_refused.cache_clear()
    return tmp_path


def is_private(folder: Path) -> bool:
    status = folder.stat(follow_symlinks=False)
    return folder.is_dir() and (status.st_uid, status.st_mode & 0o777) == (os.getuid(), 0o700)


def test_without_home_folder_the_cache_is_a_private_temporary_folder(shared):
    folder = cache.cache_folder()
    assert folder == shared / f"flashrnn-{os.getuid()}"
    assert is_private(folder)
    assert cache.cache_folder() == folder


def writable(folder: Path, elsewhere: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link(folder: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)  # the owner of the link could change it later


def file(folder: Path, elsewhere: Path) -> None:
    folder.touch()


@pytest.mark.parametrize("plant", [writable, link, file])
def test_folder_that_others_may_have_created_is_not_used(shared, plant):
    planted = shared / f"flashrnn-{os.getuid()}"
    plant(planted, shared / "elsewhere")
    folder = cache.cache_folder()
    assert folder.parent == shared
    assert folder != planted
    assert is_private(folder)
    assert cache.cache_folder() == folder  # later processes find it


def test_cache_that_others_can_write_to_is_not_used(shared, monkeypatch):
    home = shared / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    folder = home / ".cache" / "flashrnn"
    cache.store({folder / "kernel": b"content"})
    assert is_private(folder)
    assert cache.cache_folder() == folder
    folder.chmod(0o770)
    with pytest.warns(RuntimeWarning, match=rf"chmod go-w {folder}"):
        assert is_private(cache.cache_folder())


def test_cache_of_another_user_is_not_used(shared, monkeypatch):
    home = shared / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    cache.store({home / ".cache" / "flashrnn" / "kernel": b"content"})
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match=f"{home}.*user"):
        assert cache.cache_folder().parent == shared


def test_folder_in_the_environment_variable_is_not_checked(shared, monkeypatch):
    shared.chmod(0o777)
    monkeypatch.setenv("FLASHRNN_CACHE", str(shared))
    assert cache.cache_folder() == shared
