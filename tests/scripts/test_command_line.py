"""The commands, run as by a user."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from reproduction import ENTRIES
from scripts.train import train
from tests.tiny_runs import ROOT, SHORT, TINY, losses, run
from training import checkpoint
from training.resumed_config import command_of_run

# Hydra would log to a stream that pytest closes; scripts.evaluate writes no log.
UNLOGGED = {"scripts.train": ["hydra/job_logging=none", "hydra/hydra_logging=none"]}


@pytest.mark.slow
def test_sweep_over_models_and_evaluation_of_one(tmp_path):
    trained = run("scripts.train", "-m", "model=elman,lstm", *TINY["parity"], *SHORT, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("Accuracy ") == 2
    (sweep,) = (tmp_path / "outputs" / "parity").iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"model=elman", "model=lstm"}
    made = {path.name for path in (sweep / "model=lstm").iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.csv", "eval.json", "accuracy.png"} <= made
    assert str(sweep / "model=lstm" / "checkpoints" / "last.ckpt") in trained.stdout

    evaluated = run("scripts.evaluate", f"ckpt={sweep}/model=lstm", "data.eval_lengths=[6,14]", folder=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "6-14" in evaluated.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "tolerance"),
    [
        (["trainer=h100_8"], "32-true", 1e-3),
        (["trainer=fsdp_8", "activation_checkpointing=true"], "32-true", 1e-3),
        (["trainer=fsdp_8"], "bf16-mixed", 2e-2),
    ],
)
def test_two_processes_train_like_one(strategy, precision, tolerance, tiny_config, tmp_path):
    """Losses, weights and the distributed evaluation are the same up to rounding."""
    settings = ["model=hybrid", "model.num_blocks=3", f"trainer.precision={precision}"]
    train(tiny_config("text_tiny", *settings, run="one"))
    two = ["experiment=text_tiny", f"data.source={tmp_path}/texts/*.txt", *TINY["text_tiny"], *SHORT, *settings]
    two += [*strategy, "trainer.devices=2", "data.batch_size=32", "name=two", f"trainer.precision={precision}"]
    ended = run("scripts.train", *two, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (of_two,) = (tmp_path / "outputs" / "two").iterdir()
    folders = tmp_path / "outputs" / "text_tiny" / "one", of_two
    one, other = (checkpoint.load(checkpoint.find(str(folder)))["state_dict"] for folder in folders)
    for name, weight in one.items():
        assert (other[name] - weight).norm() <= tolerance * weight.norm() + 1e-5, name
    expected, found = ({step: float(loss) for step, loss in losses(folder).items()} for folder in folders)
    assert found == pytest.approx(expected, rel=tolerance)
    evaluated = [json.loads((folder / "eval.json").read_text())["perplexity"] for folder in folders]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=tolerance)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("scripts.train", ["optim.lr=1", "-m", "model=lsmt"], "did you mean lstm?"),
        ("scripts.train", ["data.min_length=50"], "min_length=50, max_length=40"),
        ("scripts.train", ["experiment=text_tiny", "compile=no"], "compile=no: expected true or false, such as false"),
        ("scripts.train", [f"hydra.run.dir={__file__}/run"], "Not a directory"),
        ("scripts.train", ["run_dir=mine"], "run_dir=mine: set the folder of a run by hydra.run.dir=..."),
        ("scripts.train", ["ckpt_path="], "ckpt_path="),
        ("scripts.evaluate", ["data.seed=1"], ": ckpt"),
        ("scripts.evaluate", ["ckpt=nowhere"], "nowhere"),
        ("scripts.evaluate", ["ckpt=nowhere", "data=s3"], "data=s3: the run has its own data"),
        ("scripts.evaluate", [f"ckpt={__file__}"], __file__),
        ("scripts.generate", ["ckpt=nowhere", "do_sample=no"], "do_sample=no: expected true or false"),
    ],
)
def test_wrong_input_is_an_error_with_few_lines(tmp_path, monkeypatch, module, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments, *UNLOGGED.get(module, [])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code.startswith("error: ")
    assert message in ended.value.code
    assert len(ended.value.code.splitlines()) <= 3
    assert not [*tmp_path.glob("outputs/*/*")]  # a run that has not begun leaves no folder


def test_error_has_no_traceback(tmp_path):
    ended = run("scripts.export", "ckpt=nowhere", "out=x", "to=y", folder=tmp_path)
    assert ended.returncode == 1
    assert "'to'" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 3


HELP = """
import contextlib, io, json, runpy, sys

