"""A depthwise causal convolution over time, with states and resets."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the convolution of x, without activation, [B, T, d], and the last inputs [B, width - 1, d].

    Args:
        x: [B, T, d].
        weight: [d, width].
        bias: [d].
        state: the inputs before x, [B, width - 1, d]; None means zeros.
        reset: bool [B, T], True at steps that see nothing before them; None means no such steps.
    """
    (B, T, d), past = x.shape, weight.shape[1] - 1
    padded = torch.cat((x.new_zeros(B, past, d) if state is None else state.to(x.dtype), x), dim=1)
    if reset is not None:
        # The age of a step is its distance from the last reset. Without a reset it is at least `past`, so that all
        # inputs of the state count.
        step = torch.arange(T, device=x.device)
        start = torch.where(reset, step, -past).cummax(dim=1).values  # [B, T]
        age = step - start
    y = bias
    for lag in range(past + 1):
        term = padded[:, past - lag : past - lag + T] * weight[:, past - lag]
        y = y + (term if reset is None else term * (age >= lag)[..., None])
    state = padded[:, T:]
    if reset is not None:  # clear inputs from before the last document
        steps_of_state = torch.arange(T - past, T, device=x.device)
        state = state * (steps_of_state >= start[:, -1:])[..., None]
    return y, state


class CausalConv(nn.Module):
    """Depthwise causal convolution over time with SiLU. Its state is the last width - 1 inputs [B, width - 1, d]."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, width))
        self.bias = nn.Parameter(torch.zeros(d_model))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = causal_conv(x, self.weight, self.bias, state, reset)
        return F.silu(y), state

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Map one input x [B, d] to its output [B, d] and the new state."""
        inputs = torch.cat((state, x[:, None]), dim=1)
        return F.silu(torch.linalg.vecdot(inputs.mT, self.weight) + self.bias), inputs[:, 1:]
