"""Code shared by all DataModules."""

from types import SimpleNamespace

import pytest
import torch

from data.module import ResumableDataModule


class Rows:
    """A dataset whose labels share memory with the inputs, as in packed text."""

    def __getitem__(self, indices):
        rows = torch.tensor(indices).repeat(3, 1).T.contiguous()
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


@pytest.mark.parametrize("size", [1, 4, 5])
def test_ranks_have_equally_many_evaluation_batches(size):
    """With FSDP, all ranks take part in every batch, so a rank with more batches would wait forever."""
    batches = []
    for rank in range(2):
        module = ResumableDataModule(batch_size=2, num_workers=0, seed=0)
        module.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        batches.append(list(module.evaluation_loader(Rows(), size)))
    shapes = [[batch["labels"].shape for batch in of_rank] for of_rank in batches]
    assert shapes[0] == shapes[1]
    every = [batch for of_rank in batches for batch in of_rank]
    scored = torch.cat([batch["labels"][:, 0] for batch in every])
    assert sorted(scored[scored >= 0].tolist()) == list(range(size))
    assert all(batch["input_ids"].min() >= 0 for batch in every)
