"""The only module outside of the kernel package that uses private interfaces of Lightning and PyTorch.

It also contains everything that depends on the structure of Lightning's loops, which is not a stable interface.
pyproject.toml bounds the versions.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

SignalHandler = Callable[[int, Any], None]


def handle_sigterm_by(trainer: Trainer, handler: SignalHandler) -> None:
    """Replace Lightning's SIGTERM handler, and disable its broadcast in every batch that checks for the signal."""
    trainer._signal_connector._sigterm_notifier_fn = handler
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def end_by_sigterm(trainer: Trainer, received: bool) -> None:
    """Set the flag that makes Lightning's loops raise SIGTERMException."""
    trainer._signal_connector.received_sigterm = received


def align_loop(trainer: Trainer, epoch: tuple[int, int] | None) -> None:
    """Correct Lightning's batch counters in a resumed run whose batches have another size.

    Lightning schedules validations by the count of all batches (`total`), and ends optimizer steps and epochs by the
    count within the epoch (`current`).

    Args:
        trainer: a trainer at the start of training.
        epoch: the number of batches of the epoch that have been used, and the number of all its batches. None for data
            without epochs, where only whole optimizer steps matter.
    """
    counted = trainer.fit_loop.epoch_loop.batch_progress
    step = trainer.accumulate_grad_batches
    _count_on(counted.total, trainer.global_step * step)
    if epoch is None:
        _count_on(counted.current, -(-counted.current.ready // step) * step)
        return
    taken, batches = epoch
    if counted.current.ready % batches != taken:
        _count_on(counted.current, taken)


def _count_on(counted: Any, batches: int) -> None:
    """Set one of Lightning's counters to this number of batches."""
    more = batches - counted.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(counted, name, getattr(counted, name) + more)


def saved_step(callback: ModelCheckpoint) -> int:
    """Return the step of the most recently saved checkpoint."""
    return callback._last_global_step_saved


def keep_average_on(callback: WeightAveraging, device: torch.device) -> None:
    """Set the device of the averaged weights, before the callback's setup."""
    callback._device = device


class KeepingWriter(ExperimentWriter):
    """A writer of metrics.csv that appends to an existing file."""

    def _check_log_dir_exists(self) -> None:
        pass  # Lightning deletes the file here


def enclosing_ddp() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running, if any."""
    return DistributedDataParallel._get_active_ddp_module()


def without_ddp_cuts() -> Any:
    """Return a context in which torch.compile does not cut graphs at the buckets of DistributedDataParallel."""
    return torch._dynamo.config.patch(optimize_ddp=False)
