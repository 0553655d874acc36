"""A model's step as one kernel, where there is one: recurrent blocks at small batches on an NVIDIA GPU."""

import torch
from torch import nn

from flashrnn import Recurrence
from flashrnn.decoding import ModelStep, ResidualBlock, ResidualModel, unsupported_reason

from ..backbone import SequenceModel, States
from ..block import MLP, Block
from ..mixers import RNNMixer


def fused_step(model: SequenceModel, states: States) -> ModelStep | None:
    """Return the step of a model on these states, which it updates in place; None if another way has to compute it.

    Args:
        model: its weights may change in place.
        states: as SequenceModel.step takes them.
    """
    if torch.is_autocast_enabled("cuda") or states[0][0].device.type != "cuda":
        return None
    if not (_is_plain_norm(model.norm) and _is_plain_linear(model.head) and all(map(_is_plain, model.blocks))):
        return None
    if len({(block.mixer.recurrence.cell, block.mixer.num_heads) for block in model.blocks}) > 1:
        return None
    blocks = [_weights(block, state) for block, (state,) in zip(model.blocks, states, strict=True)]
    cell = model.blocks[0].mixer.recurrence.cell
    found = ResidualModel(cell, model.embedding.weight, blocks, model.norm.weight, model.head.weight)
    return ModelStep(found) if unsupported_reason(found) is None else None


def _is_plain(block: Block) -> bool:
    """Return whether a block is nothing but what ResidualBlock says."""
    mixer, mlp = block.mixer, block.mlp
    if type(mixer) is not RNNMixer or type(mlp) is not MLP or type(mixer.recurrence) is not Recurrence:
        return False
    if mixer.conv is not None or mixer.recurrence.b is None or mixer.recurrence.backend != "auto":
        return False
    if type(mlp.act) is not nn.GELU or mlp.act.approximate != "none":
        return False
    linears, norms = (mixer.gates, mlp.up, mlp.down), (block.mixer_norm, block.mlp_norm)
    return all(map(_is_plain_linear, linears)) and all(map(_is_plain_norm, norms))


def _is_plain_linear(linear: nn.Module) -> bool:
    return type(linear) is nn.Linear and linear.bias is None


def _is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is None and norm.eps == 1e-5


def _weights(block: Block, state: torch.Tensor) -> ResidualBlock:
    mixer = block.mixer
    return ResidualBlock(
        mixer_norm=block.mixer_norm.weight,
        gates=mixer.gates.weight,
        R=mixer.recurrence.R,
        b=mixer.recurrence.b,
        head_norm=mixer.norm_weight,
        mlp_norm=block.mlp_norm.weight,
        up=block.mlp.up.weight,
        down=block.mlp.down.weight,
        states=state.transpose(0, 1),
    )
