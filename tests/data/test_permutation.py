"""Pseudorandom permutations of any size with random access."""

import numpy as np
import pytest

from data.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4096, 70_001])
def test_permutation_contains_every_sample_once(size):
    order = Permutation(size, [0, 1])(np.arange(size))
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))


def test_random_access_to_a_permutation_larger_than_memory():
    order = Permutation(612_000_000_000, [3])
    places = np.array([0, 5, 611_999_999_999])
    together = order(places)
    assert [int(order(places[[number]])[0]) for number in range(3)] == together.tolist()
    assert len(set(together.tolist())) == 3
    assert together.max() < 612_000_000_000


def test_permutations_look_random():
    """Two permutations agree at about one index, as random ones do, and neighbours are not correlated."""
    size = 10_000
    orders = [Permutation(size, seed)(np.arange(size)) for seed in ([0, 0], [0, 1], [1, 0])]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (orders[first] == orders[second]).sum() < 10
    for order in orders:
        assert (np.diff(order) == 1).sum() < 10
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        counts = np.histogram(order[: size // 10], bins=10, range=(0, size))[0]
        assert counts.min() > 70  # 100 expected, with a standard deviation of 9


def test_all_small_permutations_are_about_equally_likely():
    drawn = [tuple(Permutation(4, [seed])(np.arange(4)).tolist()) for seed in range(4800)]
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 100  # 200 expected
