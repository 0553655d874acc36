"""Linear layers with 8-bit weights for generation; they need half the memory of 16-bit weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = ("float", "int8")  # values of the option `weights` of commands


class Int8Linear(nn.Module):
    """A linear layer without bias. Its weights are int8 [out, in] times a float32 scale per row [out]."""

    quantized: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype  # of the computation
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1) / 127
        rounded = (weight / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
        self.register_buffer("quantized", rounded.to(torch.int8))
        self.register_buffer("scale", scale)

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weights [out, in], computed without a temporary copy in float32."""
        weight = self.scale.new_empty(self.quantized.shape, dtype=self.dtype)
        return torch.mul(self.quantized, self.scale[:, None], out=weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Linear":
        """Move to another device or dtype with the model, but keep the scales in float32."""
        scale, self.dtype = self.scale, fn(self.scale.new_empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        self.scale = scale.to(self.quantized.device)
        return self


def quantize(model: nn.Module) -> None:
    """Replace all linear layers without bias in the model by `Int8Linear`.

    Embeddings, norms and recurrent weights stay as they are; errors of recurrent weights would accumulate over the
    steps. A quantized model cannot be trained or saved.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.bias is None:
                setattr(module, name, Int8Linear(child))


def check_weights(weights: str) -> None:
    """Raise ValueError unless this is one of WEIGHTS."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights}: expected one of {', '.join(WEIGHTS)}")


def is_quantized(model: nn.Module) -> bool:
    """Return whether the model has layers with 8-bit weights."""
    return any(isinstance(module, Int8Linear) for module in model.modules())
