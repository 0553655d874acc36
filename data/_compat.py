"""What DataModules read and set of Lightning's loops, which promises no interface for it (lightning>=2.6,<2.7)."""

from typing import Any

from lightning import Trainer


def batch_is_open(trainer: Trainer) -> bool:
    """Return whether training has taken a batch that it has not finished, because an exception interrupted its step."""
    counted = trainer.fit_loop.epoch_loop.batch_progress.current
    return counted.ready > counted.processed


def align_loop(trainer: Trainer, taken: int | None, batches: int | None) -> None:
    """Set how many batches Lightning has counted, for a resumed run whose batches have another size.

    Lightning validates by the count of all batches (`total`), and ends steps and epochs by that of the epoch
    (`current`).

    Args:
        trainer: at the start of training.
        taken: batches of the epoch that have been taken; None without epochs, where only whole steps matter.
        batches: of an epoch.
    """
    counted = trainer.fit_loop.epoch_loop.batch_progress
    step = trainer.accumulate_grad_batches
    _count_on(counted.total, trainer.global_step * step)
    if taken is None:
        _count_on(counted.current, -(-counted.current.ready // step) * step)
    elif counted.current.ready % batches != taken:
        _count_on(counted.current, taken)


def _count_on(counted: Any, batches: int) -> None:
    """Set how many batches one of Lightning's counters has seen."""
    more = batches - counted.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(counted, name, getattr(counted, name) + more)
