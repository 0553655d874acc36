"""A random permutation that is computed element by element, and needs no memory for any number of samples."""

from collections.abc import Sequence

import numpy as np

ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of range(size), determined by a seed.

    It is a Feistel network over the next larger power of four. Values outside of the range are encrypted again until
    they fall inside (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    def __init__(self, size: int, seed: Sequence[int]):
        self.size = size
        half = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half), np.uint64(2**half - 1)
        self._keys = np.random.default_rng(seed).integers(0, 2**64, ROUNDS, dtype=np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of the order, int64."""
        found = self._encrypted(np.asarray(places).astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._encrypted(found[outside])
        return found.astype(np.int64)

    def _encrypted(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return left << self._half | right


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return hashed numbers in which each bit depends on all bits of the input (the finaliser of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
