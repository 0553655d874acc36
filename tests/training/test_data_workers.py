"""Failed and killed data workers end the program with one message."""

import os
import signal

import pytest
from torch.utils.data import Dataset

from data.module import ResumableDataModule
from data.text import Text
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_names_the_damaged_file(tmp_path, num_workers):
    tmp_path.joinpath("a.txt").write_text("the state of a recurrent network\n" * 2000)
    options = {"tokenizer": "bpe:260", "context_length": 16, "val_fraction": 0.4, "cache_dir": str(tmp_path)}
    module = Text(f"{tmp_path}/a.txt", num_workers=num_workers, **options)
    module.prepare_data()
    module.setup()
    os.truncate(module.train_data.paths[0], 20)
    message = message_of(module.train_dataloader())
    assert message.startswith("error: ")
    assert "train-00000.bin is damaged" in message
    assert len(message.splitlines()) == 2


@pytest.mark.slow  # PyTorch checks for dead workers every five seconds
def test_killed_worker_is_an_error(tmp_path):
    loader = ResumableDataModule(4, num_workers=1, seed=0).training_loader(Killed(), 100)
    message = message_of(loader)
    assert message.startswith("error: DataLoader worker (pid")
    assert "lower data.num_workers" in message
    assert "Traceback" not in message
