"""Where results say that they come from."""

import subprocess

import pytest

from training import provenance


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder of a repository with one commit, and a tag; training.provenance takes it for its own."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "."], ["tag", "-a", "v1", "-m", "."]):
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
    return tmp_path


def test_a_commit_is_its_hash_also_behind_a_tag(checkout):
    assert len(provenance.commit()) == 40


def test_code_that_git_does_not_know_is_a_change(checkout):
    commit = provenance.commit()
    (checkout / "notes.txt").touch()
    assert provenance.commit() == commit
    (checkout / "models").mkdir()
    (checkout / "models" / "my_cell.py").touch()
    assert provenance.commit() == f"{commit}-dirty"
