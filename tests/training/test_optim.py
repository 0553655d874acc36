"""AdamW's parameter groups and settings."""

from functools import partial

import pytest
import torch

from models.backbone import SequenceModel
from models.mixers import RNNMixer
from models.mixers.mamba import MambaMixer
from training.optim import adamw, decay_groups


def tiny():
    return SequenceModel(5, partial(RNNMixer, function="slstm", conv_width=4), d_model=8, num_blocks=1)


def test_weight_decay_excludes_embeddings_norms_and_biases():
    model = tiny()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, no_decay = decay_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert {names[parameter] for parameter in decay["params"]} == {
        "blocks.0.mixer.conv.weight",
        "blocks.0.mixer.gates.weight",
        "blocks.0.mixer.recurrence.R",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "head.weight",
    }
    assert {names[parameter] for parameter in no_decay["params"]} == {
        "embedding.weight",
        "blocks.0.mixer_norm.weight",
        "blocks.0.mixer.conv.bias",
        "blocks.0.mixer.recurrence.b",
        "blocks.0.mixer.norm_weight",
        "blocks.0.mlp_norm.weight",
        "norm.weight",
    }


def test_weight_decay_excludes_rates_of_mamba():
    model = SequenceModel(5, MambaMixer, d_model=8, num_blocks=1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    _, no_decay = decay_groups(model, weight_decay=0.1)
    assert {"blocks.0.mixer.layer.A_log", "blocks.0.mixer.layer.D"} <= {names[p] for p in no_decay["params"]}


@pytest.mark.parametrize("setting", [{"lr": 0.0}, {"weight_decay": -0.1}, {"betas": 0.9}])
def test_invalid_settings_are_an_error(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        adamw(torch.nn.Linear(2, 2), **setting)
