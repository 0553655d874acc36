"""The pre-norm residual block of the backbone."""

import torch
from torch import Tensor, nn

from .mixers.step_context import StepContext


class MLP(nn.Module):
    """d -> 4 d -> d with GELU: 8 d² parameters."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Compute x + mixer(norm(x)) and then, with an MLP, x + mlp(norm(x)), for x [B, T, d].

    The state of a block is that of its mixer.
    """

    def __init__(self, d_model: int, mixer: nn.Module, mlp: bool = True) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(d_model, bias=False)
        self.mixer = mixer
        self.mlp_norm = nn.LayerNorm(d_model, bias=False) if mlp else None
        self.mlp = MLP(d_model) if mlp else None

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None, reset: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, state = self.mixer(self.mixer_norm(x), state, reset)
        x = x + y
        if self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, state

    def step(self, x: Tensor, state: tuple[Tensor, ...], context: StepContext) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Process one token of each sequence, x [B, d], without gradients and in few kernels."""
        x, state = self.mixer.step(self.mixer_norm(x), state, context, x)
        if self.mlp is not None:
            x = _add_linear(x, self.mlp.act(self.mlp.up(self.mlp_norm(x))), self.mlp.down)
        return x, state


def _add_linear(x: Tensor, y: Tensor, linear: nn.Module) -> Tensor:
    """Return x + linear(y). Where possible the matrix product adds to x in place, which saves a kernel."""
    plain = type(linear) is nn.Linear and linear.bias is None and not torch.is_autocast_enabled(x.device.type)
    return x.addmm_(y, linear.weight.t()) if plain else x + linear(y)
