"""Learning rate schedules."""

import math

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

from training.schedules import cosine, schedule_of, with_schedule, wsd

PAPER = {"warmup_steps": 750, "total_steps": 30_000}


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 751),  # not 0, which would make the first step useless
        (375, 376 / 751),
        (750, 1.0),
        (15_000, 0.1 + 0.45 * (1 + math.cos(math.pi * 14_250 / 29_250))),
        (30_000, 0.1),
        (31_000, 0.1),
    ],
)
def test_cosine(step, factor):
    assert cosine(**PAPER)(step) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 1 / 751), (750, 1.0), (24_000, 1.0), (25_500, 0.05 + 0.95 * 0.5), (30_000, 0.05), (31_000, 0.05)],
)
def test_warmup_stable_decay(step, factor):
    assert wsd(**PAPER, final_lr_ratio=0.05)(step) == pytest.approx(factor)


def test_longer_run_has_the_same_rates_until_the_decay():
    """With WSD, runs of different lengths can share the stable phase."""
    short, long = wsd(**PAPER), wsd(**PAPER | {"total_steps": 60_000})
    assert [short(step) for step in range(24_001)] == [long(step) for step in range(24_001)]


def test_no_decay():
    constant = wsd(total_steps=10, warmup_steps=0, decay_ratio=0)
    assert [constant(step) for step in (0, 9, 10, 20)] == [1.0] * 4


@pytest.mark.parametrize("schedule", [cosine, wsd])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps=-1 with total_steps=100: .* schedule.warmup_steps=10 with"),
        ({"warmup_steps": 0.1}, "warmup_steps=0.1: expected a number of steps"),
        ({"warmup_steps": 100}, "warmup_steps=100 with total_steps=100"),
        ({"total_steps": 0}, "total_steps=0 "),
        ({"final_lr_ratio": -1e-4}, "final_lr_ratio=-0.0001 must be a fraction"),
        ({"final_lr_ratio": 2}, "final_lr_ratio=2 must be a fraction"),
    ],
)
def test_invalid_settings_are_an_error(schedule, setting, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"total_steps": 100, "warmup_steps": 1} | setting)


def test_decay_longer_than_the_run_is_an_error():
    with pytest.raises(ValueError, match="decay_ratio=20 "):
        wsd(total_steps=100, warmup_steps=1, decay_ratio=20)


def test_optimizer_follows_the_schedule():
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    configured = with_schedule(optimizer, cosine(total_steps=8, warmup_steps=2))
    scheduler, rates = configured["lr_scheduler"]["scheduler"], []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * cosine(total_steps=8, warmup_steps=2)(step) for step in range(10)])


def test_optimizer_with_its_own_schedule():
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    own = {"optimizer": optimizer, "lr_scheduler": ConstantLR(optimizer)}
    assert with_schedule(own, None) == own
    with pytest.raises(ValueError, match="schedule=none"):
        with_schedule(own, cosine(total_steps=8, warmup_steps=2))


def test_schedule_without_a_target_is_none():
    assert schedule_of({"warmup_steps": 10}) is schedule_of({}) is schedule_of(None) is None
