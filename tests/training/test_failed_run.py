"""A failed run leaves a log that ends with the error, or nothing if its folder holds only what Hydra writes."""

import logging

import pytest

from training.failed_run import recorded


@pytest.fixture
def folder(tmp_path):
    """Return a run's folder as Hydra creates it, with an open log file."""
    made = tmp_path / "run"
    (made / ".hydra").mkdir(parents=True)
    (made / ".hydra" / "overrides.yaml").write_text("[]")
    handler = logging.FileHandler(made / "train.log")
    logging.getLogger().addHandler(handler)
    yield made
    logging.getLogger().removeHandler(handler)
    handler.close()


def fail(folder, keep=False):
    with pytest.raises(ValueError, match="too large"), recorded(str(folder), keep):
        raise ValueError("too large")


def test_unused_folder_is_removed(folder):
    fail(folder)
    assert not folder.exists()


def test_used_folder_is_kept_and_logs_the_error(folder):
    file = folder / "checkpoints" / "last.ckpt"
    file.parent.mkdir()
    file.touch()
    fail(folder)
    assert file.exists()
    assert (folder / "train.log").read_text().endswith("ValueError: too large\n")


def test_working_folder_is_kept(folder, monkeypatch):
    monkeypatch.chdir(folder)
    fail(folder)
    assert folder.exists()


def test_folder_of_a_sweep_job_is_kept(folder):
    fail(folder, keep=True)
    assert "too large" in (folder / "train.log").read_text()
