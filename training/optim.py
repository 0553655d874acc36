"""AdamW with weight decay on matrices only."""

from torch import nn
from torch.optim import AdamW

from flashrnn import Recurrence


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups, one with and one without weight decay.

    Matrices decay, including recurrent ones. Norms, biases, embeddings and the rates of a Mamba mixer do not."""
    decay, no_decay = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" or (isinstance(module, Recurrence) and name == "b")
            is_rate = name == "A_log"  # of transformers' MambaMixer; Mamba's own code does not decay it either
            matrix = parameter.ndim >= 2 and not is_bias and not is_rate and not isinstance(module, nn.Embedding)
            (decay if matrix else no_decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def adamw(
    model: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
) -> AdamW:
    """Return AdamW over `decay_groups(model)`."""
    if isinstance(betas, float) or len(betas) != 2:
        raise ValueError(f"betas={betas}: expected two numbers, such as [0.9, 0.95]")
    if lr <= 0 or weight_decay < 0:
        raise ValueError(f"lr={lr}, weight_decay={weight_decay}: lr must be positive, weight_decay not negative")
    return AdamW(decay_groups(model, weight_decay), lr=lr, betas=tuple(betas), eps=eps, fused=fused)
