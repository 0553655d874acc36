"""What is left of a run that fails: nothing if it has not begun, otherwise a log that ends with the error."""

import logging

import pytest

from training.failed_run import recorded


@pytest.fixture
def folder(tmp_path):
    """A folder as Hydra makes it before a run begins."""
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


def test_a_run_that_has_not_begun_leaves_nothing(folder):
    fail(folder)
    assert not folder.exists()


def test_a_run_that_has_begun_stays_with_its_error(folder):
    file = folder / "checkpoints" / "last.ckpt"
    file.parent.mkdir()
    file.touch()
    fail(folder)
    assert file.exists()
    assert (folder / "train.log").read_text().endswith("ValueError: too large\n")


def test_the_working_folder_stays(folder, monkeypatch):
    monkeypatch.chdir(folder)
    fail(folder)
    assert folder.exists()


def test_a_job_of_a_sweep_stays(folder):
    fail(folder, keep=True)
    assert "too large" in (folder / "train.log").read_text()
