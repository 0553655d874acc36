"""A sequence in single steps, for mixers whose own sequence form knows no states or no resets."""

from collections.abc import Callable

import torch
from torch import Tensor

from .step_context import StepContext

State = tuple[Tensor, ...]


def stepwise(
    step: Callable[[Tensor, State], tuple[Tensor, State]], x: Tensor, state: State, reset: Tensor | None
) -> tuple[Tensor, State]:
    """Put x [B, T, d] through `step(x [B, 1, d], state)`, where resets [B, T] put the state of a sequence back to
    zero."""
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
    """Make a mixer's method `step` of its `forward`, for states of fixed size."""
    y, state = self(x[:, None], state)
    return residual + y[:, 0], state
