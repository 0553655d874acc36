"""Residual blocks without gradients in few kernels: one between two matrix products, for the addition and the norms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashrnn import Recurrence
from flashrnn.decoding import add_norm, unsupported_add_norm

from .block import MLP, Block
from .mixers import RNNMixer
from .quantization import Int8Linear
from .walk import is_observed, modules, parameters

_ALIGNED = 8  # numbers of 16 bits


def are_plain(blocks: nn.ModuleList, norm: nn.Module, head: nn.Module) -> bool:
    """Return whether all blocks are recurrent blocks of this project without convolutions, and no hook or replaced
    method observes or changes them."""
    if not (_is_plain_norm(norm) and _is_plain_linear(head) and all(map(_is_plain, blocks))):
        return False
    return not any(map(is_observed, modules(blocks)))


def serves(embedding: nn.Embedding, blocks: nn.ModuleList, norm: nn.Module, head: nn.Module) -> bool:
    """Return whether `hidden_states` computes what the modules would."""
    weight = embedding.weight
    if weight.device.type != "cuda" or torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling():
        return False
    if not are_plain(blocks, norm, head) or any(p.dtype != weight.dtype for p in parameters(blocks)):
        return False
    head_dims = {block.mixer.recurrence.head_dim for block in blocks}
    return all(unsupported_add_norm(weight, D) is None for D in head_dims)


def hidden_states(
    x: Tensor, blocks: nn.ModuleList, norm: nn.LayerNorm, states: list[tuple[Tensor, ...] | None], reset: Tensor | None
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Return norm(blocks(x)) and the new states, for blocks that `serves` accepts.

    Args:
        x: [B, T, d], overwritten.
        blocks: each with a state.
        norm: the one after the blocks.
        states: as SequenceModel.forward has them.
        reset: bool [B, T].
    """
    B, T, d = x.shape
    normed = F.layer_norm(x, (d,), blocks[0].mixer_norm.weight)
    after = [*(block.mixer_norm for block in blocks[1:]), norm]
    new_states = []
    for block, state, next_norm in zip(blocks, states, after, strict=True):
        mixer, mlp = block.mixer, block.mlp
        N, D = mixer.num_heads, mixer.recurrence.head_dim
        # Nothing holds on to what has been read: gates and hidden layer have several times the size of x.
        gates = F.linear(normed, mixer.gates.weight).view(B, T, -1, N, D)
        h, last = mixer.recurrence(gates, None if state is None else state[0].transpose(0, 1), reset)
        del gates
        normed = add_norm(x, h.contiguous(), block.mlp_norm.weight, mixer.norm_weight, D)
        del h
        hidden = torch.ops.aten.gelu_(F.linear(normed, mlp.up.weight))
        update = F.linear(hidden, mlp.down.weight)
        del hidden
        normed = add_norm(x, update, next_norm.weight, None, D)
        new_states.append((last.transpose(0, 1),))
    return normed, new_states


def logits(x: Tensor, head: nn.Module) -> Tensor:
    """Return head(x) [B, C] without gradients. In 16 bits a product with several sequences is several times slower if
    its number of rows is not a multiple of eight: the remaining rows are a second product."""
    (B, _), C = x.shape, head.out_features
    whole, rest = C // _ALIGNED * _ALIGNED, C % _ALIGNED
    if B == 1 or x.device.type != "cuda" or x.dtype.itemsize != 2 or not (whole and rest) or not _is_plain_linear(head):
        return head(x)
    rows = x.new_empty(B, whole + _ALIGNED)  # so that each row is aligned for vectorised stores
    weight = head.weight
    torch.mm(x, weight[:whole].t(), out=rows[:, :whole])
    rows[:, whole:C] = torch.mm(x, weight[-_ALIGNED:].t())[:, -rest:]
    return rows[:, :C]


def _is_plain(block: Block) -> bool:
    mixer, mlp = block.mixer, block.mlp
    if type(mixer) is not RNNMixer or type(mlp) is not MLP or type(mixer.recurrence) is not Recurrence:
        return False
    if mixer.conv is not None or type(mlp.act) is not nn.GELU or mlp.act.approximate != "none":
        return False
    linears, norms = (mixer.gates, mlp.up, mlp.down), (block.mixer_norm, block.mlp_norm)
    return all(map(_is_plain_linear, linears)) and all(map(_is_plain_norm, norms))


def _is_plain_linear(linear: nn.Module) -> bool:
    return type(linear) is Int8Linear or (type(linear) is nn.Linear and linear.bias is None)


def _is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is None and norm.eps == 1e-5
