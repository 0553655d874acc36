"""Sequences processed step by step, for mixers whose sequence form does not support states or resets."""

from collections.abc import Callable

import torch
from torch import Tensor

from .step_context import StepContext

State = tuple[Tensor, ...]


def stepwise(
    step: Callable[[Tensor, State], tuple[Tensor, State]], x: Tensor, state: State, reset: Tensor | None
) -> tuple[Tensor, State]:
    """Apply `step(x [B, 1, d], state)` to each step of x [B, T, d].

    Where `reset` [B, T] is True, the state of the sequence is set to zero before the step.
    """
    outputs = []
    for t in range(x.shape[1]):
        if reset is not None:
            state = tuple(part.masked_fill(reset[:, t].view(-1, *[1] * (part.ndim - 1)), 0) for part in state)
        y, state = step(x[:, t : t + 1], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def step_by_forward(
    self: Callable[..., tuple[Tensor, State]], x: Tensor, state: State, context: StepContext, residual: Tensor
) -> tuple[Tensor, State]:
    """Implement a mixer's `step` by its `forward`; for states of constant size."""
    y, state = self(x[:, None], state)
    return residual + y[:, 0], state
