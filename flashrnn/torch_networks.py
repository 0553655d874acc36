"""Conversions between PyTorch's recurrent networks and FlashRNN."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flashrnn.cuda.zeros import read_only_zeros
from flashrnn.eager import as_dtype
from flashrnn.problem import PLAIN

_NETWORKS = {
    "lstm": (nn.LSTM, nn.LSTMCell, {}),
    "gru": (nn.GRU, nn.GRUCell, {}),
    "elman": (nn.RNN, nn.RNNCell, {"nonlinearity": "tanh"}),
    "elman_relu": (nn.RNN, nn.RNNCell, {"nonlinearity": "relu"}),
}
"""The classes of whole sequences and of single steps, and their options, for each built-in cell that PyTorch has."""


def from_torch(cls, module: nn.RNNBase | nn.RNNCellBase, backend: str):
    """Return a `cls` (FlashRNN) with the weights of `module`."""
    functions = [
        name
        for name, (*kinds, options) in _NETWORKS.items()
        if type(module) in kinds and all(getattr(module, option) == value for option, value in options.items())
    ]
    if not functions:
        raise TypeError(_not_convertible(module))
    weight = next(module.parameters())
    options = {"bias": module.bias} if isinstance(module, nn.RNNCellBase) else _options(module)
    options |= {"device": weight.device, "dtype": weight.dtype}
    layer = cls(module.input_size, module.hidden_size, **options, function=functions[0], backend=backend)
    layer.load_state_dict(module.state_dict())
    trained = {_with_layer(name): parameter.requires_grad for name, parameter in module.named_parameters()}
    for name in layer.directions():
        _set_requires_grad(layer, name, trained)
    return layer.train(module.training)


def _not_convertible(module: nn.Module) -> str:
    text = f"from_torch takes an nn.LSTM, nn.GRU, nn.RNN or one of their cells, got {type(module).__name__}"
    if not isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return text
    return (
        f"{text}, a subclass, which may compute something else: remove its parametrizations, or load its state_dict "
        "into a FlashRNN"
    )


@torch.no_grad()
def to_torch(layer) -> nn.LSTM | nn.GRU | nn.RNN:
    """Return the PyTorch network with the weights of `layer`, a FlashRNN."""
    if not has_counterpart(layer):
        raise ValueError(_no_counterpart(layer))
    kind, _, special = _NETWORKS[layer.cell.name]
    weight = layer.input_l0.weight
    options = _options(layer) | special | {"device": weight.device, "dtype": weight.dtype}
    if kind is not nn.LSTM:
        del options["proj_size"]
    module = kind(layer.input_size, layer.hidden_size, **options)
    for name in layer.directions():
        for parameter, (value, source) in weights_of(layer, name).items():
            getattr(module, parameter).copy_(value).requires_grad_(source.requires_grad)
    return module.train(layer.training)


def has_counterpart(layer) -> bool:
    """Return whether PyTorch has a network like `layer`."""
    return layer.cell.name in _NETWORKS and layer.num_heads == 1


def _no_counterpart(layer) -> str:
    return (
        f"PyTorch has LSTMs, GRUs and Elman networks with one head; this one has function={layer.cell.name!r} and "
        f"num_heads={layer.num_heads}"
    )


_RENAMED = {
    "weight_ih": "input_{}.weight",
    "weight_hh": "recurrent_{}.R",
    "bias_ih": "recurrent_{}.b",
    "bias_hh": "recurrent_{}.b",
    "weight_hr": "recurrent_{}.projection.weight",
}


def instead_of(name: str) -> str | None:
    """Return a sentence on what FlashRNN has instead of a parameter of nn.LSTM; None for other names."""
    kind, underscore, direction = name.partition("_l")
    if name == "all_weights":
        ours = "named_parameters()"
    elif underscore and kind in _RENAMED:
        ours = _RENAMED[kind].format(f"l{direction}")
    else:
        return None
    return f"it has {ours}, in layouts of its own; to_torch().{name} has a copy in PyTorch's"


def convert_state_dict(layer, state_dict: dict[str, Tensor], prefix: str, *others) -> None:
    """Replace the entries of a PyTorch network in `state_dict`, if there are any, by those for `layer`.

    This is a pre-hook of `load_state_dict`, whose last argument is a list of errors.
    """
    for kind in _RENAMED:
        if (of_cell := prefix + kind) in state_dict:
            state_dict[_with_layer(of_cell)] = state_dict.pop(of_cell)
    if not has_counterpart(layer):
        if f"{prefix}weight_hh_l0" in state_dict:  # no error, which would be raised even with strict=False
            warnings.warn(f"{prefix}weight_hh_l0 is not loaded: {_no_counterpart(layer)}", stacklevel=2)
        return
    for name in layer.directions():
        theirs = {p: state_dict[key] for p in _parameters(layer, name) if (key := prefix + p) in state_dict}
        if theirs.keys() != set(_parameters(layer, name)):
            continue
        recurrent = f"weight_hh_{name}"
        shape, wanted = list(theirs[recurrent].shape), _shape_of_recurrent(layer)
        if shape != wanted:
            others[-1].append(
                f"size mismatch for {prefix}{recurrent}: {shape} given, {wanted} in this {layer.cell.name}"
            )
            continue
        for parameter in theirs:
            del state_dict[prefix + parameter]
        state_dict |= {prefix + key: value for key, value in _of_theirs(layer, name, theirs).items()}


def _with_layer(name: str) -> str:
    """Return nn.LSTM's name of a weight, given the same or that of nn.LSTMCell, which has no layer."""
    return name if "_l" in name.rpartition(".")[2] else f"{name}_l0"


