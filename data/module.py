"""The base class of all DataModules, which stores its position in the training data in checkpoints."""

import atexit
import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from data.lanes import Lanes, lane_order
from data.sampler import ResumableSampler
from data.task import IGNORE


def check_at_least(least: int, **values: int | None) -> None:
    """Raise ValueError if a value is less than `least`; None means no limit and is allowed."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def outlive_signals(worker: int) -> None:
    """Ignore Ctrl-C, SIGUSR1 and the first SIGTERM in a process that loads data.

    Terminals and SLURM send these signals to all processes of a run, but training still needs batches to finish its
    step. A second SIGTERM ends the process, because PyTorch sends it to clean up.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))


@atexit.register
def _end_workers() -> None:
    """End the processes that load data when the program ends with one of them, as after an error in a worker, whose
    traceback refers to the loader. multiprocessing sends them a SIGTERM, which they ignore, and waits for them."""
    for process in multiprocessing.active_children():
        if process.daemon:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler reports processes that are killed
            process.kill()


class _Padded(Dataset):
    """A dataset in which samples from index `size` on have no labels."""

    def __init__(self, dataset: Dataset, size: int) -> None:
        self.dataset, self.size = dataset, size

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        missing = np.asarray(indices) >= self.size
        batch = self.dataset[np.asarray(indices) % self.size]
        # a copy, because labels may share memory with the inputs
        return batch | {"labels": batch["labels"].masked_fill(torch.from_numpy(missing)[:, None], IGNORE)}


class TimedLoader(DataLoader):
    """A DataLoader whose attribute `waited` counts the seconds that training waits for batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        start = time.perf_counter()
        batches = super().__iter__()
        for batch in batches:
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()


class ResumableDataModule(L.LightningDataModule):
    """A DataModule that resumes with the next batch, even in the middle of an epoch.

    Its state is the position in the training data, the number of samples that all ranks together have trained on. It
    needs `Trainer(use_distributed_sampler=False)`, because its samplers distribute the samples over the ranks.
    """

    distributes_itself = True
    # Arguments that may differ when a run is resumed. The position in the data depends on all other arguments.
    may_change: ClassVar[frozenset[str]] = frozenset({"batch_size", "num_workers", "seed"})

    def __init__(self, batch_size: int, num_workers: int, seed: int):
        super().__init__()
        # Lightning wrongly warns that these loaders cannot resume, and that they need more workers.
        for text in ("your dataloader is not resumable", "does not have many workers"):
            warnings.filterwarnings("ignore", message=f".*{text}", module="lightning")
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, num_workers=num_workers, seed=seed)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._position: Any = 0  # position after the latest training batch
        self._position_before: Any = 0  # position before the first batch of the current optimizer step
        self._step: int | None = None  # the current optimizer step; None before the first
        self._sampler: ResumableSampler | None = None

    @property
    def epoch_progress(self) -> tuple[int, int] | None:
        """The number of batches of this epoch used by each rank, and of the whole epoch; None without epochs."""
        return None if self._sampler is None else self._sampler.epoch_progress

    def prepare_part(self, part: int, parts: int) -> int:
        """Prepare the share of one of several machines; return the number of sections that no machine has finished."""
        raise ValueError(f"part={part}/{parts}: {type(self).__name__} is not prepared in parts; leave part out")

    @property
    def rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    @property
    def accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1

    def training_loader(self, dataset: Dataset, size: int | None, lane: int | None = None) -> DataLoader:
        """Return batches in the order of a ResumableSampler; `dataset` maps an array of indices to a batch.

        With `lane`, each row of an optimizer step reads lanes of `lane` consecutive samples.
        """
        self._sampler = ResumableSampler(
            size,
            self.batch_size,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            accumulate=self.accumulate,
            consumed=self._position,
            lane=lane or 1,
        )
        self._position = self._position_before = self._sampler.consumed
        return self._loader(Lanes(dataset, lane) if lane else dataset, self._sampler)

    def evaluation_loader(self, dataset: Dataset, size: int, run: int | None = None) -> DataLoader:
        """Return samples 0 ... size-1 in order; the last batch may be shorter.

        Samples are dealt to the ranks in turn. All ranks have the same number of batches, as collectives require; a
        rank that runs out of samples gets samples without labels. With `run`, samples form runs of this length, and
        each row of consecutive batches is a lane of whole runs.
        """
        if run:
            rows = min(self.batch_size, -(-size // (run * self.world_size)))
            length = -(-size // (run * rows * self.world_size)) * run
            of_rows = lane_order(rows * self.world_size, length).reshape(length, self.world_size, rows)
            batches = of_rows[:, self.rank].tolist()
            return self._loader(_Padded(Lanes(dataset, run), size), batches)
        own = range(self.rank, -(-size // self.world_size) * self.world_size, self.world_size)
        return self._loader(_Padded(dataset, size), BatchSampler(own, self.batch_size, drop_last=False))

    def _loader(self, dataset: Dataset, batches: ResumableSampler | BatchSampler | list) -> "TimedLoader":
        # With batch_size=None, the dataset is called once with all indices of a batch.
        return TimedLoader(
            dataset,
            sampler=batches,
            batch_size=None,
            num_workers=self.num_workers,
            worker_init_fn=outlive_signals,
            pin_memory=torch.cuda.is_available(),
        )

    def on_before_batch_transfer(self, batch: dict, dataloader_idx: int) -> dict:
        # Lightning calls this for the batch that training uses next; workers have already fetched later ones.
        if self.trainer.training:
            if self._step != self.trainer.global_step:
                self._step, self._position_before = self.trainer.global_step, self._position
            self._position = self._next_position(batch)
            if self._sampler is not None:
                self._sampler.consumed = self._position
        return batch

    def _next_position(self, batch: dict) -> Any:
        return self._position + self.batch_size * self.world_size

    def state_dict(self) -> dict[str, Any]:
        broken_off = self.trainer is not None and self.trainer.global_step == self._step  # an exception ended the step
        return {"position": self._position_before if broken_off else self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = self._position_before = state_dict["position"]
        self._step = None
