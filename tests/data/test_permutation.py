"""Every sample comes once, in an order that looks random, whatever the number of samples."""

import numpy as np
import pytest

from data.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4096, 70_001])
def test_every_sample_comes_once(size):
    order = Permutation(size, [0, 1])(np.arange(size))
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))


def test_places_can_be_asked_for_one_by_one_of_more_than_memory_holds():
    order = Permutation(612_000_000_000, [3])
    places = np.array([0, 5, 611_999_999_999])
    together = order(places)
    assert [int(order(places[[number]])[0]) for number in range(3)] == together.tolist()
    assert len(set(together.tolist())) == 3
    assert together.max() < 612_000_000_000


def test_seeds_and_neighbours_have_nothing_in_common():
    """Of two orders as many places agree as of random ones, about one; and followers do not follow."""
    size = 10_000
    orders = [Permutation(size, seed)(np.arange(size)) for seed in ([0, 0], [0, 1], [1, 0])]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (orders[first] == orders[second]).sum() < 10
    for order in orders:
        assert (np.diff(order) == 1).sum() < 10
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        counts = np.histogram(order[: size // 10], bins=10, range=(0, size))[0]
        assert counts.min() > 70  # of 100 each, with a standard deviation of 9


def test_small_orders_are_all_drawn_about_equally_often():
    drawn = [tuple(Permutation(4, [seed])(np.arange(4)).tolist()) for seed in range(4800)]
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 100  # of 200 each
