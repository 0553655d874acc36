"""Conversion of sLSTM layers in a checkpoint of the xlstm package (https://github.com/NX-AI/xlstm) to RNNMixers.

A layer is converted completely, with convolution, gates, recurrence and norm. The blocks around it are not converted,
because their feed-forward part is different. The cell is assumed to be the package's function="slstm", which a
checkpoint does not record.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from data.atomic_file import replacing
from flashrnn import get_cell
from models.mixers import RNNMixer

# The package feeds its fgate to the cell's input gate and its igate to the forget gate. It keeps these wrong names for
# compatibility with trained models (https://github.com/NX-AI/xlstm/issues/98).
SLSTM = get_cell("slstm")
MODULES = {"i": "fgate", "f": "igate", "z": "zgate", "o": "ogate"}

KERNEL, BIAS = "slstm_cell._recurrent_kernel_", "slstm_cell._bias_"


def import_layers(weights: Mapping[str, Tensor]) -> dict[str, RNNMixer]:
    """Return the sLSTM layers in a state_dict by their names, on the CPU in float32.

    Raises ValueError if there is none, or if a layer does not have the format of the xlstm package.
    """
    names = [name.removesuffix(KERNEL).removesuffix(".") for name in weights if name.endswith(KERNEL)]
    if not names:
        some = ", ".join(list(weights)[:5])
        raise ValueError(f"no sLSTM layer: none of the {len(weights)} names ends in {KERNEL!r}; they begin with {some}")
    return {name: _layer(name, weights) for name in names}


def _layer(name: str, weights: Mapping[str, Tensor]) -> RNNMixer:
    prefix = f"{name}." if name else ""
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    missing = [key for key in (BIAS, *(f"{module}.weight" for module in MODULES.values())) if key not in own]
    if missing:
        raise ValueError(f"the sLSTM layer {name!r} lacks {', '.join(missing)}")
    R, b = _recurrence(name, own[KERNEL], own[BIAS])
    _, N, D = b.shape
    gates = [torch.block_diag(*own[f"{MODULES[gate]}.weight"]) for gate in SLSTM.gates]  # a block for each head
    state = {"gates.weight": torch.cat(gates), "recurrence.R": R, "recurrence.b": b}
    scale = own.get("group_norm.weight", torch.zeros(N * D))
    state["norm_weight"] = 1 + scale  # theirs is a difference from 1
    convolution = own.get("conv1d.conv.weight")  # [d, 1, width]
    if convolution is not None:
        state |= {"conv.weight": convolution.squeeze(1), "conv.bias": own["conv1d.conv.bias"]}
    mixer = RNNMixer(N * D, N, "slstm", conv_width=0 if convolution is None else convolution.shape[-1])
    mixer.load_state_dict(state)
    return mixer


def _recurrence(name: str, kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return R [G, N, D, D] and b [G, N, D], converted from the layout of the backend used in training.

    The shape of the kernel shows which backend that was; the shape of the bias is the same for both
    (https://github.com/NX-AI/xlstm/issues/127).
    """
    G = len(SLSTM.gates)
    if kernel.ndim == 3 and kernel.shape[1] == G * kernel.shape[2]:  # vanilla: [N, G D, previous D], bias [G N D]
        N, _, D = kernel.shape
        return kernel.view(N, G, D, D).transpose(0, 1), bias.view(G, N, D)
    if kernel.ndim == 3 and kernel.shape[2] == G * kernel.shape[1]:  # cuda: [N, previous D, G D], bias [N G D]
        N, D, _ = kernel.shape
        return kernel.view(N, D, G, D).permute(2, 0, 3, 1), bias.view(N, G, D).transpose(0, 1)
    raise ValueError(
        f"the sLSTM layer {name!r} has a recurrent kernel {list(kernel.shape)}; the xlstm package has "
        f"[heads, {G} D, D] (backend vanilla) or [heads, D, {G} D] (backend cuda)"
    )


def read(path: Path) -> Mapping[str, Tensor]:
    """Return the state_dict stored in a file by torch.save."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds
        raise ValueError(f"{path} is damaged, or was not written by torch.save with tensors only") from error
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        keys = f" with the keys {', '.join(map(str, content))}" if isinstance(content, Mapping) else ""
        raise ValueError(f"{path} contains a {type(content).__name__}{keys}; expected a state_dict saved by torch.save")
    return weights


def convert(checkpoint: Path, out: Path) -> dict[str, dict]:
    """Write the sLSTM layers of a checkpoint to a file, and return the arguments of each as an RNNMixer."""
    layers = import_layers(read(checkpoint))
    with replacing(out) as file:
        torch.save(
            {name: {"arguments": _arguments(m), "state_dict": m.state_dict()} for name, m in layers.items()}, file
        )
    return {name: _arguments(mixer) for name, mixer in layers.items()}


def _arguments(mixer: RNNMixer) -> dict:
    """Return the constructor arguments of an RNNMixer."""
    return {
        "d_model": mixer.gates.in_features,
        "num_heads": mixer.num_heads,
        "function": "slstm",
        "conv_width": mixer.conv.weight.shape[1] if mixer.conv else 0,
    }
