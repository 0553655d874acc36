"""Residual blocks without gradients in few kernels: a single kernel between two matrix products adds and normalises."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashrnn import Recurrence, flashrnn
from flashrnn.decoding import add_norm, unsupported_add_norm

from .block import MLP, Block
from .mixers import RNNMixer
from .quantization import Int8Linear
from .walk import is_observed, modules, parameters

_ALIGNED = 8  # numbers of 16 bits


class PlainBlock(NamedTuple):
    """The weights and modules of a block that `hidden_states` reads."""

    mixer_norm: Tensor
    gates: nn.Linear | Int8Linear
    recurrence: Recurrence
    head_norm: Tensor
    mlp_norm: Tensor
    up: nn.Linear | Int8Linear
    down: nn.Linear | Int8Linear


def plain_blocks(model: nn.Module, all_modules: list[nn.Module]) -> list[PlainBlock] | None:
    """Return the blocks of a SequenceModel if all are recurrent blocks of this project without convolutions.

    Return None otherwise, and if any of `all_modules`, the model's modules, has hooks or a replaced `forward`.
    """
    if not (_is_plain_norm(model.norm) and _is_plain_linear(model.head)):
        return None
    found = [_plain(block) for block in model.blocks]
    return None if None in found or any(map(is_observed, all_modules[1:])) else found


def served(model: nn.Module, all_modules: list[nn.Module] | None = None) -> list[PlainBlock] | None:
    """Return the blocks of a SequenceModel if `hidden_states` gives the same result as its modules; otherwise None.

    Args:
        model: the model.
        all_modules: `walk.modules(model)`, if the caller already has it.
    """
    weight = model.embedding.weight
    if weight.device.type != "cuda" or torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling():
        return None
    all_modules = modules(model) if all_modules is None else all_modules
    if (found := plain_blocks(model, all_modules)) is None or {p.dtype for p in parameters(all_modules)} != {
        weight.dtype
    }:
        return None
    head_dims = {block.recurrence.head_dim for block in found}
    return found if all(unsupported_add_norm(weight, D) is None for D in head_dims) else None


def hidden_states(
    x: Tensor,
    blocks: list[PlainBlock],
    norm: nn.LayerNorm,
    states: list[tuple[Tensor, ...] | None],
    reset: Tensor | None,
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Return norm(blocks(x)) [B, T, d] and the new states.

    It does not call the modules, because on a slow host their overhead takes longer than the kernels.

    Args:
        x: [B, T, d]; it is overwritten.
        blocks: returned by `served`.
        norm: the norm after the blocks.
        states: as in SequenceModel.forward, one per block.
        reset: bool [B, T], or None.
    """
    B, T, d = x.shape
    x = x.view(B * T, d)
    normed = F.layer_norm(x, (d,), blocks[0].mixer_norm)
    after = [*(block.mixer_norm for block in blocks[1:]), norm.weight]
    new_states = []
    for block, state, next_norm in zip(blocks, states, after, strict=True):
        recurrence = block.recurrence
        N, D, R = recurrence.num_heads, recurrence.head_dim, recurrence.R
        # Gates and hidden layer are several times as large as x: free each as soon as it has been read.
        gates = torch.mm(normed, block.gates.weight.t()).view(B, T, -1, N, D)
        before = None if state is None else state[0].transpose(0, 1)
        h, last = flashrnn(gates, R, recurrence.b, before, recurrence.cell, recurrence.backend, reset=reset)
        del gates
        normed = add_norm(x, h.contiguous(), block.mlp_norm, block.head_norm, D)
        del h
        hidden = torch.ops.aten.gelu_.default(torch.mm(normed, block.up.weight.t()))
        update = torch.mm(hidden, block.down.weight.t())
        del hidden
        normed = add_norm(x, update, next_norm, None, D)
        new_states.append((last.transpose(0, 1),))
    return normed.view(B, T, d), new_states


def logits(x: Tensor, head: nn.Module) -> Tensor:
    """Return head(x) [B, C] for x [B, d], without gradients.

    In 16 bits and with several sequences, a product is several times slower if the number of rows of the weight is not
    a multiple of eight. The remaining rows are therefore computed by a second product.
    """
    (B, _), C = x.shape, head.out_features
    whole, rest = C // _ALIGNED * _ALIGNED, C % _ALIGNED
    if B == 1 or x.device.type != "cuda" or x.dtype.itemsize != 2 or not (whole and rest) or not _is_plain_linear(head):
        return head(x)
    rows = x.new_empty(B, whole + _ALIGNED)  # keeps each row aligned for vectorised stores
    weight = head.weight
    torch.mm(x, weight[:whole].t(), out=rows[:, :whole])
    rows[:, whole:C] = torch.mm(x, weight[-_ALIGNED:].t())[:, -rest:]
    return rows[:, :C]


def _plain(block: Block) -> PlainBlock | None:
    # Modules are looked up in dictionaries, because `Module.__getattr__` would take most of the time.
    parts = block._modules
    mixer, mlp = parts["mixer"], parts.get("mlp")
    if type(mixer) is not RNNMixer or type(mlp) is not MLP:
        return None
    of_mixer, of_mlp, norms = mixer._modules, mlp._modules, (parts["mixer_norm"], parts["mlp_norm"])
    gates, recurrence, up, act, down = (
        of_mixer["gates"], of_mixer["recurrence"], of_mlp["up"], of_mlp["act"], of_mlp["down"],
    )  # fmt: skip
    if type(recurrence) is not Recurrence or mixer.conv is not None:
        return None
    if type(act) is not nn.GELU or act.approximate != "none":
        return None
    if not (all(map(_is_plain_linear, (gates, up, down))) and all(map(_is_plain_norm, norms))):
        return None
    of_mixer_norm, of_mlp_norm = (one._parameters["weight"] for one in norms)
    return PlainBlock(of_mixer_norm, gates, recurrence, mixer._parameters["norm_weight"], of_mlp_norm, up, down)


def _is_plain_linear(linear: nn.Module) -> bool:
    return type(linear) is Int8Linear or (type(linear) is nn.Linear and linear._parameters["bias"] is None)


def _is_plain_norm(norm: nn.Module) -> bool:
    if type(norm) is not nn.LayerNorm or norm.eps != 1e-5:
        return False
    return norm._parameters["weight"] is not None and norm._parameters["bias"] is None