shown = {}
for command in ("train", "evaluate", "generate", "export", "benchmark kernels", "reproduce"):
    name, *words = command.split()
    sys.argv = [f"scripts.{name}", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown[name], contextlib.suppress(SystemExit):
        runpy.run_module(f"scripts.{name}", run_name="__main__")
print(json.dumps([{name: text.getvalue() for name, text in shown.items()}, list(sys.modules)]))
"""


def test_help_shows_keys_without_importing_torch():
    """One new interpreter shows that of all commands."""
    helped = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    shown, loaded = json.loads(helped.stdout)
    assert "hydra" in loaded
    assert not {"torch", "lightning", "pandas"} & {*loaded}
    for name in ("train", "evaluate", "generate", "export"):
        assert "ckpt" in shown[name]
        assert "benchmark:" not in shown[name]  # belongs to another command
    for name in ("generate", "export"):
        assert f"python -m scripts.{name} ckpt=PATH" in shown[name]
        assert "ckpt: ???  # a run folder" in shown[name]
    assert "suite: main  # main, heads" in shown["benchmark"]
    assert [line.partition(" ")[0] for line in shown["reproduce"].splitlines()][-len(ENTRIES) :] == list(ENTRIES)


def test_user_configs(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    folder.joinpath("mine.yaml").write_text("defaults: [lstm]\n")
    arguments = ("--config-dir", str(tmp_path), "model=mine", "trainer.max_steps=5", "--cfg", "job")
    shown = run("scripts.train", *arguments, folder=tmp_path)
    assert "max_steps: 5" in shown.stdout


@pytest.mark.slow
def test_run_with_user_configs_is_resumed_without_naming_them(tmp_path):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    folder.joinpath("mine.yaml").write_text(
        "# @package _global_\ndefaults: [parity]\nname: mine\nmodel: {num_heads: 2}\n"
    )
    folder.with_name("model").mkdir()
    folder.with_name("model").joinpath("own.yaml").write_text("defaults: [gru]\nnum_heads: 4\n")
    own = ["--config-dir", "mine", "experiment=mine", "model=own", "schedule.total_steps=20", *TINY["parity"], *SHORT]
    begun = run("scripts.train", *own, folder=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert re.search(
        r"experiment=mine sets model\.num_heads=2, where model=own has 4; model\.num_heads=4 ", begun.stdout
    )
    (first,) = tmp_path.glob("outputs/mine/*")
    gone_on = run("scripts.train", f"ckpt_path={first}", "trainer.max_steps=9", folder=tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "resuming from" in gone_on.stdout


@pytest.mark.parametrize("quoted", ["{}", '"{}"'])
def test_path_with_equals_signs_can_be_resumed(tmp_path, quoted):
    """Lightning's checkpoints and Hydra's folders have such names."""
    file = tmp_path / "lr=1e-3,x" / "it's a\\b" / "checkpoints" / "epoch=0-step=6.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({"config": {"overrides": ["optim.lr=1e-3"]}, "state_dict": {}}, file)
    *before, resumed = command_of_run([f"ckpt_path={quoted.format(file.parents[1])}"])
    assert before == ["optim.lr=1e-3"]
    assert OverridesParser.create().parse_override(resumed).value() == str(file)


@pytest.mark.slow
def test_failed_job_does_not_stop_the_sweep(tmp_path):
    rates = "optim.lr=1e-3,1e20,2e-3"
    ended = run(
        "scripts.train", "-m", rates, *TINY["parity"], *SHORT, "trainer.gradient_clip_val=null", folder=tmp_path
    )
    assert ended.returncode == 1
    assert ended.stderr.count("error: ") == 1
    assert "Traceback" not in ended.stderr
    assert "optim.lr=1e+20" in ended.stderr.partition(" failed\nerror: ")[0].splitlines()[-1]
    assert len(list(tmp_path.glob("outputs/parity/*/*/eval.json"))) == 2
    (table,) = tmp_path.glob("outputs/parity/*/results.csv")
    (failed,) = (line for line in table.read_text().splitlines() if line.startswith("optim.lr=1e+20,,"))
    assert "lower optim.lr" in failed
    (log,) = tmp_path.glob("outputs/parity/*/optim.lr=1e+20/train.log")
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_optuna_sweep(tmp_path):
    options = ["hydra.sweeper.n_trials=3", "hydra.sweep.dir=outputs/search", "schedule.total_steps=20"]
    search = ["hparams_search=parity", *TINY["parity"][1:], *SHORT, *options]
    searched = run("scripts.train", *search, folder=tmp_path)
    assert searched.returncode == 0, searched.stderr
    folder = tmp_path / "outputs" / "search"
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    jobs = {file.parent.name: json.loads(file.read_text())["accuracy"] for file in folder.glob("*/eval.json")}
    best = "model.d_model={model.d_model},optim.lr={optim.lr}".replace("{", "{0[").replace("}", "]}")
    assert len(jobs) == 3
    assert jobs[best.format(found["best_params"])] == found["best_value"] == max(jobs.values())
