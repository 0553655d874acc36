"""What the cache folder holds is whole, however many processes write it."""

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
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*/file/cache \(Not a directory\)"):
        cache.store({tmp_path / "file" / "cache" / "kernel": b"content"})


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    cache.store({path: b"old"})
    with pytest.raises(TypeError):
        cache.store({path: "text"})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