def _options(network) -> dict:
    names = ("num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
    return {name: getattr(network, name) for name in names}


def _parameters(layer, name: str) -> list[str]:
    """Return PyTorch's names of the weights of one layer and direction."""
    kinds = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * layer.bias + ["weight_hr"] * bool(layer.proj_size)
    return [f"{kind}_{name}" for kind in kinds]


def _shape_of_recurrent(layer) -> list[int]:
    """Return the shape of PyTorch's recurrent matrices of a network like `layer`, which depends on the cell."""
    return [len(layer.cell.recurrent_gates) * layer.hidden_size, layer.output_size]


def _of_theirs(layer, name: str, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of FlashRNN's state_dict for one layer and direction, given those of PyTorch."""
    matrices = theirs[f"weight_hh_{name}"].unflatten(0, (-1, layer.hidden_size))
    if layer.cell.name == "gru":
        matrices = matrices[[2, 0, 1]]  # ours: g, r, z
    ours = {f"input_{name}.weight": theirs[f"weight_ih_{name}"], f"recurrent_{name}.R": matrices.unsqueeze(1)}
    if layer.bias:
        x, h = (theirs[f"bias_{kind}_{name}"].unflatten(0, (-1, layer.hidden_size)) for kind in ("ih", "hh"))
        # a GRU's in our order: g (recurrent only), r, z, n (input only)
        b = torch.stack([h[2], x[0] + h[0], x[1] + h[1], x[2]]) if layer.cell.name == "gru" else x + h
        ours[f"recurrent_{name}.b"] = b.unsqueeze(1)
    if layer.proj_size:
        ours[f"recurrent_{name}.projection.weight"] = theirs[f"weight_hr_{name}"]
    return ours


def weights_of(layer, name: str) -> dict[str, tuple[Tensor, nn.Parameter]]:
    """Return PyTorch's weights of one layer and direction, each with the parameter of `layer` from which it is made."""
    linear, recurrent = layer._modules[f"input_{name}"], layer._modules[f"recurrent_{name}"]
    R, b = recurrent.R, recurrent.b
    values = in_order(linear.weight, R, b, layer.cell.name == "gru")
    names, sources = _parameters(layer, name), (linear.weight, R, b, b)
    weights = {parameter: pair for parameter, *pair in zip(names, values, sources, strict=False)}
    if layer.proj_size:
        projection = recurrent.projection.weight
        weights[f"weight_hr_{name}"] = (projection, projection)
    return weights


def initial_states(layer, x: Tensor, states: Tensor | Sequence[Tensor] | None) -> list[Tensor] | None:
    """Return the caller's states, or zeros, in the dtype of x and the format of PyTorch's functions; None if wrong.

    Args:
        layer: a FlashRNN with one head.
        x: [T, B, features], or [B, T, features] if the layer is batch_first.
        states: a tensor [layers and directions, B, hidden_size] per state of the cell, or None.
    """
    size = len(layer.directions()), x.shape[0 if layer.batch_first else 1], layer.hidden_size
    count = len(layer.cell.states)
    if states is None:
        return [read_only_zeros(x, *size)] * count
    given = states if isinstance(states, tuple | list) else (states,)
    if len(given) != count:
        return None
    plain = all(type(s) in PLAIN and s.is_floating_point() and s.device == x.device and s.shape == size for s in given)
    return [as_dtype(state, x.dtype).contiguous() for state in given] if plain else None


def in_order(W: Tensor, R: Tensor, b: Tensor | None, gru: bool) -> list[Tensor]:
    """Return PyTorch's weights of one direction, with two biases (one of which may be zeros) or none.

    Args:
        W: [Gi * D, features], the weight of the input product.
        R: [Gr, 1, D, D].
        b: [G, 1, D], or None.
        gru: whether the gates are those of a GRU. The gates of other cells are in PyTorch's order.
    """
    if not gru:
        return [W, R.flatten(0, 2)] if b is None else [W, R.flatten(0, 2), b.flatten(), torch.zeros_like(b).flatten()]
    weights = [W, R.roll(-1, 0).flatten(0, 2)]  # ours: g, r, z
    return weights if b is None else [*weights, b[1:].flatten(), pad(b[0].flatten(), (2 * b.shape[2], 0))]


def _set_requires_grad(layer, name: str, trained: dict[str, bool]) -> None:
    """Make a parameter trainable if PyTorch's network trains one of the weights from which it is made."""
    for parameter in {source for _, source in weights_of(layer, name).values()}:
        theirs = [p for p, (_, source) in weights_of(layer, name).items() if source is parameter]
        parameter.requires_grad_(any(trained[p] for p in theirs))
