"""mLSTM (Beck et al., arXiv 2405.04517), the layer of transformers' xLSTMModel in its plain PyTorch form."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import mlstm_chunkwise_native_autograd
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer as MLSTMLayer

from .stepwise import step_by_forward, stepwise

CHUNK = 64
# Gates of a padded step: keep everything, add nothing. In float32 exp(-60) is negligible beside exp(-15), the smallest
# input gate that the layer's soft cap admits.
KEEP, ADD_NOTHING = 60.0, -60.0


class Chunkwise(nn.Module):
    """transformers' chunkwise mLSTM for any T, with the state after the last step.

    It replaces xLSTMBackend, which computes the steps after the last full chunk one by one: at T = 40 that is ten times
    as slow.
    """

    def forward(
        self,
        query: Tensor,  # [B, N, T, D]
        key: Tensor,
        value: Tensor,
        igate: Tensor,  # [B, N, T]
        fgate: Tensor,
        **initial: Tensor | None,  # c_initial [B, N, D, D], n_initial [B, N, D], m_initial [B, N, 1]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        T = query.shape[2]
        chunk = min(T, CHUNK)
        padding = -T % chunk
        query, key, value = (F.pad(part, (0, 0, 0, padding)) for part in (query, key, value))
        h, state = mlstm_chunkwise_native_autograd(
            query=query.contiguous(),
            key=key.contiguous(),
            value=value.contiguous(),
            igate=F.pad(igate, (0, padding), value=ADD_NOTHING).contiguous(),
            fgate=F.pad(fgate, (0, padding), value=KEEP).contiguous(),
            chunk_size=chunk,
            return_last_states=True,
            **initial,
        )
        return h[:, :, :T], state


class MLSTMMixer(nn.Module):
    """Matrix memory with exponential gates, norm per head, output gate and output map; 5 d² parameters.

    The state is (c [B, N, D, D], n [B, N, D], m [B, N, 1]). Resets run in single steps, which is slow.

    Args:
        d_model: width of input and output, num_heads times the head size.
        num_heads: heads, each with its own memory.
        block_index: place in the backbone, part of the mixer interface, unused here.
        num_blocks: number of such places, by which the output map is initialised.
    """

    step = step_by_forward

    def __init__(self, d_model: int, num_heads: int = 4, block_index: int = 0, num_blocks: int = 1) -> None:
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"num_heads={num_heads} must be a positive divisor of d_model={d_model}")
        self.num_heads = num_heads
        self.num_blocks = num_blocks
        config = xLSTMConfig(
            hidden_size=d_model, num_heads=num_heads, num_hidden_layers=1, qk_dim_factor=1.0, v_dim_factor=1.0
        )
        self.layer = MLSTMLayer(config)
        self.layer.mlstm_backend = Chunkwise()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the gates as xLSTM does: an input gate nearly closed, forget gates from 3 to 6."""
        nn.init.zeros_(self.layer.igate_preact.weight)
        nn.init.zeros_(self.layer.fgate_preact.weight)
        nn.init.constant_(self.layer.igate_preact.bias, -10.0)
        bias = self.layer.fgate_preact.bias
        bias.copy_(torch.linspace(3.0, 6.0, self.num_heads, device=bias.device))
        self.layer.out_proj.weight.div_(math.sqrt(2 * self.num_blocks))

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if reset is None:
            return self.layer(x, state)
        if state is None:
            B, N, D = len(x), self.num_heads, x.shape[-1] // self.num_heads
            state = x.new_zeros(B, N, D, D), x.new_zeros(B, N, D), x.new_zeros(B, N, 1)
        return stepwise(self.layer, x, state, reset)
