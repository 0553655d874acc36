"""AdamW's decay groups and the learning-rate schedule."""

import math
from functools import partial

import pytest
import torch

from models.backbone import SequenceModel
from models.mixers import RNNMixer
from models.mixers.mamba import MambaMixer
from training.optim import adamw_cosine, decay_groups, warmup_cosine

PAPER = {"lr": 1e-3, "final_lr": 1e-4, "warmup_steps": 750, "total_steps": 30_000}


def tiny():
    return SequenceModel(5, partial(RNNMixer, function="slstm", conv_width=4), d_model=8, num_blocks=1)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 0.0),
        (375, 5e-4),
        (750, 1e-3),
        (15_000, 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * 14_250 / 29_250))),
        (30_000, 1e-4),
        (31_000, 1e-4),
    ],
)
def test_warmup_cosine(step, lr):
    assert warmup_cosine(step, **PAPER) == pytest.approx(lr)


def test_a_rate_that_would_rise():
    with pytest.raises(ValueError, match=r"final_lr=0\.0001 is above lr=1e-05"):
        adamw_cosine(tiny(), lr=1e-5, total_steps=2000)


def test_optimizer_follows_the_schedule():
    settings = {"lr": 0.1, "final_lr": 0.01, "warmup_steps": 2, "total_steps": 8}
    configured = adamw_cosine(tiny(), **settings)
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for step in range(10):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(warmup_cosine(step, **settings))
        optimizer.step()
        scheduler.step()


def test_decay_groups():
    model = tiny()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, no_decay = decay_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert {names[parameter] for parameter in decay["params"]} == {
        "blocks.0.mixer.conv.weight",
        "blocks.0.mixer.gates.weight",
        "blocks.0.mixer.recurrence.R",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "head.weight",
    }
    assert {names[parameter] for parameter in no_decay["params"]} == {
        "embedding.weight",
        "blocks.0.mixer_norm.weight",
        "blocks.0.mixer.conv.bias",
        "blocks.0.mixer.recurrence.b",
        "blocks.0.mixer.norm_weight",
        "blocks.0.mlp_norm.weight",
        "norm.weight",
    }


def test_the_rates_of_a_mamba_mixer_do_not_decay():
    model = SequenceModel(5, MambaMixer, d_model=8, num_blocks=1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    _, no_decay = decay_groups(model, weight_decay=0.1)
    assert {"blocks.0.mixer.layer.A_log", "blocks.0.mixer.layer.D"} <= {names[p] for p in no_decay["params"]}


@pytest.mark.parametrize("setting", [{"lr": 0.0}, {"final_lr": -1e-4}, {"weight_decay": -0.1}])
def test_rates_that_make_no_sense(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*lr must be positive, the others not negative"):
        adamw_cosine(torch.nn.Linear(2, 2), total_steps=1000, **setting)


@pytest.mark.parametrize("warmup_steps", [-1, 100])
def test_warmup_must_end_before_training(warmup_steps):
    with pytest.raises(ValueError, match=f"warmup_steps={warmup_steps} with total_steps=100"):
        adamw_cosine(torch.nn.Linear(2, 2), total_steps=100, warmup_steps=warmup_steps)
