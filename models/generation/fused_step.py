"""The decoding step of a model as one kernel, for recurrent blocks and small batches on an NVIDIA GPU."""

import torch
from torch import Tensor, nn

from flashrnn import Recurrence
from flashrnn.decoding import ModelStep, ResidualBlock, ResidualModel, unsupported_reason
from flashrnn.decoding import compile_ahead as compile_step_ahead

from ..backbone import SequenceModel, States
from ..fused_blocks import PlainBlock, plain_blocks
from ..quantization import Int8Linear
from ..walk import modules


def fused_step(model: SequenceModel, states: States) -> ModelStep | None:
    """Return the fused step of a model, which updates `states` in place; None if the model or batch has none.

    Args:
        model: the model; its weights may change in place.
        states: states in the format of SequenceModel.step.
    """
    found = _residual_model(model, states)
    return None if found is None else ModelStep(found)


def compile_ahead(model: SequenceModel, rows: int) -> None:
    """Start compiling the kernels for reading a prompt and for the fused step of `rows` rows, if the model has one."""
    recurrence = getattr(model.blocks[0].mixer, "recurrence", None)
    if not (isinstance(recurrence, Recurrence) and model.embedding.weight.is_cuda):
        return
    shape = len(recurrence.cell.states), rows, recurrence.num_heads, recurrence.head_dim
    like = model.embedding.weight.new_empty(shape, dtype=torch.float32).transpose(0, 1)
    if (found := _residual_model(model, [(like,)] * len(model.blocks))) is not None:
        compile_step_ahead(found)


def _residual_model(model: SequenceModel, states: States) -> ResidualModel | None:
    """Return the arguments of a ModelStep; None if ModelStep does not support this model and these states."""
    if torch.is_autocast_enabled("cuda") or states[0][0].device.type != "cuda":
        return None
    if (plain := plain_blocks(model, modules(model))) is None:
        return None
    recurrences = [block.recurrence for block in plain]
    if len({(one.cell, one.num_heads) for one in recurrences}) > 1:
        return None
    if any(one.b is None or one.backend != "auto" for one in recurrences):
        return None
    blocks = [_weights(block, state) for block, (state,) in zip(plain, states, strict=True)]
    cell = recurrences[0].cell
    head, head_scale = _matrix(model.head)
    found = ResidualModel(cell, model.embedding.weight, blocks, model.norm.weight, head, head_scale)
    return found if unsupported_reason(found) is None else None


def _weights(block: PlainBlock, state: Tensor) -> ResidualBlock:
    (gates, gates_scale), (up, up_scale), (down, down_scale) = map(_matrix, (block.gates, block.up, block.down))
    return ResidualBlock(
        mixer_norm=block.mixer_norm,
        gates=gates,
        R=block.recurrence.R,
        b=block.recurrence.b,
        head_norm=block.head_norm,
        mlp_norm=block.mlp_norm,
        up=up,
        down=down,
        states=state.transpose(0, 1),
        gates_scale=gates_scale,
        up_scale=up_scale,
        down_scale=down_scale,
    )


def _matrix(linear: nn.Linear | Int8Linear) -> tuple[Tensor, Tensor | None]:
    """Return the stored weights of a linear layer and, for 8-bit weights, the scales of their rows."""
    return (linear.quantized, linear.scale) if isinstance(linear, Int8Linear) else (linear.weight, None)
