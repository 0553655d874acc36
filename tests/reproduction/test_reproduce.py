"""The command line of scripts.reproduce."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from benchmarks import RESULTS
from reproduction import ENTRIES
from reproduction.result import Options, Reproduction
from scripts import reproduce
from training.configuration import CONFIGS

DEFAULTS = {**OmegaConf.load(Path(CONFIGS, "reproduce.yaml")), "name": "parity"}
FILE = str(RESULTS / "cpu" / "parity.json")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"name": None}, "parity"),
        ({"name": "lstm"}, "parity"),
        ({"name": "kernel_speed", "overrides": ["model.d_model=8"]}, r"train\.KEY: .*parity"),
        ({"name": "roofline", "jobs": 2}, "jobs: .*parity"),
        ({"name": "roofline", "runs": ".", "add_to": FILE}, "runs, add_to: .*language_model"),
        ({"runs": "x", "files": [FILE]}, "runs: .*files="),
        ({"runs": "x", "overrides": ["seed=1"], "jobs": 2}, r"train\.KEY, jobs: .*runs="),
        ({"jobs": 0}, "jobs=0"),
        ({"files": ["nowhere.json"]}, r"nowhere\.json"),
        ({"add_to": FILE}, "add_to: .*runs="),
        ({"runs": ".", "add_to": "nothing.json"}, r"nothing\.json"),
    ],
    ids=str,
)
def test_useless_and_invalid_keys_are_an_error(asked, error):
    with pytest.raises(ValueError, match=error):
        reproduce.check(DEFAULTS | asked)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["parity", "job=2"], "'job'"),
        (["parity", "train.model.d_model"], r"model\.d_model: expected KEY=VALUE"),
        (["parity", "quick=true", f"files={FILE}"], "quick: .*files="),
        (["kernel_speed"], r"error: .*NVIDIA GPU.*files="),
    ],
    ids=" ".join,
)
def test_wrong_command_line_is_an_error(arguments, error, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce", *arguments])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=error):
        reproduce.main()


def test_training_keys_are_separated_from_the_commands_keys(monkeypatch, tmp_path):
    asked = []
    result = SimpleNamespace(measure=lambda options: asked.append(options) or [])
    monkeypatch.setattr(reproduce, "load", lambda _: result)
    monkeypatch.setattr("reproduction.result.write", lambda *_: asked)
    arguments = ["train.seed=1", "quick=true", "+train.data.a=[1,2]", "train.name='x y'", "~train.optim", "jobs=2"]
    monkeypatch.setattr("sys.argv", ["reproduce", "parity", *arguments, f"out={tmp_path}/a=b"])
    monkeypatch.setattr("benchmarks.results.checkout", lambda: "abc")
    reproduce.main()
    overrides = ("seed=1", "+data.a=[1,2]", "name='x y'", "~optim")
    assert asked == [Options(quick=True, jobs=2, overrides=overrides, out=tmp_path / "a=b")]


def test_without_a_commit_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce", "head_size_limits"])
    monkeypatch.setattr("training.provenance.commit", lambda: None)
    monkeypatch.setattr(reproduce, "load", lambda _: SimpleNamespace(measure=lambda _: pytest.fail("measured")))
    with pytest.raises(SystemExit, match=r"error: .*git"):
        reproduce.main()


@pytest.mark.parametrize("name", list(ENTRIES))
def test_all_names_have_a_reproduction(name):
    assert isinstance(reproduce.load(name), Reproduction)
