"""State tracking: train on short sequences, evaluate on longer ones."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.module import ResumableDataModule, check_at_least
from data.task import IGNORE, Task
from data.tasks import get_task

Supervision = Literal["per_position", "final"]

# Samples are drawn in blocks, because creating a generator takes longer than drawing a sequence. A sample is still a
# function of its index: row index % BLOCK of block index // BLOCK.
BLOCK = 128
TRAIN, VALIDATION, TEST = range(3)  # distinct random streams


class TaskSamples(Dataset):
    """Maps indices [B] to a batch of sequences of one task: input_ids and labels, int64 [B, max_length].

    Lengths are uniform in min_length ... max_length. During the first `curriculum` samples, they are limited to a
    length that grows linearly from min_length to max_length. After the end of a sequence, inputs are 0 and labels
    IGNORE. All batches have the same width, so that compiled models see one shape.
    """

    def __init__(
        self,
        task: Task,
        min_length: int,
        max_length: int,
        supervision: Supervision,
        stream: Sequence[int],
        curriculum: int = 0,
    ):
        self.task = task
        self.min_length = min_length
        self.max_length = max_length
        self.supervision = supervision
        self.stream = (*stream, min_length, max_length)
        self.curriculum = curriculum

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        indices = np.asarray(indices)
        tokens = np.empty((len(indices), self.max_length), dtype=np.int64)
        labels = np.empty_like(tokens)
        for block in np.unique(indices // BLOCK):
            of_block = indices // BLOCK == block
            block_tokens, block_labels = self._draw(int(block))
            tokens[of_block] = block_tokens[indices[of_block] % BLOCK]
            labels[of_block] = block_labels[indices[of_block] % BLOCK]
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels [BLOCK, max_length]."""
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*self.stream, block])))
        lengths = rng.integers(self.min_length, self.max_length, BLOCK, endpoint=True)
        if (index := block * BLOCK) < self.curriculum:
            lengths = lengths.clip(max=self.min_length + (self.max_length - self.min_length) * index // self.curriculum)
        tokens, labels = self.task.draw(rng, (BLOCK, self.max_length))
        padding = np.arange(self.max_length) >= lengths[:, None]
        tokens = np.where(padding, 0, tokens)
        labels = np.where(padding, IGNORE, labels)
        if self.supervision == "final":
            last = self.max_length - 1 - (labels != IGNORE)[:, ::-1].argmax(axis=1)  # the last scored position
            labels = np.where(np.arange(self.max_length) == last[:, None], labels, IGNORE)
        return tokens, labels


class StateTracking(ResumableDataModule):
    """Endless training data of one task, and evaluation data that include longer sequences than those of training.

    Training lengths are uniform in min_length ... max_length. With a curriculum, the longest length grows from
    min_length to max_length over the first `curriculum` training sequences of all devices together. `eval_lengths` are
    the edges of the evaluation ranges: (40, 64, 256) gives 40-63 and 64-256, both ends included (`eval_ranges`).
    Validation has one loader, with lengths uniform over all ranges. A test has one loader for the training lengths and
    one per range. Each evaluation loader has `eval_batches * batch_size` sequences.

    A sample is a pure function of (seed, split, lengths, index). Training needs `Trainer(max_steps=...)`. `options` are
    those of the task (`data.tasks.FAMILIES`).
    """

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    may_change = ResumableDataModule.may_change | {
        *("min_length", "max_length", "curriculum", "supervision"),
        *("eval_lengths", "eval_batches"),
    }

    def __init__(
        self,
        task: str = "parity",
        *,
        min_length: int = 1,
        max_length: int = 40,
        eval_lengths: Sequence[int] = (40, 64, 128, 256),
        batch_size: int = 128,
        eval_batches: int = 8,
        supervision: Supervision = "per_position",
        curriculum: int = 0,
        seed: int = 0,
        num_workers: int = 0,
        **options: Any,
    ):
        super().__init__(batch_size, num_workers, seed)
        edges = (eval_lengths,) if isinstance(eval_lengths, int) else tuple(eval_lengths)
        if not 1 <= min_length <= max_length:
            raise ValueError(f"min_length={min_length}, max_length={max_length}: need 1 <= min_length <= max_length")
        if not all(isinstance(edge, int) for edge in edges):
            raise ValueError(f"eval_lengths={list(edges)}: expected whole numbers, such as [40, 64, 128]")
        if len(edges) < 2 or edges[0] < 1 or any(low >= high for low, high in itertools.pairwise(edges)):
            raise ValueError(f"eval_lengths={list(edges)}: need two or more growing lengths, such as [40, 64, 128]")
        if supervision not in get_args(Supervision):
            raise ValueError(f"unknown supervision {supervision!r}; there are: {', '.join(get_args(Supervision))}")
        check_at_least(1, eval_batches=eval_batches)
        check_at_least(0, curriculum=curriculum)
        self.task = get_task(task, **options)
        self.task.check()
        for key, length in (("min_length", min_length), ("eval_lengths", edges[0])):
            if length < self.task.shortest:
                raise ValueError(
                    f"{key}: sequences of {length} have no label in {task}, whose first one comes within "
                    f"{self.task.shortest} positions; begin with {self.task.shortest} or more"
                )
        self.min_length = min_length
        self.max_length = max_length
        self.eval_batches = eval_batches
        self.supervision: Supervision = supervision
        self.curriculum = curriculum
        ends = [edge - 1 for edge in edges[1:-1]] + [edges[-1]]
        self.eval_ranges: list[tuple[int, int]] = list(zip(edges[:-1], ends, strict=True))

    @property
    def vocab_size(self) -> int:
        return self.task.vocab_size

    @property
    def num_classes(self) -> int:
        return self.task.num_classes

    @property
    def chance(self) -> float:
        """The accuracy of a random guess."""
        return self.task.chance

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """Return accuracies at the last position.

        They are given for the training lengths, for each evaluation range and for each of its lengths; `accuracy` is
        the mean of the ranges, weighted by their numbers of lengths.
        """
        trainer.test(module, datamodule=self, verbose=False)
        return self.report(module.test_sequences)

    def report(self, sequences: torch.Tensor) -> dict[str, Any]:
        """Return the result of `evaluate` for rows of `training.evaluation_metrics.last_answers`.

        If there are only rows of training lengths, the result contains only their accuracy.
        """
        loader, length, right = sequences.unbind(dim=1)
        parts = []
        for index, lengths in enumerate(self._test_lengths):
            of_part = right[loader == index]
            parts.append({"lengths": list(lengths), "accuracy": of_part.mean().item(), "sequences": len(of_part)})
        found = {
            "task": self.task.name,
            "chance": self.chance,
            "training_lengths": [self.min_length, self.max_length],
            "in_distribution": parts[0],
        }
        length, right = length[loader > 0], right[loader > 0]
        if not len(right):
            return found
        numbers = [high - low + 1 for low, high in self.eval_ranges]
        return {
            "accuracy": float(np.average([part["accuracy"] for part in parts[1:]], weights=numbers)),
            **found,
            "ranges": parts[1:],
            "accuracy_by_length": {int(n): right[length == n].mean().item() for n in length.unique()},
        }

    def training_batches(self, number: int) -> dict[str, torch.Tensor]:
        """Return the first `number` training batches for one device, as int16 tensors [number, B, T]."""
        samples = self._samples(TRAIN, self.min_length, self.max_length, self.curriculum)
        at_once = max(1, BLOCK // self.batch_size) * self.batch_size  # a part of a block takes the time of the whole
        total = number * self.batch_size
        drawn = [samples[range(start, min(total, start + at_once))] for start in range(0, total, at_once)]
        shape = (number, self.batch_size, self.max_length)
        return {name: torch.cat([part[name].short() for part in drawn]).view(shape) for name in drawn[0]}

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self._samples(TRAIN, self.min_length, self.max_length, self.curriculum), size=None)

    def val_dataloader(self) -> DataLoader:
        return self._evaluation(VALIDATION, self.eval_ranges[0][0], self.eval_ranges[-1][1])

    def test_dataloader(self) -> list[DataLoader]:
        return [self._evaluation(TEST, low, high) for low, high in self._test_lengths]

    @property
    def _test_lengths(self) -> list[tuple[int, int]]:
        return [(self.min_length, self.max_length), *self.eval_ranges]

    def _evaluation(self, split: int, low: int, high: int) -> DataLoader:
        return self.evaluation_loader(self._samples(split, low, high), self.eval_batches * self.batch_size)

    def _samples(self, split: int, low: int, high: int, curriculum: int = 0) -> TaskSamples:
        return TaskSamples(self.task, low, high, self.supervision, (self.seed, split), curriculum)
