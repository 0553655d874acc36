"""States carried from batch to batch: lanes are read as one sequence, and runs resume with their states."""

import json
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from models.mixers.mamba import MambaMixer
from scripts.train import train
from tests.tiny_runs import SHORT, TINY, evaluate, losses, run
from training import checkpoint
from training.config_checks import check_buildable
from training.lightning_module import STATES, TrainingModule

STATEFUL = [
    "data.stateful=true",
    "data.context_length=4",
    "data.batch_size=4",
    "data.val_fraction=0.1",
    "model.d_model=16",
]
FEW = ["data.max_val_blocks=32"]  # validation blocks
MODELS = {
    "lstm": [],
    "slstm": ["model=slstm", "model.mixer.conv_width=2"],
    "nn_lstm": ["model=nn_lstm"],
    "mlstm": ["model=mlstm"],
    "mamba": ["model=mamba"],
    "hybrid": ["model=hybrid", "model.num_blocks=3"],
}
SMOOTH = ["optim.eps=1e-3"]  # otherwise AdamW's first steps amplify rounding errors of tiny gradients
PARTS = ["data.batch_size=2", "global_batch_size=4"]  # two accumulated batches


def weights(config_or_folder):
    return checkpoint.load(checkpoint.find(str(config_or_folder)))["state_dict"]


def assert_alike(ours, expected):
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "model", ["lstm", "mamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slstm", "nn_lstm", "mlstm"))]
)
def test_lane_is_read_as_one_sequence(model, tiny_config):
    """Validation in windows with carried states has the loss of the whole lanes."""
    config = tiny_config("text_tiny", *STATEFUL, *MODELS[model])
    found = train(config)["perplexity"]
    data = instantiate(config.data)
    data.setup()
    batches = list(data.val_dataloader())
    ids, labels = (torch.cat([batch[key] for batch in batches], dim=1) for key in ("input_ids", "labels"))
    assert ids.shape[1] > 40
    both = (labels[:, :-1] >= 0) & (labels[:, 1:] >= 0)
    assert torch.equal(ids[:, 1:][both], labels[:, :-1][both])
    module = TrainingModule(instantiate(config.model))
    module.load_state_dict(weights(config.run_dir))
    with torch.no_grad():
        whole = module.model.loss(ids, labels)[0].exp().item()
    assert found == pytest.approx(whole, rel=1e-5)
    assert evaluate(config.run_dir, "data.stateful=false")["perplexity"] != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("model", ["lstm", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_accumulated_batches_have_their_own_lanes(model, tiny_config):
    """A step with two batches of 2 equals a step with one batch of 4."""
    configs = [
        tiny_config("text_tiny", *STATEFUL, *FEW, *SMOOTH, *MODELS[model], *more, run=f"{len(more)}")
        for more in ([], PARTS)
    ]
    for config in configs:
        train(config)
    one, two = configs
    assert_alike(weights(two.run_dir), weights(one.run_dir))


@pytest.mark.parametrize("model", ["lstm", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_run_is_resumed_exactly_with_its_states(model, tiny_config):
    """Within lanes, also with another accumulation. Without the states, the losses differ."""
    arguments = [*STATEFUL, *FEW, *MODELS[model], *PARTS]
    whole = tiny_config("text_tiny", *arguments, "checkpoint.every_n_train_steps=3", "checkpoint.save_top_k=-1")
    train(whole)
    file = Path(whole.run_dir) / "checkpoints" / "step_3.ckpt"
    expected = {step: loss for step, loss in losses(Path(whole.run_dir)).items() if step >= 3}

    def resumed(file, name, *more):
        config = tiny_config("text_tiny", *arguments, f"ckpt_path={file}", *more, run=name)
        train(config)
        return losses(Path(config.run_dir))

    assert resumed(file, "resumed") == expected
    at_once = resumed(file, "at_once", "data.batch_size=4")
    assert list(at_once) == list(expected)
    content = torch.load(file)
    del content[STATES]
    torch.save(content, file)
    assert resumed(file, "forgetful") != expected


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["trainer=h100_8", "trainer=fsdp_8"])
def test_lanes_of_two_processes_equal_those_of_one(strategy, tiny_config, tmp_path):
    """Also after resuming the checkpoint of both in one process; losses by position are equal, too."""
    arguments = [*STATEFUL, *SMOOTH, "model=slstm", "logger=none", "data.eval_length=128"]
    one = tiny_config("text_tiny", *arguments, run="one")
    train(one)
    two = [*arguments, strategy, "trainer.devices=2", "data.batch_size=1", "global_batch_size=4", "name=two"]
    two += ["trainer.precision=32-true", "trainer.max_steps=5", "schedule.total_steps=8", "val_every=5"]
    source = f"data.source={tmp_path}/texts/*.txt"
    ended = run("scripts.train", "experiment=text_tiny", source, *TINY["text_tiny"], *SHORT, *two, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (of_two,) = (tmp_path / "outputs" / "two").iterdir()
    (states,) = checkpoint.load(checkpoint.find(str(of_two)))[STATES]
    assert [part.shape[0] for part in states] == [4]
    by_position, alone = json.loads((of_two / "eval.json").read_text())["by_position"], evaluate(of_two)["by_position"]
    assert by_position["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert by_position["documents"] == alone["documents"] > 2
    last = tiny_config("text_tiny", *arguments, f"ckpt_path={of_two}", run="last")
    train(last)
    assert_alike(weights(last.run_dir), weights(one.run_dir))


def test_resuming_with_other_lanes_is_an_error(tiny_config):
    first = tiny_config("text_tiny", *STATEFUL, *FEW, run="first")
    train(first)
    more = [f"ckpt_path={first.run_dir}", "trainer.max_steps=9"]
    for other, message in (("data.batch_size=8", "4 lanes.* 8"), ("data.stateful=false", r"data\.stateful=False")):
        with pytest.raises(ValueError, match=message):
            train(tiny_config("text_tiny", *STATEFUL, other, *more, run="other"))


def test_mixers_that_cannot_carry_states_are_reported(tiny_config, capsys, monkeypatch):
    monkeypatch.setattr(MambaMixer, "trains_with_states", False, raising=False)
    with pytest.raises(ValueError, match=r"data\.stateful=true: MambaMixer"):
        check_buildable(tiny_config("text_tiny", "data.stateful=true", "model=mamba"))
    check_buildable(tiny_config("text_tiny", "data.stateful=true", *MODELS["hybrid"]))
    assert "AttentionMixer" in capsys.readouterr().err
    check_buildable(tiny_config("text_tiny", "data.stateful=true"))
    assert capsys.readouterr().err == ""
