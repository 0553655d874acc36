"""AdamW with decay groups and the learning-rate schedule, as Lightning's configure_optimizers wants them."""

import math

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from flashrnn import Recurrence


def warmup_cosine(step: int, lr: float, final_lr: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0): linear from 0 to `lr`, then half a cosine down to
    `final_lr`."""
    if step < warmup_steps:
        return lr * step / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return final_lr + (lr - final_lr) * (1 + math.cos(math.pi * progress)) / 2


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups: matrices decay (those of the recurrence too); norms, biases, embeddings, and the
    rates of a Mamba mixer do not."""
    decay, no_decay = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" or (isinstance(module, Recurrence) and name == "b")
            is_rate = name == "A_log"  # of transformers' MambaMixer; Mamba's own code does not decay them either
            matrix = parameter.ndim >= 2 and not is_bias and not is_rate and not isinstance(module, nn.Embedding)
            (decay if matrix else no_decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def adamw_cosine(
    model: nn.Module,
    total_steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    warmup_steps: int = 750,
    final_lr: float = 1e-4,
    fused: bool = True,
) -> dict:
    """Return AdamW over `decay_groups(model)` with `warmup_cosine` set before every optimizer step."""
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1 (in the configs trainer.max_steps)")
    if len(betas) != 2:
        raise ValueError(f"betas={list(betas)}: expected two, such as [0.9, 0.95]")
    if lr <= 0 or final_lr < 0 or weight_decay < 0:
        raise ValueError(
            f"lr={lr}, final_lr={final_lr}, weight_decay={weight_decay}: lr must be positive, the others not negative"
        )
    if final_lr > lr:
        raise ValueError(f"final_lr={final_lr} is above lr={lr}: the rate decays, so lower optim.final_lr too")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} with total_steps={total_steps}: expected 0 <= warmup_steps < total_steps, "
            f"such as optim.warmup_steps={total_steps // 10} with trainer.max_steps={total_steps}"
        )
    optimizer = AdamW(decay_groups(model, weight_decay), lr=lr, betas=tuple(betas), eps=eps, fused=fused)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, lr, final_lr, warmup_steps, total_steps) / lr)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
