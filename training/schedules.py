"""Learning rate schedules, as factors of the optimizer's own rate."""

import math
from collections.abc import Callable

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Callable[[int], float]


def cosine(total_steps: int, warmup_steps: int = 750, final_lr_ratio: float = 0.1) -> Schedule:
    """Return the cosine schedule: a linear warm-up to 1, then a half cosine down to `final_lr_ratio`.

    The factor of an optimizer step, counted from 0, is (step + 1) / (warmup_steps + 1) below `warmup_steps`, 1 at
    `warmup_steps`, and `final_lr_ratio` from `total_steps` on.
    """
    check(total_steps, warmup_steps, final_lr_ratio)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        return final_lr_ratio + (1 - final_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def wsd(total_steps: int, warmup_steps: int = 750, decay_ratio: float = 0.2, final_lr_ratio: float = 0.0) -> Schedule:
    """Return the warmup-stable-decay schedule (Hägele et al. 2024, arXiv 2405.18392).

    After the same warm-up as in `cosine`, the factor is 1. Over the last fraction `decay_ratio` of all steps, it decays
    as 1 - sqrt(progress) down to `final_lr_ratio`."""
    check(total_steps, warmup_steps, final_lr_ratio)
    if not 0 <= decay_ratio <= 1:
        raise ValueError(f"decay_ratio={decay_ratio} must be a fraction of all steps, from 0 to 1")
    decay_steps = decay_ratio * total_steps

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        decayed = decay_steps - (total_steps - step)
        if decayed <= 0 or decay_steps == 0:
            return 1.0
        return final_lr_ratio + (1 - final_lr_ratio) * (1 - math.sqrt(min(decayed / decay_steps, 1.0)))

    return factor


def schedule_of(section: DictConfig | None) -> Schedule | None:
    """Return the schedule of a config; None for schedule=none, even if an experiment sets keys in its section."""
    return instantiate(section) if section and "_target_" in section else None


def with_schedule(configured: dict | Optimizer, schedule: Schedule | None) -> dict:
    """Return the dict of Lightning's `configure_optimizers` for an optimizer (or such a dict) and a schedule."""
    found = {"optimizer": configured} if isinstance(configured, Optimizer) else configured
    if schedule is None:
        return found
    if "lr_scheduler" in found:
        raise ValueError("the function of the group optim returns its own schedule: choose schedule=none")
    return found | {"lr_scheduler": {"scheduler": LambdaLR(found["optimizer"], schedule), "interval": "step"}}


def check(total_steps: int, warmup_steps: int, final_lr_ratio: float) -> None:
    """Raise ValueError for arguments that are impossible or probably a mistake."""
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1 (in the configs trainer.max_steps)")
    if warmup_steps != int(warmup_steps):
        raise ValueError(f"warmup_steps={warmup_steps}: expected a number of steps, not a fraction")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} with total_steps={total_steps}: expected 0 <= warmup_steps < total_steps, "
            f"such as schedule.warmup_steps={total_steps // 10} with trainer.max_steps={total_steps}"
        )
    if not 0 <= final_lr_ratio <= 1:
        raise ValueError(f"final_lr_ratio={final_lr_ratio} must be a fraction of optim.lr, from 0 to 1")
