"""Time and memory of a training step of the language models: forward, backward, clipping, optimizer."""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from omegaconf import DictConfig
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import attention
from benchmarks.timing import quantiles
from models.backbone import SequenceModel
from training.compiled_loss import CompiledLoss
from training.configuration import composed

MODELS = (
    "model=transformer",
    "model=lstm model.num_heads=12",
    "model=slstm model.num_heads=12",
    "model=lstm model.num_heads=1",
)
_CONTEXT, _STEPS = 1024, 20
_WARMUP = 40  # steps; they take seconds, in which a GPU at its power limit lowers its clock


def rows(
    models: Sequence[str], batch_sizes: Sequence[int], accumulate: Sequence[int], known: Sequence[dict] = ()
) -> Iterator[dict]:
    """Milliseconds of a training step (median, p20 and p80), tokens per second, and peak GPU memory in GiB.

    Each model is that of experiment=slimpajama_160m with the overrides, compiled unless they contain compile=false, and
    trained on random tokens. Under torchrun on one host, gradients are reduced over all devices
    (DistributedDataParallel); the batch size is that of each device, the tokens per second are those of all devices. A
    step consists of `accumulate` batches; gradients are reduced once, with the last batch. A model with attention is
    measured with each of PyTorch's kernels (attention_ms); its row is that of the fastest, with the names of the
    operators that ran (attention).
    """
    devices = int(os.environ.get("WORLD_SIZE", 1))
    if devices > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl")
    for batch_size, batches in itertools.product(batch_sizes, accumulate):
        transformer = None
        for overrides in models or MODELS:
            case = {"model": overrides, "batch_size": batch_size, "devices": devices, "accumulate": batches}
            row = next((row for row in known if case.items() <= row.items()), None)
            row = row or case | _fastest(overrides.split(), batch_size, devices, batches)
            if overrides == "model=transformer":
                transformer = row.get("ms")
            if transformer and "ms" in row:
                row["over_transformer"] = round(row["ms"] / transformer, 3)
            yield row


def _fastest(overrides: list[str], batch_size: int, devices: int, accumulate: int) -> dict:
    """Measure a training step of a model; for a model with attention, return the row with the fastest kernel."""
    asked = overrides, batch_size, devices, accumulate
    if not _config(overrides).model.mixer._target_.endswith("AttentionMixer"):
        return _measure(*asked)
    found = attention.by_each_kernel(lambda: _measure(*asked))
    fastest = min(found.values(), key=lambda row: row.get("ms", math.inf))
    return fastest | {"attention_ms": {name: row.get("ms") for name, row in found.items()}}


class _Loss(nn.Module):
    """The loss of a model as in Lightning's strategies, which call an uncompiled module around the compiled one."""

    def __init__(self, model: SequenceModel, compile: bool) -> None:
        super().__init__()
        self.model = model
        self.loss = CompiledLoss(model.loss) if compile else model.loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.loss(ids[:, :-1], ids[:, 1:].contiguous(), None)[0]


def _measure(overrides: list[str], batch_size: int, devices: int, accumulate: int) -> dict:
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        return _train(build(overrides), _config(overrides).compile, batch_size, devices, accumulate)
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}


def _config(overrides: Sequence[str] = ()) -> DictConfig:
    return composed(["experiment=slimpajama_160m", *overrides])


def build(overrides: Sequence[str]) -> SequenceModel:
    """Return the model of experiment=slimpajama_160m with these overrides, on the GPU."""
    from hydra.utils import instantiate

    return instantiate(_config(overrides).model).cuda()


def data_parallel_options() -> dict[str, Any]:
    """Return the options that experiment=slimpajama_160m passes to DistributedDataParallel."""
    return {key: value for key, value in _config().trainer.strategy.items() if key != "_target_"}


def _train(model: SequenceModel, compile: bool, batch_size: int, devices: int, accumulate: int) -> dict:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of = _Loss(model, compile)
    if devices > 1:
        loss_of = DistributedDataParallel(loss_of, device_ids=[torch.cuda.current_device()], **data_parallel_options())
    ids = torch.randint(0, model.vocab_size, (batch_size, _CONTEXT + 1), device="cuda")

    def step() -> None:
        for _ in range(accumulate - 1):
            with loss_of.no_sync() if devices > 1 else nullcontext():
                loss_of(ids).backward()
        loss_of(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARMUP):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    ran = attention.operators(step)
    return {
        **({"attention": ran} if ran else {}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **_speed(times, batch_size, devices, accumulate),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def _speed(times: Sequence[float], batch_size: int, devices: int, accumulate: int) -> dict:
    """Return the speed of training steps that took `times` milliseconds."""
    ms = quantiles(times, digits=2)
    return {
        "ms": ms["p50"],
        "p20_ms": ms["p20"],
        "p80_ms": ms["p80"],
        "tokens_per_s": round(1e3 * devices * accumulate * batch_size * _CONTEXT / ms["p50"]),
    }
