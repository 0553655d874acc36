"""Layers of flash-linear-attention on a GPU: Gated DeltaNet and Gated DeltaProduct."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .stepwise import step_by_forward, stepwise

State = tuple[Tensor, ...]


class _OneLayerCache:
    """The cache of one layer of flash-linear-attention."""

    def __init__(self, state: State | None) -> None:
        self.state = state and {"recurrent_state": state[0], "conv_state": state[1] if len(state) == 2 else state[1:]}

    def __len__(self) -> int:
        return int(self.state is not None)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.state

    def update(self, recurrent_state: Tensor, conv_state: Tensor | tuple[Tensor, ...], **_: Any) -> None:
        self.state = {"recurrent_state": recurrent_state, "conv_state": conv_state}

    def tensors(self) -> State:
        recurrent, conv = self.state["recurrent_state"], self.state["conv_state"]
        return recurrent, *((conv,) if isinstance(conv, Tensor) else conv)


class FLAMixer(nn.Module):
    """A layer of flash-linear-attention with its own gates, convolutions and output map.

    The state is (recurrent state, last inputs of each convolution), all with the batch first. The kernels run on a GPU
    and compute in half precision, for float32 inputs in bfloat16. torch.compile leaves the layer out.

    With resets a sequence runs in single steps, without gradients.

    Args:
        d_model: width of input and output.
        num_heads: given to the layer; None leaves it to the layer.
        layer: a class of fla.layers, by name.
        block_index: place in the backbone, part of the mixer interface, unused here.
        num_blocks: number of such places, by which the output map is initialised.
        options: of the layer, such as allow_neg_eigval.

    Raises:
        ImportError: flash-linear-attention is not installed.
        ValueError: there is no such layer.
    """

    trains_with_resets = False
    step = step_by_forward

    def __init__(
        self,
        d_model: int,
        num_heads: int | None = None,
        layer: str = "GatedDeltaNet",
        block_index: int = 0,
        num_blocks: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        try:
            from fla import layers
        except ImportError as error:
            raise ImportError(
                f"mixer {layer} is of flash-linear-attention, which cannot be imported ({error}): "
                "pip install 'flashrnn-lm[fla]'"
            ) from error
        if not hasattr(layers, layer):
            raise ValueError(f"layer={layer}: fla.layers has no such class, such as GatedDeltaNet")
        heads = {} if num_heads is None else {"num_heads": num_heads}
        self.layer = getattr(layers, layer)(hidden_size=d_model, layer_idx=0, **heads, **options)
        self.num_blocks = num_blocks

    @torch.no_grad()
    def init_weights(self) -> None:
        """Scale the output map as the backbone scales those that write to the residual stream."""
        out = getattr(self.layer, "o_proj", None) or self.layer.out_proj
        out.weight.div_(math.sqrt(2 * self.num_blocks))

    def forward(self, x: Tensor, state: State | None = None, reset: Tensor | None = None) -> tuple[Tensor, State]:
        if x.device.type == "cpu":
            raise ValueError(f"{type(self.layer).__name__} of flash-linear-attention runs on a GPU, not on the CPU")
        if reset is None:
            return self._call(x, state)
        if torch.is_grad_enabled():
            raise ValueError(
                f"{type(self.layer).__name__} cannot be trained with resets: set data.reset_at_documents=false"
            )
        if state is None:
            state = tuple(torch.zeros_like(part) for part in self._call(x[:, :1], None)[1])
        return stepwise(self._call, x, state, reset)

    @torch.compiler.disable
    def _call(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        cache = _OneLayerCache(state)
        kept = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else torch.bfloat16
        with torch.autocast(x.device.type, kept):
            y, *_ = self.layer(x, past_key_values=cache, use_cache=True)
        return y.to(x.dtype), cache.tensors()
