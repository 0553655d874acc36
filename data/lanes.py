"""Lanes, for models that carry states: consecutive windows of a text in the same row of consecutive batches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset


def lane_order(lanes: int, length: int) -> np.ndarray:
    """Return the order in which `lanes` x `length` windows are read: the first of each lane, then the second of each.

    Lane i consists of the windows i * length ... (i + 1) * length - 1.
    """
    return np.arange(lanes * length).reshape(lanes, length).T.ravel()


class Lanes(Dataset):
    """A dataset of consecutive windows, divided into lanes of `length` windows.

    Its batches also contain continues, bool [B]: False for the first window of a lane, otherwise True.
    """

    def __init__(self, dataset: Dataset, length: int) -> None:
        self.dataset, self.length = dataset, length

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        continues = np.asarray(indices) % self.length != 0
        return self.dataset[indices] | {"continues": torch.from_numpy(continues)}
