"""Failed and killed data workers end the program with one message."""

import os
import signal
import sys
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from data.module import ResumableDataModule
from data.text import Text
from tests.tiny_runs import run
from training.command_line import one_line_errors


class Killed(Dataset):
    def __getitem__(self, indices):
        os.kill(os.getpid(), signal.SIGKILL)


def message_of(loader):
    with pytest.raises(SystemExit) as ended, one_line_errors():
        list(loader)
    return ended.value.code


@pytest.fixture(autouse=True)
def _no_traceback(monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def damaged(folder, num_workers):
    """Return a loader of a file that ends too early."""
    folder.joinpath("a.txt").write_text("the state of a recurrent network\n" * 2000)
    options = {"tokenizer": "bpe:260", "context_length": 16, "val_fraction": 0.4, "cache_dir": str(folder)}
    module = Text(f"{folder}/a.txt", num_workers=num_workers, **options)
    module.prepare_data()
    module.setup()
    os.truncate(module.train_data.paths[0], 20)
    return module.train_dataloader()


def check_message(message):
    assert message.startswith("error: ")
    assert "train-00000.bin is damaged" in message
    assert len(message.strip().splitlines()) == 2


def test_error_names_the_damaged_file(tmp_path):
    check_message(message_of(damaged(tmp_path, num_workers=0)))


def test_program_ends_after_an_error_in_a_worker(tmp_path):
    ended = run(__name__, tmp_path, folder=tmp_path)
    assert ended.returncode == 1
    check_message(ended.stderr)


@pytest.mark.slow  # PyTorch checks for dead workers every five seconds
def test_killed_worker_is_an_error(tmp_path):
    loader = ResumableDataModule(4, num_workers=1, seed=0).training_loader(Killed(), 100)
    message = message_of(loader)
    assert message.startswith("error: DataLoader worker (pid")
    assert "lower data.num_workers" in message
    assert "Traceback" not in message


if __name__ == "__main__":
    with one_line_errors():
        list(damaged(Path(sys.argv[1]), num_workers=1))
