"""The memory of a training step compared with the prediction of scripts.memory.

It is measured on one GPU, and as one of eight GPUs with sharded weights, in a fake process group.
"""

import gc

import pytest
import torch
from hydra.utils import instantiate
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from tests.tiny_runs import config
from training.memory import predict
from training.sharding import shard

WIDE = ["model.d_model=1024", "model.num_blocks=8", "model.num_heads=8", "data.batch_size=16", "global_batch_size=256"]


@pytest.fixture
def of_eight():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cuda", (8,))
    distributed.destroy_process_group()


def predicted_and_measured(overrides, mesh=None):
    """Return predicted and measured GiB of a step with two accumulated batches."""
    composed = config("experiment=slimpajama_1b", "run_dir=.", *WIDE, *overrides)
    predicted = predict(composed)["sum"]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("meta" if mesh else "cuda"):
        model = instantiate(composed.model)
    if mesh:
        shard(model, mesh, "bf16-mixed")
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.to_local(), std=0.02)
    model.checkpoint_blocks = composed.activation_checkpointing
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        for _ in range(2):
            ids = torch.randint(model.vocab_size, (16, 1024), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss, _ = model.loss(ids, ids)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return predicted, (torch.cuda.max_memory_allocated() - before) / 2**30


@pytest.mark.parametrize("checkpointing", [False, True])
def test_prediction_for_one_gpu(checkpointing):
    overrides = ["trainer=single", "trainer.precision=bf16-mixed", f"activation_checkpointing={checkpointing}"]
    predicted, measured = predicted_and_measured(overrides)
    assert measured == pytest.approx(predicted, rel=0.25), f"predicted {predicted:.2f} GiB"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_prediction_for_one_of_eight_gpus(checkpointing, of_eight):
    predicted, measured = predicted_and_measured([f"activation_checkpointing={checkpointing}"], of_eight)
    assert measured == pytest.approx(predicted, rel=0.25), f"predicted {predicted:.2f} GiB"
