"""Layers of flash-linear-attention, such as Gated DeltaNet and Gated DeltaProduct; they need a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

from .stepwise import step_by_forward, stepwise

State = tuple[Tensor, ...]


class _OneLayerCache:
    """The cache that a layer of flash-linear-attention expects, for a single layer."""

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

    The state is (recurrent state, last inputs of each convolution), all batch first. The kernels run on a GPU and
    compute in half precision (bfloat16 for float32 inputs). torch.compile skips the layer. With resets, a sequence runs
    in single steps and without gradients.

    Args:
        d_model: width of input and output.
        num_heads: number of heads; None means the default of the layer.
        layer: name of a class in fla.layers.
        block_index: index of the block in the backbone; unused, part of the mixer interface.
        num_blocks: number of blocks; unused, part of the mixer interface.
        options: other arguments of the layer, such as allow_neg_eigval.

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
                f"mixer {layer} needs flash-linear-attention, which cannot be imported ({error}): "
                "pip install '.[fla]' in a clone of flashrnn-lm"
            ) from error
        if not hasattr(layers, layer):
            raise ValueError(f"layer={layer}: there is no such class in fla.layers; GatedDeltaNet is one")
        heads = {} if num_heads is None else {"num_heads": num_heads}
        self.layer = getattr(layers, layer)(hidden_size=d_model, layer_idx=0, **heads, **options)

    def forward(self, x: Tensor, state: State | None = None, reset: Tensor | None = None) -> tuple[Tensor, State]:
        if x.device.type == "cpu":
            raise ValueError(f"{type(self.layer).__name__} of flash-linear-attention needs a GPU")
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
