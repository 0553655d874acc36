"""The commands as a user types them."""

import re

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts.train import train
from tests.tiny_runs import SHORT, TINY, run
from training import checkpoint
from training.overrides import check_overrides, overrides_of_run


@pytest.mark.slow
def test_train_several_models_then_evaluate_one(tmp_path):
    trained = run("scripts.train", "-m", "model=elman,lstm", *TINY["parity"], *SHORT, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("Accuracy of the label at the last position") == 2
    (sweep,) = (tmp_path / "outputs" / "parity").iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0_elman", "1_lstm"}
    made = {path.name for path in (sweep / "1_lstm").iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.csv", "eval.json", "accuracy.png"} <= made
    assert str(sweep / "1_lstm" / "checkpoints" / "last.ckpt") in trained.stdout

    evaluated = run("scripts.evaluate", f"ckpt={sweep}/1_lstm", "data.eval_lengths=[6,14]", folder=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "6-14" in evaluated.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["trainer=h100_8", "trainer=fsdp_8"])
def test_two_processes_train_as_one(strategy, tiny_config, tmp_path):
    """Equal lengths, so that the mean over ranks is the mean over labels: the same weights up to rounding."""
    settings = ["model=lstm", "data.min_length=6", "logger=none"]
    train(tiny_config("parity", *settings, run="one"))
    two = [strategy, "trainer.devices=2", "data.batch_size=2", "trainer.precision=32-true", "name=two"]
    ended = run("scripts.train", *TINY["parity"], *SHORT, *settings, *two, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (of_two,) = (tmp_path / "outputs" / "two").iterdir()
    one, other = (
        checkpoint.load(checkpoint.find(str(folder)))["state_dict"]
        for folder in (tmp_path / "outputs" / "parity" / "one", of_two)
    )
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("scripts.train", ["model=lsmt"], "Could not find 'model/lsmt'"),
        ("scripts.train", ["optim.learning_rate=1"], "unknown config key 'optim.learning_rate': optim has _target_,"),
        ("scripts.train", ["trainer.max_step=1"], "'trainer.max_step': did you mean trainer.max_steps? trainer has"),
        (
            "scripts.train",
            ["~logger"],
            "~logger: a run has every group of the configs; logger is one of csv, none, wandb",
        ),
        ("scripts.train", ["foo=1"], "trainer, logger\n"),  # nothing reads a key that is added there
        ("scripts.train", ["callbacks.rate._target_=a.b"], "callbacks has no keys (+callbacks.rate._target_=... adds"),
        ("scripts.train", ["lr=1e-3"], "unknown config key 'lr': did you mean optim.lr? the config has name,"),
        ("scripts.train", ["+foo=1"], "error: +foo=1: nothing reads a key 'foo' beside those of the config"),
        (
            "scripts.train",
            ["model=rnn"],
            "error: model.mixer.function has no value yet: give one, model.mixer.function=",
        ),
        ("scripts.train", ["data.min_length=50"], "error: min_length=50, max_length=40"),
        ("scripts.train", ["seed=-1"], "error: seed=-1: expected a number from 0 to 4294967295"),
        (
            "scripts.evaluate",
            ["outputs/a"],
            "error: 'outputs/a' is not KEY=VALUE: a run or a checkpoint is given as ckpt=",
        ),
        ("scripts.evaluate", ["ckpt=nowhere"], "error: there is no checkpoint at nowhere"),
        ("scripts.evaluate", [f"ckpt={__file__}"], "or no checkpoint of ours: it is not a file that torch.save has"),
    ],
)
def test_wrong_input_ends_in_a_few_lines(tmp_path, module, arguments, message):
    ended = run(module, *arguments, folder=tmp_path)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) < 25


@pytest.mark.parametrize("module", ["scripts.train", "scripts.evaluate"])
def test_help(tmp_path, module):
    helped = run(module, "--help", folder=tmp_path)
    assert helped.returncode == 0
    assert "ckpt" in helped.stdout


