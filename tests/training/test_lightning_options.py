"""Features of Lightning work, also in resumed runs."""

import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.train import train
from tests.tiny_runs import evaluate, losses, metrics
from training import checkpoint
from training.averaging import MovingAverage
from training.process import prepare_process

KEEP = ["checkpoint.every_n_train_steps=3", "checkpoint.save_top_k=-1"]


def test_weight_averaging_is_evaluated_saved_and_resumed(tiny_config):
    average = ["callbacks=ema", "callbacks.ema.decay=0.5"]
    whole = tiny_config("parity", *KEEP, *average, run="whole")
    result = train(whole)
    assert evaluate(whole.run_dir) == result
    middle = f"{whole.run_dir}/checkpoints/step_3.ckpt"
    resumed = tiny_config("parity", *average, f"ckpt_path={middle}", run="resumed")
    assert train(resumed) == result
    assert losses(Path(resumed.run_dir)) == {n: loss for n, loss in losses(Path(whole.run_dir)).items() if n >= 3}
    ends = [torch.load(checkpoint.find(config.run_dir)) for config in (whole, resumed)]
    for name in ends[0]["state_dict"]:
        for key in ("state_dict", "current_model_state"):
            assert torch.equal(ends[0][key][name], ends[1][key][name])
    weight = "model.head.weight"
    assert not torch.equal(ends[0]["state_dict"][weight], ends[0]["current_model_state"][weight])
    without = tiny_config("parity", run="without")
    train(without)
    assert losses(Path(without.run_dir)) == losses(Path(whole.run_dir))  # averaging does not change steps


def test_weight_averaging_of_sharded_weights_is_an_error():
    class Sharded:
        strategy = torch.nn.Module()

    from lightning.pytorch.strategies import ModelParallelStrategy

    Sharded.strategy = ModelParallelStrategy.__new__(ModelParallelStrategy)
    with pytest.raises(ValueError, match="callbacks=ema"):
        MovingAverage().setup(Sharded, torch.nn.Module(), "fit")


def rates(config):
    return [float(row["train/lr"]) for row in metrics(Path(config.run_dir)) if row["train/lr"]]


def test_learning_rate_finder_sets_the_rate_of_the_run(tiny_config, capsys):
    finder = ["callbacks=lr_finder", "callbacks.lr_finder.num_training_steps=30", "schedule=none"]
    config = tiny_config("parity", *finder, run="first")
    train(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("callbacks=lr_finder")]
    found = OmegaConf.load(Path(config.run_dir) / "config.yaml").optim.lr
    assert line == f"callbacks=lr_finder: optim.lr={found:.3g}"
    assert found != config.optim.lr
    assert rates(config) == pytest.approx([found] * 8)
    assert list(losses(Path(config.run_dir))) == list(range(8))  # the search is not logged
    longer = ["trainer.max_steps=9", f"optim.lr={found}", f"ckpt_path={config.run_dir}"]
    resumed = tiny_config("parity", *finder, *longer, run="second")
    train(resumed)
    assert "callbacks=lr_finder" not in capsys.readouterr().out
    assert rates(resumed) == pytest.approx([found])


def test_several_loggers(tiny_config):
    config = tiny_config("parity", "logger=[csv,tensorboard]", "callbacks=[lr_monitor,early_stopping]")
    train(config)
    written = EventAccumulator(f"{config.run_dir}/tensorboard").Reload()
    shown = {event.step: event.value for event in written.Scalars("train/loss")}
    assert shown == pytest.approx({step: float(loss) for step, loss in losses(Path(config.run_dir)).items()})
    assert "lr-AdamW/pg1" in written.Tags()["scalars"]


def test_logger_without_a_name_is_an_error(tiny_config):
    with pytest.raises(ValueError, match=r"logger\._target_=a\.Logger"):
        train(tiny_config("parity", "logger=none", "+logger._target_=a.Logger"))


@pytest.mark.parametrize("debug", ["fdr", "limit", "profiler"])
def test_debug_configs(tiny_config, debug):
    assert 0 <= train(tiny_config("parity", f"debug={debug}", "trainer.accelerator=cpu"))["accuracy"] <= 1


def test_matmul_precision(tiny_config):
    before = torch.get_float32_matmul_precision()
    try:
        train(tiny_config("parity", "matmul_precision=high"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_profiler_reports_once(monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [])  # as if Hydra configured it
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    prepare_process(None)
    shown, handler = [], logging.Handler(logging.INFO)
    handler.emit = lambda record: shown.append(record.getMessage())
    for name in (None, "lightning"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    profiler = SimpleProfiler()
    with profiler.profile("a step"):
        pass
    profiler.describe()
    assert ["a step" in text for text in shown] == [True]


def test_lines_instead_of_a_progress_bar(tiny_config, capsys):
    config = tiny_config("text_tiny", "trainer.enable_progress_bar=true", "logger=none")
    train(config)
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines() if line.startswith("step ")]
    assert [(line[1], line[2]) for line in lines if line[2] == "val"] == [("4/8", "val"), ("8/8", "val")]
    assert [line[1] for line in lines if line[2] == "train"] == [f"{step}/8" for step in range(1, 9)]
    assert {"loss", "perplexity", "lr", "tokens_per_second"} <= set(lines[0])
    assert "SequenceModel: " in out
    assert " parameters" in out
    assert "it/s" not in out + err
    assert not Path(config.run_dir, "samples.txt").exists()
