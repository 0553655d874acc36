"""A weighted mix of several sources: which source each sample comes from, and the blocks in that order."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from data.packing import PackedBlocks
from data.permutation import Permutation
from data.streaming import StreamedBlocks

PERIOD = 4096  # number of samples in which each source has its fraction, rounded to whole samples


class Schedule:
    """Maps the number of a sample to its source, and to its number among the samples of that source.

    In every PERIOD samples each source occurs in proportion to its weight, in a new random order. The source of a
    sample can therefore be computed without going through all samples before it.
    """

    def __init__(self, weights: Sequence[float], seed: Sequence[int]):
        if not all(weight > 0 for weight in weights):
            raise ValueError(f"weights={list(weights)} must be positive")
        exact = np.array(weights, np.float64) / sum(weights) * PERIOD
        self.counts = np.floor(exact).astype(np.int64)
        self.counts[np.argsort(self.counts - exact, kind="stable")[: PERIOD - self.counts.sum()]] += 1
        if not self.counts.all():
            raise ValueError(f"weights={list(weights)}: each must be at least 1/{PERIOD} of their sum")
        self.seed = list(seed)
        self._order = lru_cache(4)(self._draw)

    def _draw(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample of a period and its number among those of its source, int64 [PERIOD]."""
        sources = np.random.default_rng([*self.seed, period]).permutation(
            np.repeat(np.arange(len(self.counts)), self.counts)
        )
        earlier = np.empty(PERIOD, np.int64)
        for source, count in enumerate(self.counts):
            earlier[sources == source] = np.arange(count)
        return sources, earlier

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample and its number in the source, both int64 [samples]."""
        sources, numbers = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        periods, places = np.divmod(samples, PERIOD)
        for period in np.unique(periods):
            now = periods == period
            of_period, earlier = self._order(int(period))
            sources[now] = of_period[places[now]]
            numbers[now] = self.counts[sources[now]] * period + earlier[places[now]]
        return sources, numbers

    def __getstate__(self) -> dict[str, Any]:  # workers do not get the cache
        return {"counts": self.counts, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._order = lru_cache(4)(self._draw)


class MixedBlocks(Dataset):
    """Maps sample numbers [B] to a batch; a source that starts again gets a new random order."""

    def __init__(self, sources: Sequence[PackedBlocks], schedule: Schedule, seed: int):
        self.sources = sources
        self.schedule = schedule
        self.seed = seed

    def __getitem__(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        sources, numbers = self.schedule(np.asarray(samples))
        batch: dict[str, torch.Tensor] = {}
        for source in np.unique(sources):
            own = sources == source
            for name, rows in self._read(int(source), numbers[own]).items():
                if name not in batch:
                    batch[name] = rows.new_empty(len(samples), *rows.shape[1:])
                batch[name][torch.from_numpy(own)] = rows
        return batch

    def _read(self, source: int, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        blocks = self.sources[source]
        epochs, places = np.divmod(numbers, len(blocks))
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            indices[now] = Permutation(len(blocks), [self.seed, source, int(epoch)])(places[now])
        return blocks[indices]


class MixedStream:
    """Endless batches whose samples are taken from streams of single blocks according to a schedule.

    The "position" of each batch is the number of samples up to its end, and the positions in all streams.
    """

    def __init__(self, streams: Sequence[StreamedBlocks], schedule: Schedule, batch_size: int, position: dict | None):
        self.streams = streams
        self.schedule = schedule
        self.batch_size = batch_size
        self.position = position or {"taken": 0, "places": [stream.position for stream in streams]}

    def __iter__(self) -> Iterator[dict]:
        taken, places = self.position["taken"], list(self.position["places"])
        streams = [iter(stream) for stream in self.streams]
        while True:
            sources, _ = self.schedule(np.arange(taken, taken + self.batch_size))
            samples = [next(streams[source]) for source in sources]
            for source, sample in zip(sources, samples, strict=True):
                places[source] = sample.pop("position")
            taken += self.batch_size
            batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
            yield batch | {"position": {"taken": taken, "places": list(places)}}


class Joined(Dataset):
    """Maps indices [B] to a batch of blocks of several sources, one source after the other."""

    def __init__(self, sources: Sequence[PackedBlocks]):
        self.sources = sources
        self._ends = np.cumsum([len(blocks) for blocks in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = []
        for index in indices:
            source = int(np.searchsorted(self._ends, index, side="right"))
            start = int(self._ends[source - 1]) if source else 0
            rows.append(self.sources[source][[int(index) - start]])
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
