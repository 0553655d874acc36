"""Mamba-2 (Dao and Gu, arXiv 2405.21060) with the weights of transformers' Mamba2Model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Mamba2Layer

from .causal_conv import causal_conv
from .stepwise import step_by_forward


class Mamba2Mixer(nn.Module):
    """A state-space layer with one decay rate per head and its own gate, convolution, norm and output map.

    It has about 3 expand d² parameters.

    The state is (last inputs of the convolution [B, conv_width - 1, expand d + 2 state_size], recurrent state [B,
    heads, head_dim, state_size]).

    Args:
        d_model: width of input and output.
        num_heads: unused, part of the mixer interface; there are expand d_model / head_dim heads.
        head_dim: number of channels per head.
        state_size: number of recurrent states per channel.
        conv_width: width of the causal convolution.
        expand: number of channels per input channel.
        chunk_size: number of steps per matrix product.
        block_index: index of the block in the backbone; unused, part of the mixer interface.
        num_blocks: number of blocks; unused, part of the mixer interface.
    """

    step = step_by_forward

    def __init__(
        self,
        d_model: int,
        num_heads: int | None = None,
        head_dim: int = 64,
        state_size: int = 128,
        conv_width: int = 4,
        expand: int = 2,
        chunk_size: int = 64,
        block_index: int = 0,
        num_blocks: int = 1,
    ) -> None:
        super().__init__()
        if head_dim < 1 or expand * d_model % head_dim:
            raise ValueError(f"head_dim={head_dim} must be a positive divisor of expand * d_model = {expand * d_model}")
        self.config = Mamba2Config(
            hidden_size=d_model,
            num_heads=expand * d_model // head_dim,
            head_dim=head_dim,
            state_size=state_size,
            conv_kernel=conv_width,
            expand=expand,
            n_groups=1,
            num_hidden_layers=1,
        )
        self.chunk_size = chunk_size
        self.layer = Mamba2Layer(self.config, layer_idx=0)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer, config = self.layer, self.config
        inner, N = config.expand * config.hidden_size, config.state_size
        conv_state, recurrent_state = state or (None, None)
        gate, inputs, step = layer.in_proj(x).split([inner, inner + 2 * N, config.num_heads], dim=-1)
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        convolved, conv_state = causal_conv(inputs, weight, bias, conv_state, reset)
        u, B, C = F.silu(convolved).float().split([inner, N, N], dim=-1)
        step = F.softplus(step.float() + layer.dt_bias)  # [B, T, heads]
        u = u.unflatten(-1, (config.num_heads, config.head_dim))
        rate = -layer.A_log.float().exp()
        y, recurrent_state = scan(step[..., None] * u, step * rate, B, C, recurrent_state, reset, self.chunk_size)
        y = (y + layer.D[:, None] * u).flatten(-2)
        return layer.out_proj(layer.norm(y, gate).to(x.dtype)), (conv_state, recurrent_state)


def scan(
    u: Tensor, kept: Tensor, B: Tensor, C: Tensor, state: Tensor | None, reset: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(kept_t) h_{t-1} + u_t B_tᵀ in chunks; return y_t = h_t C_t [batch, T, heads, D] and the last h.

    Args:
        u: [batch, T, heads, D].
        kept: logarithm of the decay of each step, [batch, T, heads].
        B: [batch, T, N].
        C: [batch, T, N].
        state: h before the first step, [batch, heads, D, N]; None means zeros.
        reset: bool [batch, T], True where h is set to zero before the step, or None.
        chunk_size: number of steps per chunk.
    """
    h = u.new_zeros(len(u), *u.shape[2:], B.shape[-1]) if state is None else state
    reset = torch.zeros_like(kept[..., 0], dtype=torch.bool) if reset is None else reset
    outputs = []
    for parts in zip(*(x.split(chunk_size, dim=1) for x in (u, kept, B, C, reset)), strict=True):
        y, h = _chunk(*parts, h)
        outputs.append(y)
    return torch.cat(outputs, dim=1), h


def _chunk(u: Tensor, kept: Tensor, B: Tensor, C: Tensor, reset: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and the last h of one chunk, by products over all pairs of its steps t and s."""
    kept, document = kept.cumsum(1), reset.cumsum(1)
    seen = torch.ones(2 * u.shape[1:2], dtype=torch.bool, device=u.device).tril()
    seen = seen & (document[:, :, None] == document[:, None])  # [batch, t, s]
    from_s = (kept[:, :, None] - kept[:, None]).masked_fill(~seen[..., None], -torch.inf).exp()
    from_h = kept.exp() * (document == 0)[..., None]  # [batch, t, heads]
    y = torch.einsum("bts,btsh,bshd->bthd", C @ B.mT, from_s, u)
    y = y + from_h[..., None] * torch.einsum("btn,bhdn->bthd", C, h)
    added = torch.einsum("bsh,bshd,bsn->bhdn", from_s[:, -1], u, B)
    return y, from_h[:, -1, :, None, None] * h + added
