import itertools

import numpy as np
import pytest

from data.sampler import ResumableSampler


def epoch(sampler):
    return [batch.tolist() for batch in sampler]


@pytest.mark.parametrize("size", [None, 50])
def test_ranks_share_one_global_order(size):
    alone = ResumableSampler(size, 6, seed=3, consumed=12)
    ranks = [ResumableSampler(size, 2, seed=3, consumed=12, rank=rank, world_size=3) for rank in range(3)]
    together = zip(*ranks, strict=size is not None)
    for expected, parts in itertools.islice(zip(alone, together, strict=size is not None), 10):
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_each_epoch_is_a_new_permutation_of_whole_batches():
    sampler = ResumableSampler(50, 8, seed=0)
    first = epoch(sampler)
    sampler.consumed = 48
    second = epoch(sampler)
    for batches in (first, second):
        assert len(batches) == len(sampler) == 6
        assert len(set(itertools.chain(*batches))) == 48
    assert first != second
    assert first != epoch(ResumableSampler(50, 8, seed=1))


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 7, 11])
def test_sampler_continues_after_the_consumed_samples(taken):
    whole = ResumableSampler(50, 8, seed=0)
    batches = epoch(whole)
    whole.consumed = 48
    batches += epoch(whole)
    end_of_epoch = 6 if taken < 6 else 12
    assert epoch(ResumableSampler(50, 8, seed=0, consumed=taken * 8)) == batches[taken:end_of_epoch]


def test_consumed_counts_over_epochs():
    sampler = ResumableSampler(None, 4, consumed=8)
    assert [batch.tolist() for batch in itertools.islice(sampler, 2)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    with pytest.raises(TypeError, match="no length"):
        len(sampler)


def test_fewer_samples_than_a_global_batch_are_an_error():
    with pytest.raises(ValueError, match=r"7 .*2 x 2 ranks x 2 acc"):
        ResumableSampler(7, 2, world_size=2, accumulate=2)


def test_epoch_contains_only_whole_optimizer_steps():
    """The gradient of an incomplete step would be too small."""
    sampler = ResumableSampler(50, 4, world_size=2, accumulate=3)
    assert len(epoch(sampler)) == len(sampler) == 6


@pytest.mark.parametrize("consumed", [0, 15, 40, 47, 48, 49, 95, 110])
def test_ranks_continue_with_equally_many_batches(consumed):
    ranks = [ResumableSampler(50, 4, world_size=3, rank=rank, consumed=consumed) for rank in range(3)]
    batches = [epoch(sampler) for sampler in ranks]
    assert len({len(of_rank) for of_rank in batches}) == 1
    assert batches[0]
    assert all(len(batch) == 4 for of_rank in batches for batch in of_rank)
    assert 0 <= ranks[0].consumed - consumed < 12


@pytest.mark.parametrize("lane", [3, 6])
def test_rows_of_a_step_are_lanes(lane):
    """For any number of ranks and accumulated batches, with another order of lanes in each epoch."""
    whole = ResumableSampler(50, 8, lane=lane)
    assert len(whole) == 6
    epochs = []
    for consumed in (0, 48):
        whole.consumed = consumed
        rows = np.array(epoch(whole)).T.reshape(-1, lane)  # [lanes, lane]
        np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(lane))
        assert len(set(rows[:, 0])) == len(rows)
        assert set(rows[:, 0] % lane) == {0}
        epochs.append(rows)
    assert not np.array_equal(*epochs)
    whole.consumed = 0
    ranks = [ResumableSampler(50, 2, rank=rank, world_size=2, accumulate=2, lane=lane) for rank in range(2)]
    batches = np.concatenate([np.array(epoch(rank)) for rank in ranks], axis=1)  # [12, 4]
    np.testing.assert_array_equal(batches.reshape(6, 8), epoch(whole))
