"""Private interfaces of Lightning and PyTorch exist in these versions, and are used in one module only."""

import re
from pathlib import Path

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"(trainer|torch|DistributedDataParallel|_connector)\._[a-z]|fit_loop|_last_global_step")


def test_attributes_that_are_set_in_lightning_exist():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert callable(connector._sigterm_notifier_fn)
    assert connector.received_sigterm is False
    assert callable(loop._broadcast_sigterm_tensor)
    for counted in (loop.batch_progress.total, loop.batch_progress.current):
        assert [counted.ready, counted.started, counted.processed, counted.completed] == [0] * 4


def test_private_interfaces_that_are_read_exist():
    assert ModelCheckpoint()._last_global_step_saved == 0
    assert callable(ExperimentWriter._check_log_dir_exists)
    assert DistributedDataParallel._get_active_ddp_module() is None
    assert torch._dynamo.config.optimize_ddp is not None


def test_private_interfaces_are_used_in_one_module_only():
    folders = ("data", "models", "training", "benchmarks", "reproduction", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert [file for file in files if PRIVATE.search(file.read_text())] == [ROOT / "training" / "_compat.py"]
