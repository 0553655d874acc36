"""The weights of PyTorch's recurrent networks in this package's layout."""

import torch
from torch import Tensor, nn

_FUNCTION = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "elman"}


@torch.no_grad()
def convert(cls, module: nn.LSTM | nn.GRU | nn.RNN, backend: str):
    """A `cls` (FlashRNN) with the weights of `module`."""
    if type(module) not in _FUNCTION:
        raise TypeError(f"from_torch takes an nn.LSTM, nn.GRU or nn.RNN, got {type(module).__name__}")
    if getattr(module, "proj_size", 0):
        raise ValueError(f"from_torch has no counterpart of proj_size={module.proj_size}; only proj_size=0 is possible")
    if getattr(module, "nonlinearity", "tanh") != "tanh":
        raise ValueError(f"from_torch takes nn.RNN with nonlinearity='tanh', got {module.nonlinearity!r}")
    weight = module.weight_ih_l0
    layer = cls(
        module.input_size,
        module.hidden_size,
        function=_FUNCTION[type(module)],
        num_layers=module.num_layers,
        bias=module.bias,
        batch_first=module.batch_first,
        dropout=module.dropout,
        bidirectional=module.bidirectional,
        backend=backend,
        device=weight.device,
        dtype=weight.dtype,
    )
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    for name in [f"l{k}{suffix}" for k in range(module.num_layers) for suffix in suffixes]:
        _copy(module, layer, name)
    return layer.train(module.training)


def _copy(module: nn.Module, layer: nn.Module, name: str) -> None:
    recurrent = layer.get_submodule(f"recurrent_{name}")
    H = module.hidden_size
    weight_hh = getattr(module, f"weight_hh_{name}")
    matrices = weight_hh.unflatten(0, (-1, H))
    if isinstance(module, nn.GRU):
        matrices = matrices[[2, 0, 1]]  # ours: g, r, z
    _set(layer.get_submodule(f"input_{name}").weight, getattr(module, f"weight_ih_{name}"))
    _set(recurrent.R, matrices.unsqueeze(1), weight_hh)
    if module.bias:
        biases = getattr(module, f"bias_ih_{name}"), getattr(module, f"bias_hh_{name}")
        _set(recurrent.b, _bias(module, *biases).unsqueeze(1), *biases)


def _set(parameter: nn.Parameter, value: Tensor, *sources: Tensor) -> None:
    """Trained, or frozen, as what it is made of."""
    parameter.copy_(value).requires_grad_(any(source.requires_grad for source in sources or (value,)))


def _bias(module: nn.Module, input_bias: Tensor, recurrent_bias: Tensor) -> Tensor:
    """PyTorch's two biases per gate -> [G, H]."""
    x, h = (bias.unflatten(0, (-1, module.hidden_size)) for bias in (input_bias, recurrent_bias))
    if isinstance(module, nn.GRU):
        return torch.stack([h[2], x[0] + h[0], x[1] + h[1], x[2]])  # ours: g (recurrent only), r, z, n (input only)
    return x + h
