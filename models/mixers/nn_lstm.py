"""torch.nn.LSTM as a mixer; on a GPU it runs cuDNN's kernels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .stepwise import step_by_forward


class NNLSTMMixer(nn.Module):
    """A mixer with PyTorch's LSTM: y = norm(nn.LSTM(x)), with 8 d² parameters.

    It computes the same as `RNNMixer(function="lstm")` with one head. The state is (h [B, d], c [B, d]). It does not
    support resets, and torch.compile does not compile nn.LSTM.

    Args:
        d_model: width of input and output.
        num_heads: must be 1.
        block_index: index of the block in the backbone; unused, part of the mixer interface.
        num_blocks: number of blocks; unused, part of the mixer interface.
    """

    trains_with_resets = False
    step = step_by_forward

    def __init__(self, d_model: int, num_heads: int = 1, block_index: int = 0, num_blocks: int = 1) -> None:
        super().__init__()
        if num_heads != 1:
            raise ValueError(f"num_heads={num_heads}: torch.nn.LSTM has one head; model=lstm takes any number")
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)
        nn.init.zeros_(self.lstm.bias_hh_l0).requires_grad_(False)  # two biases would learn twice as fast
        self.norm_weight = nn.Parameter(torch.ones(d_model))

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if reset is not None:
            raise ValueError(
                "torch.nn.LSTM cannot reset its state inside a sequence, between documents (data.reset_at_documents) "
                "or after padding on the left: use model=lstm"
            )
        h, last = self.lstm(x, None if state is None else tuple(part[None].to(x.dtype) for part in state))
        return F.layer_norm(h, h.shape[-1:]) * self.norm_weight, tuple(part[0] for part in last)
