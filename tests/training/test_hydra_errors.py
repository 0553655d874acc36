import re
import sys

import pytest
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training import hydra_errors
from training.configuration import check_required, composed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=lsmt", r"elman.*transformer.*\(did you mean lstm\?\)"),
        ("experiment=slimpajama", r"\(did you mean slimpajama_160m or slimpajama_1b\?\)"),
        ("optim.learning_rate=1", r"optim.learning_rate.*\+optim\.learning_rate=1.*: .*\blr, betas"),
        ("lr=1e-3", r"\(did you mean optim\.lr\?\)"),
        ("heads=4", r"\(did you mean model\.num_heads\?\)"),
        ("model.num_layers=2", r"known: .*\bnum_blocks, num_heads"),
        ("model.function=gru", r"\(did you mean model\.mixer\.function\?\)"),
        ("logger=[csv,wandbb]", r"'logger': csv none tensorboard wandb \(did you mean wandb\?\)"),
        ("modle=lstm", r"modle.*\(did you mean model\?\)"),
        ("+experiment=text_tiny", "experiment"),
        ("data=parity,s3", "--multirun"),
        ("optim.lr=1,", r"optim\.lr=1,"),
        ("data.source=~/a.txt", r"quotes: \"data\.source='~/a\.txt'\""),
        ("parity", "^parity: expected KEY=VALUE"),
    ],
)
def test_wrong_override_is_an_error_with_suggestions(override, message):
    with pytest.raises((HydraException, OSError)) as raised:
        composed([override])
    assert "\n" not in (told := hydra_errors.message(raised.value))
    assert re.search(message, told)


def test_unknown_key_of_a_saved_config_is_an_error():
    saved = OmegaConf.create({"data": {"eval_lengths": [40]}})
    OmegaConf.set_struct(saved, True)
    with pytest.raises(OmegaConfBaseException) as raised:
        OmegaConf.merge(saved, {"data": {"eval_lenghts": [3]}})
    assert hydra_errors.message(raised.value) == "There is no key 'data.eval_lenghts' (did you mean eval_lengths?)"


def test_invalid_value_that_others_depend_on_is_an_error():
    config = composed(["global_batch_size=100", "run_dir=."])
    with pytest.raises(OmegaConfBaseException) as raised:
        OmegaConf.to_container(config, resolve=True)
    assert re.fullmatch(r"global_batch_size=100 must be a positive .* = \d+", hydra_errors.message(raised.value))


def test_error_of_a_required_key_contains_its_comment():
    with pytest.raises(ValueError, match=r"ckpt=VALUE is required: .*last"):
        check_required(composed([], "evaluate"), "evaluate")


@pytest.mark.parametrize(
    ("options", "by_target"),
    [
        ({"_target_": "flashrnn.get_cell", "function": 3}, True),
        ({"_target_": "flashrnn.get_cell", "cell": "lstm"}, False),
        ({"_target_": "data.mixing.Schedule", "weights": 3, "seed": [0]}, False),  # an operation on 3 fails
    ],
)
def test_type_error_message_is_that_of_the_target_or_its_arguments(options, by_target):
    with pytest.raises(InstantiationException) as raised:
        instantiate(options)
    assert isinstance(raised.value.__cause__, TypeError)
    assert hydra_errors.raised_by_target(raised.value) is by_target


def test_a_missing_package_is_told_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "models.mixers.fla.FLAMixer", "d_model": 64, "layer": "GatedDeltaNet"})
    told = hydra_errors.message(raised.value)
    assert told.count("pip install") == 1
    assert told.startswith("mixer ")
