"""Mamba (Gu and Dao, arXiv 2312.00752), the mixer of transformers' MambaModel in its plain PyTorch form."""

import math

import torch
from mambapy.pscan import pscan
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer as MambaLayer

from .stepwise import step_by_forward, stepwise


class MambaMixer(nn.Module):
    """A selective state-space layer with its own gate, convolution and output map; about 3 expand d² parameters.

    The state is (last inputs of the convolution [B, expand d, conv_width], recurrent state [B, expand d, state_size]).
    Sequences run in the parallel form, by mambapy's scan. With resets they run in single steps, which transformers
    computes in place, so that gradients are a ValueError. torch.compile leaves the layer out, because it would take
    minutes to unroll time.

    Args:
        d_model: width of input and output.
        num_heads: part of the mixer interface, unused here.
        state_size: recurrent states per channel.
        conv_width: width of the causal convolution.
        expand: channels per input channel.
        block_index: place in the backbone, part of the mixer interface, unused here.
        num_blocks: number of such places, by which the output map is initialised.
    """

    trains_with_resets = False
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
            hidden_size=d_model,
            state_size=state_size,
            conv_kernel=conv_width,
            expand=expand,
            num_hidden_layers=1,
            use_mambapy=True,
        )
        self.num_blocks = num_blocks
        self.layer = MambaLayer(self.config, layer_idx=0)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as Mamba does where that differs from the backbone."""
        self.layer.init_mamba_weights()
        self.layer.out_proj.weight.div_(math.sqrt(2 * self.num_blocks))

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if (dtype := self.layer.in_proj.weight.dtype).itemsize < 4:
            raise ValueError(
                f"model=mamba cannot have weights in {dtype}: its scan is float32. Take trainer.precision=bf16-mixed, "
                "or generate with dtype=float32"
            )
        if state is None and reset is None:
            return self._call(x, DynamicCache(config=self.config))
        if reset is None and (x.shape[1] > 1 or torch.is_grad_enabled()):
            return self._from_state(x, state)
        if torch.is_grad_enabled():
            raise ValueError(
                "model=mamba cannot be trained with resets, because transformers' single step has no gradients: set "
                "data.reset_at_documents=false, or evaluate under torch.no_grad()"
            )
        if state is None:
            B, inner = len(x), self.config.intermediate_size
            state = x.new_zeros(B, inner, self.config.conv_kernel), x.new_zeros(B, inner, self.config.state_size)
        return stepwise(self._step, x, state, reset)

    @torch.compiler.disable
    def _from_state(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the parallel form from a state; that of transformers has no initial state."""
        layer, N = self.layer, self.config.state_size
        conv_state, recurrent_state = state
        inputs, gate = layer.in_proj(x).transpose(1, 2).chunk(2, dim=1)  # [B, inner, T]
        inputs = torch.cat((conv_state.to(inputs.dtype), inputs), dim=2)
        convolved = F.conv1d(inputs[:, :, 1:], layer.conv1d.weight, layer.conv1d.bias, groups=inputs.shape[1])
        u = F.silu(convolved).transpose(1, 2)  # [B, T, inner]
        of_u = layer.x_proj(u)
        step, B, C = of_u.split([of_u.shape[-1] - 2 * N, N, N], dim=-1)
        dt = F.softplus(layer.dt_proj(step).float())[..., None]  # [B, T, inner, 1]
        decay = torch.exp(dt * -layer.A_log.float().exp())  # [B, T, inner, N]
        added = dt * B[:, :, None] * u[..., None]
        first = added[:, :1] + decay[:, :1] * recurrent_state[:, None]
        h = pscan(decay, torch.cat((first, added[:, 1:]), dim=1))
        y = (h @ C[..., None].to(h.dtype)).squeeze(-1) + layer.D * u
        y = y * F.silu(gate.transpose(1, 2))
        return layer.out_proj(y.to(x.dtype)), (inputs[:, :, -self.config.conv_kernel :], h[:, -1])

    def _step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        conv_state, recurrent_state = state
        cache = DynamicCache(config=self.config)
        cache.update_conv_state(conv_state, 0, conv_kernel_size=self.config.conv_kernel)
        cache.update_recurrent_state(recurrent_state, 0)
        return self._call(x, cache)

    @torch.compiler.disable
    def _call(self, x: Tensor, cache: DynamicCache) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.layer(x, cache_params=cache)
        layer = cache.layers[0]
        return y, (layer.conv_states[0], layer.recurrent_states[0])
