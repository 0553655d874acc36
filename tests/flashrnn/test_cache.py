"""What the cache folder holds is whole, however many processes write it."""

import os
import tempfile
from pathlib import Path

import pytest

from flashrnn import cache


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"long content", b"short"):
        cache.store({path: content})
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_takes_no_files_is_told_and_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    cache.warn_not_kept.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"/file/cache \(Not a directory\)"):
        cache.store({tmp_path / "file" / "cache" / "kernel": b"content"})


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    cache.store({path: b"old"})
    with pytest.raises(TypeError):
        cache.store({path: "text"})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def shared(monkeypatch, tmp_path) -> Path:
    """The folder for temporary files of a user without a home."""

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


def test_without_a_home_the_cache_is_a_private_folder_for_temporary_files(shared):
    folder = cache.cache_folder()
    assert folder == shared / f"flashrnn-{os.getuid()}"
    assert is_private(folder)
    assert cache.cache_folder() == folder


def writable(folder: Path, elsewhere: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link(folder: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)  # whoever has made the link can change it later


def file(folder: Path, elsewhere: Path) -> None:
    folder.touch()


@pytest.mark.parametrize("plant", [writable, link, file])
def test_a_folder_that_others_may_have_made_is_not_the_cache(shared, plant):
    planted = shared / f"flashrnn-{os.getuid()}"
    plant(planted, shared / "elsewhere")
    folder = cache.cache_folder()
    assert folder.parent == shared
    assert folder != planted
    assert is_private(folder)
    assert cache.cache_folder() == folder  # and later processes find it


def test_a_cache_in_the_home_that_others_may_write_to_is_not_read(shared, monkeypatch):
    home = shared / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    folder = home / ".cache" / "flashrnn"
    cache.store({folder / "kernel": b"content"})
    assert is_private(folder)
    assert cache.cache_folder() == folder
    folder.chmod(0o770)
    with pytest.warns(RuntimeWarning, match=rf"chmod go-w {folder}"):
        assert is_private(cache.cache_folder())


def test_a_cache_of_another_user_is_not_read(shared, monkeypatch):
    home = shared / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    cache.store({home / ".cache" / "flashrnn" / "kernel": b"content"})
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match=f"{home}.*user"):
        assert cache.cache_folder().parent == shared


def test_a_folder_that_the_user_has_named_is_taken_as_it_is(shared, monkeypatch):
    shared.chmod(0o777)
    monkeypatch.setenv("FLASHRNN_CACHE", str(shared))
    assert cache.cache_folder() == shared
