"""The commit that results contain."""

import subprocess

import pytest

from training import provenance


def test_commit_without_git_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Create a repository with one commit and a tag, which training.provenance uses."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "."], ["tag", "-a", "v1", "-m", "."]):
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
    return tmp_path


def test_commit_is_the_hash_even_with_a_tag(checkout):
    assert len(provenance.commit()) == 40


def test_untracked_code_is_a_change(checkout):
    commit = provenance.commit()
    (checkout / "notes.txt").touch()
    assert provenance.commit() == commit
    (checkout / "models").mkdir()
    (checkout / "models" / "my_cell.py").touch()
    assert provenance.commit() == f"{commit}-dirty"


def test_short_commit_keeps_the_dirty_mark():
    assert provenance.short("a" * 40) == "a" * 12
    assert provenance.short("a" * 40 + "-dirty") == "a" * 12 + "-dirty"
