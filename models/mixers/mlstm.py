"""mLSTM (Beck et al., arXiv 2405.04517): the layer of transformers' xLSTMModel in plain PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import mlstm_chunkwise_parallel_fw_H as outputs_of_chunks
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer as MLSTMLayer

from .stepwise import step_by_forward, stepwise

CHUNK = 64
# Gates of padded steps, which keep the whole state and add nothing. exp(-60) is negligible in float32 compared with
# exp(-15), the smallest input gate that the layer's soft cap allows.
KEEP, ADD_NOTHING = 60.0, -60.0


State = tuple[Tensor, Tensor, Tensor]  # c [B, N, D, D], n [B, N, D], m [B, N, 1]


class Chunkwise(nn.Module):
    """transformers' chunkwise mLSTM for any T, including the state after the last step.

    It replaces xLSTMBackend, which computes the steps after the last full chunk one by one and is ten times as slow at
    T = 40. It does not write in place, so that torch.func.vmap can map it over the weights of several models.
    """

    def forward(
        self,
        query: Tensor,  # [B, N, T, D]
        key: Tensor,
        value: Tensor,
        igate: Tensor,  # [B, N, T]
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        B, N, T, D = query.shape
        length = min(T, CHUNK)
        padding = -T % length
        query, key, value = (F.pad(part, (0, 0, 0, padding)).contiguous() for part in (query, key, value))
        igate = F.pad(igate, (0, padding), value=ADD_NOTHING).unflatten(2, (-1, length))  # [B, N, chunks, length]
        kept = F.logsigmoid(F.pad(fgate, (0, padding), value=KEEP)).unflatten(2, (-1, length)).cumsum(-1)
        if c_initial is None:
            first = key.new_zeros(B, N, D, D), key.new_zeros(B, N, D), key.new_zeros(B, N, 1)
        else:
            first = c_initial, n_initial, m_initial
        states = states_of_chunks(key.unflatten(2, (-1, length)), value.unflatten(2, (-1, length)), igate, kept, first)
        c, n, m = (torch.cat(parts, dim=2) for parts in zip(*states[:-1], strict=True))
        h, _, _ = outputs_of_chunks(
            query, key, value, c, n, m, igate, kept, D**-0.5, chunk_size=length, num_chunks=len(states) - 1
        )
        return h[:, :, :T], states[-1]


def states_of_chunks(key: Tensor, value: Tensor, igate: Tensor, kept: Tensor, state: State) -> list[State]:
    """Return the states before each chunk, and the state after the last chunk.

    Args:
        key: [B, N, chunks, length, D].
        value: [B, N, chunks, length, D].
        igate: logarithms of the input gates, [B, N, chunks, length].
        kept: cumulative sums of the logarithms of the forget gates within each chunk, [B, N, chunks, length].
        state: the state before the first chunk.
    """
    states = [state]
    to_end = kept[..., -1:] - kept + igate  # logarithm of each step's weight at the end of its chunk
    for k in range(key.shape[2]):
        c, n, m = states[-1]
        whole = kept[:, :, k, -1:] + m
        after = torch.maximum(whole, to_end[:, :, k].amax(-1, keepdim=True))
        keep = torch.exp(whole - after)
        weighted = key[:, :, k] * torch.exp(to_end[:, :, k] - after)[..., None]  # [B, N, length, D]
        added = weighted.transpose(-2, -1) @ value[:, :, k]
        states.append((keep[..., None] * c + added, keep * n + weighted.sum(-2), after))
    return states


class MLSTMMixer(nn.Module):
    """A matrix memory with exponential gates, a norm per head, an output gate and an output map; 5 d² parameters.

    The state is (c [B, N, D, D], n [B, N, D], m [B, N, 1]). With resets the sequence runs in single steps, which is
    slow.

    Args:
        d_model: width of input and output, num_heads times the head size.
        num_heads: number of heads, each with its own memory.
        block_index: index of the block in the backbone; unused, part of the mixer interface.
        num_blocks: number of blocks; unused, part of the mixer interface.
    """

    step = step_by_forward

    def __init__(self, d_model: int, num_heads: int = 4, block_index: int = 0, num_blocks: int = 1) -> None:
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"num_heads={num_heads} must be a positive divisor of d_model={d_model}")
        self.num_heads = num_heads
        config = xLSTMConfig(
            hidden_size=d_model, num_heads=num_heads, num_hidden_layers=1, qk_dim_factor=1.0, v_dim_factor=1.0
        )
        self.layer = MLSTMLayer(config)
        self.layer.mlstm_backend = Chunkwise()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as in xLSTM: input gates nearly closed, and biases of the forget gates from 3 to 6."""
        nn.init.zeros_(self.layer.igate_preact.weight)
        nn.init.zeros_(self.layer.fgate_preact.weight)
        nn.init.constant_(self.layer.igate_preact.bias, -10.0)
        bias = self.layer.fgate_preact.bias
        bias.copy_(torch.linspace(3.0, 6.0, self.num_heads, device=bias.device))

    def forward(self, x: Tensor, state: State | None = None, reset: Tensor | None = None) -> tuple[Tensor, State]:
        if reset is None:
            return self.layer(x, state)
        if state is None:
            B, N, D = len(x), self.num_heads, x.shape[-1] // self.num_heads
            state = x.new_zeros(B, N, D, D), x.new_zeros(B, N, D), x.new_zeros(B, N, 1)
        return stepwise(self.layer, x, state, reset)
