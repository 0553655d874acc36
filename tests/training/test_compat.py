"""What training uses of Lightning and PyTorch without a promise is there, and stands in files of its own."""

import re
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch.nn.parallel import DistributedDataParallel

from models._compat import copy_each

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"(trainer|loop|torch|DistributedDataParallel|_connector)\._[a-z]|epoch_loop|_last_global_step")


def test_what_is_set_in_lightning_is_there():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert callable(connector._sigterm_notifier_fn)
    assert connector.received_sigterm is False
    assert callable(loop._broadcast_sigterm_tensor)
    for counted in (loop.batch_progress.total, loop.batch_progress.current):
        assert [counted.ready, counted.started, counted.processed, counted.completed] == [0] * 4


def test_what_is_read_of_lightning_and_pytorch_is_there():
    assert ModelCheckpoint()._last_global_step_saved == 0
    assert callable(ExperimentWriter._check_log_dir_exists)
    assert DistributedDataParallel._get_active_ddp_module() is None
    assert torch._dynamo.config.optimize_ddp is not None


def test_private_interfaces_are_used_in_one_file_of_each_folder():
    files = [file for folder in ("data", "models", "training") for file in (ROOT / folder).rglob("*.py")]
    users = {str(file.relative_to(ROOT)) for file in files if PRIVATE.search(file.read_text())}
    assert users == {"data/_compat.py", "models/_compat.py", "training/_compat.py"}


@pytest.mark.parametrize("private", [True, False])
def test_copies_of_many_tensors(private, monkeypatch):
    if not private:
        monkeypatch.delattr(torch, "_foreach_copy_")
    into, tensors = [torch.zeros(2), torch.zeros(3, 1)], [torch.rand(2), torch.rand(3, 1)]
    copy_each(into, tensors)
    torch.testing.assert_close(into, tensors)
