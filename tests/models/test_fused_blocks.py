"""Residual blocks run by fused kernels, tested with PyTorch functions in place of the kernels."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import fused_blocks
from models.backbone import SequenceModel
from models.fused_blocks import hidden_states, logits, plain_blocks
from models.mixers import AttentionMixer, RNNMixer
from models.walk import modules


def by_definition(x, update, weight, head_weight, head_dim):
    """Compute the result of `flashrnn.decoding.add_norm` by PyTorch."""
    if head_weight is not None:
        heads = update.view(*x.shape[:-1], -1, head_dim)
        update = F.layer_norm(heads, (head_dim,)).view(x.shape) * head_weight
    x += update.view(x.shape)
    return F.layer_norm(x, x.shape[-1:], weight)


def build(**options):
    torch.manual_seed(0)
    mixer = partial(RNNMixer, **{"function": "lstm", "num_heads": 2} | options)
    model = SequenceModel(11, mixer, d_model=16, num_blocks=3).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("function", ["lstm", "slstm", "gru"])
@torch.no_grad()
def test_fused_blocks_equal_the_modules(monkeypatch, function):
    monkeypatch.setattr(fused_blocks, "add_norm", by_definition)
    model, ids = build(function=function), torch.randint(11, (2, 7))
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    expected, states = model.hidden_states(ids, None, reset)
    plain = plain_blocks(model, modules(model))
    found, new_states = hidden_states(model.embedding(ids), plain, model.norm, [None] * 3, reset)
    torch.testing.assert_close(found, expected)
    ids = torch.randint(11, (2, 1))
    expected, states = model.hidden_states(ids, states, None)
    found, new_states = hidden_states(model.embedding(ids), plain, model.norm, new_states, None)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(new_states, states)


def test_changed_blocks_are_not_fused():
    def plain(change):
        model = build()
        change(model)
        return plain_blocks(model, modules(model)) is not None

    block = lambda model: model.blocks[1]  # noqa: E731
    assert plain(lambda model: None)
    assert not plain(lambda model: block(model).register_forward_hook(lambda *_: None))
    assert not plain(lambda model: setattr(block(model), "mixer", AttentionMixer(16, num_heads=2)))
    assert not plain(lambda model: setattr(block(model).mlp, "act", nn.ReLU()))
    assert not plain(lambda model: nn.utils.parametrizations.weight_norm(block(model).mlp.up))
    assert not plain(lambda model: setattr(model, "norm", nn.LayerNorm(16)))
    assert not plain(lambda model: setattr(model, "head", nn.Linear(16, 11)))
    convolved = build(conv_width=4)
    assert plain_blocks(convolved, modules(convolved)) is None


def test_logits_on_the_cpu_equal_the_head():
    head, x = nn.Linear(8, 11, bias=False), torch.randn(3, 8)
    assert torch.equal(logits(x, head), head(x))