@pytest.mark.parametrize(
    "argument",
    [
        *("hydra/job_logging=disabled", "hydra.run.dir=x", "+data.column=text", "-m", "seed=0,1", "seed=range(0,3)"),
        *(
            "optim.lr=1e-3",
            "optim.lr=1",
            "optim.lr=1e-3,1e-2",
            "trainer.gradient_clip_val=null",
            "trainer.devices=auto",
        ),
        *("threads=null", "global_batch_size=null", "model=glob(*lstm)", "optim.lr=glob(*)"),
        *("data.eval_lengths=[8,16]", "data.num_workers=${threads}", "model.mixer.conv_gates=[i]", "ckpt_path=last"),
    ],
)
def test_arguments_that_hydra_knows_pass(argument):
    check_overrides(["model=elman,gru", argument])


def test_configs_of_ones_own(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    folder.joinpath("mine.yaml").write_text("defaults: [lstm]\n")
    arguments = ("--config-dir", str(tmp_path), "model=mine", "trainer.max_steps=5", "--cfg", "job")
    shown = run("scripts.train", *arguments, folder=tmp_path)
    assert "max_steps: 5" in shown.stdout


@pytest.mark.parametrize("quoted", ["{}", '"{}"'])
def test_a_path_with_equals_signs_is_resumed(tmp_path, quoted):
    """As Lightning names checkpoints, and Hydra folders by their overrides."""
    file = tmp_path / "lr=1e-3,x" / "it's a\\b" / "checkpoints" / "epoch=0-step=6.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({"config": {"overrides": ["optim.lr=1e-3"]}, "state_dict": {}}, file)
    *before, resumed = overrides_of_run([f"ckpt_path={quoted.format(file.parents[1])}"])
    assert before == ["optim.lr=1e-3"]
    assert OverridesParser.create().parse_override(resumed).value() == str(file)


@pytest.mark.slow
def test_a_job_that_fails_leaves_the_others(tmp_path):
    rates = "optim.lr=1e-3,1e20,2e-3"
    ended = run(
        "scripts.train", "-m", rates, *TINY["parity"], *SHORT, "trainer.gradient_clip_val=null", folder=tmp_path
    )
    assert ended.returncode == 1
    assert ended.stderr.count("error: ") == 1
    assert "Traceback" not in ended.stderr
    assert "optim.lr=1e+20" in ended.stderr.partition(" failed\nerror: ")[0].splitlines()[-1]
    assert len(list(tmp_path.glob("outputs/parity/*/*/eval.json"))) == 2


def test_an_empty_path_resumes_nothing():
    with pytest.raises(ValueError, match="ckpt_path= is empty: give the folder of a run"):
        overrides_of_run(["ckpt_path=", "optim.lr=1"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("compile=ture", "compile=ture: expected a value of type bool, such as False"),
        ("val_every=null", "val_every=null: expected a value of type int, such as 100"),
        ("optim.lr=0.1,high", "optim.lr=high: expected a value of type float, such as 0.003"),
        ("data.batch_size=12.5", "data.batch_size=12.5: expected a value of type int, such as 128"),
        ("data.task=[parity,s3]", "data.task=['parity', 's3']: expected one value, such as parity"),
        ("data.eval_lengths=64", "data.eval_lengths=64: expected a value of type list"),
        ("model.mixer=lstm", "model.mixer=lstm: model.mixer has keys of its own, set one of them: _target_, "),
    ],
)
def test_value_of_another_type_than_the_default(argument, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_overrides([argument])


def test_overrides_of_a_resumed_run_are_checked_against_its_config(tmp_path):
    torch.save({"config": {"overrides": ["experiment=text_tiny"]}, "state_dict": {}}, tmp_path / "text.ckpt")
    ended = run("scripts.train", "ckpt_path=text.ckpt", "data.context_length=long", folder=tmp_path)
    assert "data.context_length=long: expected a value of type int, such as 128" in ended.stderr
