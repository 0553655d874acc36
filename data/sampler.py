"""The order of training samples, which is the same for any number of workers and ranks, and resumable at any batch."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from data.permutation import Permutation


class ResumableSampler(Sampler[np.ndarray]):
    """Yields the sample indices of one rank's batches, one array [batch_size] per batch, starting at `consumed`.

    A global batch is `world_size * batch_size` consecutive samples of one global order, of which every rank takes its
    slice. With a `size`, every epoch has a new permutation of range(size), drawn from (seed, epoch). An epoch consists
    of whole optimizer steps of `accumulate` global batches; the remaining samples are dropped. With `size=None`, the
    order is 0, 1, 2, ... without end. With `lane`, the order is a permutation of lanes of `lane` consecutive samples:
    each row of an optimizer step starts a lane, the following steps read these lanes to their ends, and then new ones.

    The state is `consumed`, the number of samples that training has used on all ranks together. The training loop sets
    it, because workers fetch ahead. Iterating yields the rest of the current epoch; len() is that of a whole epoch. If
    `consumed` lies within a step, as after a run with another step size, the rest of that step is skipped, so that all
    ranks have the same number of batches.
    """

    def __init__(
        self,
        size: int | None,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        consumed: int = 0,
        lane: int = 1,
    ):
        self._global_batch = batch_size * world_size
        step = self._global_batch * accumulate
        if size is not None and size < step:
            raise ValueError(
                f"there are {size} training samples, fewer than a step takes: {batch_size} x {world_size} ranks x "
                f"{accumulate} accumulated; use a smaller batch_size or global_batch_size, or more data"
            )
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.consumed = consumed
        self._step = step
        self._lane = lane
        if size is not None:
            self._epoch_samples = size // (step * lane) * step * lane  # that are used
            epoch, offset = divmod(consumed, self._epoch_samples)
            self.consumed = epoch * self._epoch_samples + -(-offset // step) * step

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("an infinite sampler has no length")  # PyTorch and Lightning expect a TypeError
        return self._epoch_samples // self._global_batch

    @property
    def epoch_progress(self) -> tuple[int, int] | None:
        """The number of batches of this epoch used by each rank, and of the whole epoch; None without epochs."""
        return None if self.size is None else (self.consumed % self._epoch_samples // self._global_batch, len(self))

    def __iter__(self) -> Iterator[np.ndarray]:
        own = self.rank * self.batch_size
        if self.size is None:
            start = self.consumed + own
            while True:
                yield np.arange(start, start + self.batch_size)
                start += self._global_batch
        epoch, offset = divmod(self.consumed, self._epoch_samples)
        lanes = Permutation(self.size // self._lane, [self.seed, epoch])
        for start in range(offset + own, self._epoch_samples, self._global_batch):
            step, row = np.divmod(np.arange(start, start + self.batch_size), self._step)
            group, place = np.divmod(step, self._lane)
            yield lanes(group * self._step + row) * self._lane + place
