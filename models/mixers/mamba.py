"""Mamba (Gu and Dao, arXiv 2312.00752) with the weights of transformers' MambaModel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer as MambaLayer

from .causal_conv import causal_conv
from .selective_scan import selective_scan
from .stepwise import step_by_forward


class MambaMixer(nn.Module):
    """A selective state-space layer with its own gate, convolution and output map; about 3 expand d² parameters.

    The state is (last inputs of the convolution [B, conv_width - 1, expand d], recurrent state [B, expand d,
    state_size]). The scan is a fused kernel on a GPU and that of mambapy elsewhere. torch.compile skips the layer,
    because unrolling the time steps would take it minutes.

    Args:
        d_model: width of input and output.
        num_heads: unused, part of the mixer interface.
        state_size: number of recurrent states per channel.
        conv_width: width of the causal convolution.
        expand: number of channels per input channel.
        block_index: index of the block in the backbone; unused, part of the mixer interface.
        num_blocks: number of blocks; unused, part of the mixer interface.
    """

    step = step_by_forward

    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        state_size: int = 16,
        conv_width: int = 4,
        expand: int = 2,
        block_index: int = 0,
        num_blocks: int = 1,
    ) -> None:
        super().__init__()
        for name, value in {"state_size": state_size, "conv_width": conv_width, "expand": expand}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be positive")
        self.config = MambaConfig(
            hidden_size=d_model, state_size=state_size, conv_kernel=conv_width, expand=expand, num_hidden_layers=1
        )
        self.layer = MambaLayer(self.config, layer_idx=0)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as in Mamba where that differs from the backbone."""
        self.layer.init_mamba_weights()

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if (dtype := self.layer.in_proj.weight.dtype).itemsize < 4:
            raise ValueError(
                f"model=mamba cannot have weights in {dtype}, because its scan runs in float32: train with "
                "trainer.precision=bf16-mixed, or generate with dtype=float32"
            )
        return self._sequence(x, *(state or (None, None)), reset)

    @torch.compiler.disable
    def _sequence(
        self, x: Tensor, conv_state: Tensor | None, recurrent_state: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer, N = self.layer, self.config.state_size
        inputs, gate = layer.in_proj(x).chunk(2, dim=-1)  # [B, T, inner]
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        convolved, conv_state = causal_conv(inputs, weight, bias, conv_state, reset)
        u = F.silu(convolved)
        of_u = layer.x_proj(u)
        step, B, C = of_u.split([of_u.shape[-1] - 2 * N, N, N], dim=-1)
        step = F.softplus(layer.dt_proj(step).float())
        y, recurrent_state = selective_scan(u, step, -layer.A_log.float().exp(), B, C, recurrent_state, reset)
        y = (y + layer.D * u) * F.silu(gate)
        return layer.out_proj(y.to(x.dtype)), (conv_state, recurrent_state)
