"""Resumed runs use their own config, with the overrides of the new command applied."""

import pytest
import torch
from omegaconf import OmegaConf

from tests.tiny_runs import config
from training.resumed_config import command_of_run, differences, take_saved_values


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves the checkpoint of a run with these overrides."""

    def save(*overrides):
        file = tmp_path / "run" / "checkpoints" / "last.ckpt"
        file.parent.mkdir(parents=True, exist_ok=True)
        composed = OmegaConf.to_container(config(*overrides, f"run_dir={tmp_path}/run"), resolve=True)
        torch.save({"config": composed | {"overrides": list(overrides)}, "state_dict": {}}, file)
        return file

    return save


def resumed(file, *overrides):
    """Return the config of `scripts.train ckpt_path=FILE OVERRIDES`."""
    composed = config(*command_of_run([f"ckpt_path={file}", *overrides]), "run_dir=outputs/next")
    take_saved_values(composed)
    return composed


def test_group_override_changes_only_its_group(saved):
    file = saved("data=even_pairs", "data.batch_size=7", "optim.lr=5e-4", "model=gru")
    composed = resumed(file, "logger=none", "trainer=cpu")
    assert (composed.data.task, composed.data.batch_size, composed.optim.lr) == ("even_pairs", 7, 5e-4)
    assert composed.model.mixer.function == "gru"
    assert composed.logger == {}
    assert composed.trainer.accelerator == "cpu"
    assert composed.trainer.max_steps == 250  # the experiment's value, as in the run's own command


def test_dependent_values_follow_an_override(saved):
    composed = resumed(saved("global_batch_size=512"), "trainer.max_steps=40000", "data.batch_size=32")
    assert composed.schedule.total_steps == 40_000
    assert composed.trainer.accumulate_grad_batches == 16


def test_later_overrides_take_precedence(saved):
    file = saved("model=gru", "optim.lr=1e-3", "logger=none")
    composed = resumed(file, "optim.lr=2e-3", "logger=[csv,tensorboard]")
    assert composed.optim.lr == 2e-3
    assert composed.logger.keys() == {"csv", "tensorboard"}


def test_changed_config_files_have_no_effect(saved, tmp_path):
    own = tmp_path / "configs" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    text = "# @package _global_\ndefaults: [parity]\nname: mine\noptim: {lr: LR}\ntrainer: {max_steps: STEPS}\n"
    own.write_text(text.replace("LR", "1e-4").replace("STEPS", "300"))
    file = saved(f"hydra.searchpath=[file://{tmp_path}/configs]", "experiment=mine")
    own.write_text(text.replace("LR", "3e-4").replace("STEPS", "400"))
    composed = resumed(file, "trainer.log_every_n_steps=7")
    assert (composed.optim.lr, composed.trainer.max_steps, composed.schedule.total_steps) == (1e-4, 300, 300)
    assert composed.trainer.log_every_n_steps == 7
    assert composed.run_dir == "outputs/next"
    assert resumed(file, "optim.lr=1e-5").optim.lr == 1e-5


def test_differences_are_listed(saved):
    file = saved("model=gru")
    before = torch.load(file)["config"]
    assert differences(before, resumed(file)) == []
    changed = differences(before, resumed(file, "schedule=wsd", "trainer.precision=bf16-mixed"))
    assert "  trainer.precision: 32-true in the run, bf16-mixed now" in changed
    assert "  schedule.decay_ratio: absent in the run, 0.2 now" in changed
