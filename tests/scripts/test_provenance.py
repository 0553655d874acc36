"""Where results say that they come from."""

import subprocess

from scripts import provenance


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None


def test_a_commit_is_its_hash_also_behind_a_tag(tmp_path, monkeypatch):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "."], ["tag", "-a", "v1", "-m", "."]):
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert len(provenance.commit()) == 40
