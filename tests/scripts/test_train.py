"""Training runs: their files, resuming, and errors."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning import Callback
from omegaconf import OmegaConf

from data import tokenization
from scripts.train import train
from tests.tiny_runs import evaluate, losses, metrics
from training import checkpoint
from training.build import name_wandb_run
from training.command_line import one_line_errors


@pytest.mark.drawn
@pytest.mark.parametrize("model", ["slstm", "transformer"])
def test_parity_run_writes_all_files(tiny_config, model):
    config = tiny_config("parity", f"model={model}")
    result = train(config)
    folder = Path(config.run_dir)
    saved = json.loads((folder / "eval.json").read_text())
    assert [part["lengths"] for part in result["ranges"]] == [[6, 8], [9, 12]]
    assert saved["ranges"] == result["ranges"]
    assert saved["chance"] == 0.5
    assert saved["step"] == 8
    assert set(saved["accuracy_by_length"]) <= {str(length) for length in range(6, 13)}
    assert (folder / "accuracy.png").stat().st_size > 10_000
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert list(losses(folder)) == list(range(8))
    assert {"val/accuracy", "val/loss"} <= metrics(folder)[0].keys()
    assert not {"train/perplexity", "val/perplexity"} & metrics(folder)[0].keys()
    resolved = OmegaConf.load(folder / "config.yaml")
    assert resolved.model.vocab_size == 2
    assert resolved.schedule.total_steps == 8


def test_text_run_reports_perplexity_and_unigram_perplexity(tiny_config):
    result = train(tiny_config("text_tiny"))
    assert 1 < result["perplexity"] < 400
    assert 1 < result["unigram_perplexity"] < 400


@pytest.mark.parametrize("experiment", ["parity", "text_tiny"])
def test_run_is_resumed_exactly(tiny_config, experiment):
    """A run resumed within an epoch (text: and continued in the next one) equals an uninterrupted run."""
    keep = ["checkpoint.every_n_train_steps=3", "checkpoint.save_top_k=-1"]
    whole = tiny_config(experiment, *keep, run="whole")
    train(whole)
    whole_folder = Path(whole.run_dir)
    resumed = tiny_config(experiment, f"ckpt_path={whole_folder}/checkpoints/step_3.ckpt", run="resumed")
    train(resumed)
    resumed_folder = Path(resumed.run_dir)
    expected = {step: loss for step, loss in losses(whole_folder).items() if step >= 3}
    assert losses(resumed_folder) == expected
    ends = [checkpoint.load(checkpoint.find(str(folder))) for folder in (whole_folder, resumed_folder)]
    for name, weight in ends[0]["state_dict"].items():
        assert torch.equal(weight, ends[1]["state_dict"][name]), name


def test_metrics_of_a_run_resumed_in_its_folder(tiny_config):
    """Rows after the checkpoint, and an incomplete last row, are replaced."""
    config = tiny_config("parity", "checkpoint.every_n_train_steps=3", "checkpoint.save_top_k=-1", run="run")
    train(config)
    file = Path(config.run_dir) / "metrics.csv"
    whole = metrics(file.parent)
    file.write_text(file.read_text() + "0,1")
    config.ckpt_path = f"{config.run_dir}/checkpoints/step_6.ckpt"
    train(config)
    resumed = metrics(file.parent)
    assert [row["step"] for row in resumed] == [row["step"] for row in whole]
    assert [row["train/loss"] for row in resumed] == [row["train/loss"] for row in whole]
    shutil.rmtree(f"{config.run_dir}/checkpoints")  # killed before the first checkpoint, so it starts again
    config.ckpt_path = None
    train(config)
    assert [row["train/loss"] for row in metrics(file.parent)] == [row["train/loss"] for row in whole]


class Positions(Callback):
    of_steps: ClassVar[list[int]] = []  # samples consumed before each step

    def on_before_optimizer_step(self, trainer, *_):
        self.of_steps.append(trainer.datamodule._position)


@pytest.mark.parametrize(
    ("experiment", "accumulated"),
    [
        ("parity", 2),
        ("text_tiny", 3),
        pytest.param("parity", 3, marks=pytest.mark.slow),
        pytest.param("text_tiny", 2, marks=pytest.mark.slow),
    ],
)
def test_resumed_run_may_accumulate(tiny_config, experiment, accumulated):
    """All steps after the checkpoint have equally many batches, also across epochs."""
    size, changes = 4, ["data.batch_size=4", "data.context_length=64"] if experiment == "text_tiny" else []
    first = tiny_config(experiment, *changes, "trainer.max_steps=3", "schedule.total_steps=40", run="first")
    train(first)
    more = [f"global_batch_size={size * accumulated}", "trainer.max_steps=18", f"ckpt_path={first.run_dir}"]
    config = tiny_config(experiment, *changes, *more, "schedule.total_steps=40", run="second")
    config.callbacks = {"positions": {"_target_": f"{__name__}.Positions"}}
    Positions.of_steps.clear()
    train(config)
    assert len(Positions.of_steps) == 15
    assert {after - before for before, after in itertools.pairwise(Positions.of_steps)} == {size * accumulated}


def test_validation_steps_do_not_depend_on_accumulation(tiny_config):
    options = ["val_every=4", "schedule.total_steps=40"]
    first = tiny_config("parity", *options, "global_batch_size=12", "trainer.max_steps=4", run="first")
    train(first)
    more = ["global_batch_size=16", "trainer.max_steps=16", f"ckpt_path={first.run_dir}"]
    second = tiny_config("parity", *options, *more, run="second")
    train(second)
    assert [int(row["step"]) for row in metrics(Path(second.run_dir)) if row["val/loss"]] == [7, 11, 15]


class Stop(Callback):
    """Requests a stop within an optimizer step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= batch_idx == 9


def test_stop_request_completes_the_step(tiny_config):
    config = tiny_config("parity", "global_batch_size=16")
    config.callbacks = {"stop": {"_target_": f"{__name__}.Stop"}}
    train(config)
    saved = checkpoint.load(checkpoint.find(config.run_dir))
    assert (saved["global_step"], saved["StateTracking"]["position"]) == (3, 3 * 16)


def test_run_killed_during_evaluation_is_evaluated_when_resumed(tiny_config):
    config = tiny_config("parity", run="run")
    result = train(config)
    file = Path(config.run_dir) / "eval.json"
    whole = json.loads(file.read_text())
    file.unlink()
    config.ckpt_path = "last"
    assert train(config) == result
    again = json.loads(file.read_text())
    assert (again["step"], again["ranges"]) == (whole["step"], whole["ranges"])
    with pytest.raises(ValueError, match=r"trainer\.max_steps=8"):
        train(config)


def test_resumed_run_uses_its_tokenizer(tiny_config, change_texts, tmp_path):
    train(tiny_config("text_tiny", "schedule.total_steps=20", run="first"))
    change_texts()
    runs = tmp_path / "outputs" / "text_tiny"
    for steps, before in ((9, "first"), (10, "second")):
        resume = ["schedule.total_steps=20", f"trainer.max_steps={steps}", f"ckpt_path={runs}/{before}"]
        train(tiny_config("text_tiny", *resume, run="second"))
    first, second = (runs / run / "tokenizer" / "tokenizer.json" for run in ("first", "second"))
    assert first.read_text() == second.read_text()
    assert {file.read_text() for file in tmp_path.glob("corpora/*/tokenizer/tokenizer.json")} == {first.read_text()}


def test_resuming_with_another_tokenizer_is_an_error(trained, tiny_config):
    other = ["data.tokenizer=bpe:333", "trainer.max_steps=12", f"ckpt_path={trained[0].run_dir}"]
    with pytest.raises(ValueError, match=r"data\.tokenizer=bpe:333: .*bpe:300"):
        train(tiny_config("text_tiny", f"data.source={trained[0].data.source}", "schedule.total_steps=20", *other))


def test_resuming_with_the_data_of_another_experiment_is_an_error(trained, tiny_config):
    with pytest.raises(ValueError, match=r"data\._target_=data\.state_.*data\.text\.Text"):
        train(tiny_config("parity", f"ckpt_path={trained[0].run_dir}"))


@pytest.mark.parametrize(
    ("experiment", "change"),
    [("parity", "data.task=even_pairs"), ("text_tiny", "data.context_length=4"), ("text_tiny", "data.max_bytes=99")],
)
def test_resuming_with_incompatible_data_is_an_error(trained, trained_parity, tiny_config, experiment, change):
    config, _ = trained if experiment == "text_tiny" else trained_parity
    with pytest.raises(ValueError, match=rf"{change}: .*trained with"):
        train(tiny_config(experiment, change, f"ckpt_path={config.run_dir}"))


def test_resumed_run_prints_config_changes(trained_parity, tiny_config, capsys):
    config, _ = trained_parity
    capsys.readouterr()
    changes = ["trainer.max_steps=9", "data.batch_size=8", "logger=none", f"ckpt_path={config.run_dir}"]
    train(tiny_config("parity", "schedule.total_steps=20", *changes))
    resuming, *printed = capsys.readouterr().out.splitlines()
    assert resuming == f"resuming from {config.run_dir}/checkpoints/last.ckpt"
    assert printed[:2] == [
        "  data.batch_size: 4 in the run, 8 now",
        "  logger.csv._target_: training.metrics_file.MetricsFile in the run, absent now",
    ]
    assert "  trainer.max_steps: 8 in the run, 9 now" in printed
    assert not any("run_dir" in line or "dirpath" in line for line in printed)


def test_restarted_run_trains_its_own_tokenizer(tiny_config, change_texts, tmp_path):
    texts = []
    for _ in range(2):
        config = tiny_config("text_tiny", run="same")
        train(config)
        shutil.rmtree(f"{config.run_dir}/checkpoints")  # as if killed before the first checkpoint
        texts.append((Path(config.run_dir) / "tokenizer" / "tokenizer.json").read_text())
        assert texts[-1] in {file.read_text() for file in tmp_path.glob("corpora/*/tokenizer/tokenizer.json")}
        change_texts()
    assert texts[0] != texts[1]


def test_resumed_run_uses_the_optimizer_of_its_overrides(trained_parity, tiny_config):
    changed = ["optim.lr=1e-4", "schedule.final_lr_ratio=1", "optim.weight_decay=0.5", "optim.betas=[0.5,0.6]"]
    before = f"ckpt_path={trained_parity[0].run_dir}"
    config = tiny_config("parity", "schedule.total_steps=20", "trainer.max_steps=12", before, *changed)
    train(config)
    rates = [float(row["train/lr"]) for row in metrics(Path(config.run_dir)) if row["train/lr"]]
    assert rates == pytest.approx([1e-4] * 4)
    matrices, others = checkpoint.load(checkpoint.find(config.run_dir))["optimizer_states"][0]["param_groups"]
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert tuple(matrices["betas"]) == (0.5, 0.6)


@pytest.mark.parametrize(
    "end",
    [
        ("trainer.max_epochs=1", "+trainer.limit_train_batches=5"),
        ("+trainer.max_time=00:00:00:01", "trainer.max_steps=1000000", "schedule.total_steps=1000000"),
        ("checkpoint.save_last=false",),
        (
            "checkpoint.every_n_train_steps=1000",
            "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
            *("+callbacks.stop.monitor=val/loss", "+callbacks.stop.patience=1", "+callbacks.stop.min_delta=100"),
            *("trainer.max_steps=1000000", "schedule.total_steps=1000000"),
        ),
    ],
    ids=["epochs", "time", "steps", "validation"],
)
def test_last_step_is_saved_for_all_ends_of_training(tiny_config, end):
    config = tiny_config("parity", "checkpoint.every_n_train_steps=4", *end)
    train(config)
    folder = Path(config.run_dir)
    step = json.loads((folder / "eval.json").read_text())["step"]
    assert checkpoint.load(folder / "checkpoints" / "last.ckpt")["global_step"] == step > 0


def test_checkpoints_every_n_epochs(tiny_config):
    by_epochs = ["checkpoint.every_n_train_steps=null", "+checkpoint.every_n_epochs=1", "checkpoint.save_top_k=-1"]
    config = tiny_config("parity", *by_epochs)
    train(config)
    assert len(list(Path(config.run_dir).glob("checkpoints/step_*.ckpt"))) == 2


def test_monitor_of_step_checkpoints_is_an_error():
    with pytest.raises(ValueError, match=r"checkpoint\.monitor=val/loss"):
        checkpoint.StepCheckpoint(monitor="val/loss")


def test_last_run_can_be_lengthened(tiny_config):
    train(tiny_config("parity", "schedule.total_steps=20", run="first"))
    longer = tiny_config("parity", "schedule.total_steps=20", "trainer.max_steps=12", "ckpt_path=last", run="second")
    train(longer)
    assert list(losses(Path(longer.run_dir))) == [8, 9, 10, 11]


def test_folder_of_another_run_is_not_overwritten(tiny_config):
    whole = ["schedule.total_steps=20", "val_every=2"]
    config = tiny_config("parity", *whole)
    train(config)
    made = {file: file.read_bytes() for file in Path(config.run_dir).rglob("*") if file.is_file()}
    train(tiny_config("parity", *whole, run="other"))
    for resumed in ([], [f"ckpt_path={Path(config.run_dir).parent}/other"]):
        with pytest.raises(FileExistsError, match=rf"ckpt_path={config.run_dir} "):
            train(tiny_config("parity", *whole, "trainer.max_steps=12", *resumed))
    assert {file: file.read_bytes() for file in made} == made
    train(tiny_config("parity", *whole, "trainer.max_steps=12", f"ckpt_path={config.run_dir}"))
    assert list(losses(Path(config.run_dir))) == list(range(12))


def test_run_can_be_resumed_with_another_backend(trained_parity, tiny_config):
    more = [f"ckpt_path={trained_parity[0].run_dir}", "trainer.max_steps=9", "model.mixer.backend=vanilla"]
    train(tiny_config("parity", "schedule.total_steps=20", *more))


def test_resuming_another_model_is_an_error(trained_parity, tiny_config):
    with pytest.raises(ValueError, match=r"\n  model\.d_model: 8 .*16 "):
        train(tiny_config("parity", f"ckpt_path={trained_parity[0].run_dir}", "model.d_model=16"))


def test_resuming_with_another_val_fraction_is_an_error(trained, tiny_config):
    config, _ = trained
    longer = [f"data.source={config.data.source}", "trainer.max_steps=12", f"ckpt_path={config.run_dir}"]
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.5"):
        train(tiny_config("text_tiny", "schedule.total_steps=20", *longer, "data.val_fraction=0.5"))
    assert not Path("corpora").exists()  # the error comes before data is prepared


def test_resuming_a_finished_run_is_an_error(tiny_config):
    train(tiny_config("parity", run="first"))
    with pytest.raises(ValueError, match=r"step 8.*trainer\.max_steps=8"):
        train(tiny_config("parity", "ckpt_path=last", run="second"))


def test_resuming_without_a_run_is_an_error(tiny_config):
    with pytest.raises(FileNotFoundError, match="ckpt_path=last"):
        train(tiny_config("parity", "ckpt_path=last"))


def test_vocabulary_smaller_than_the_data_is_an_error(tiny_config):
    with pytest.raises(ValueError, match=r"model\.vocab_size=1.* 2"):
        train(tiny_config("parity", "model.vocab_size=1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("global_batch_size=101", r"global_batch_size=101 .*data\.batch_size=4 x .* = 4"),
        ("val_every=0", "val_every .*0"),
        ("threads=0", "threads=0"),
        ("matmul_precision=tf32", "matmul_precision=tf32.* high"),
        ("trainer.precision=16-mixed", r"trainer\.precision=16-mixed .*bf16-mixed or 32-true"),
        ("trainer.strategy=fsdp", r"trainer\.strategy=fsdp"),
        ("trainer.limit_val_batches=0", r"trainer\.limit_val_batches=0"),
        ("trainer.gradient_clip_val=-1", r"trainer\.gradient_clip_val=-1"),
        ("+trainer.limit_test_batches=0", r"trainer\.limit_test_batches=0"),
        ("trainer.strategy=ddp_spawn", r"trainer\.strategy=ddp_spawn"),
        ("trainer.accelerator=gpu", "gpu"),
        ("+trainer.overfit_batches=1", r"trainer\.overfit_batches"),
        ("+trainer.default_root_dir=x", r"trainer\.default_root_dir .*hydra\.run\.dir="),
        ("model.mixer._target_=models.mixers.Nope", r"models\.mixers\.Nope"),
        ("seed=-1", "-1 "),
        ("optim.betas=[0.9]", r"betas=\[0\.9\]"),
        ("data.eval_lengths=[6.5,9]", r"eval_lengths=\[6\.5, 9\]"),
    ],
)
def test_mistakes_are_errors_with_one_line(tiny_config, monkeypatch, override, message):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit, match=f"^error: .*{message}.*\n.*HYDRA_FULL_ERROR=1.*$"), one_line_errors():
        train(tiny_config("parity", override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=rnn", r"model\.mixer\.function=VALUE"),
        ("model.d_model=null", r"models\.backbone\.SequenceModel.* full_key: model"),
        ("+callbacks.rate=lightning.Callback", "type str"),
        ("model.d_model=-8", "d_model=-8"),
        ("model.num_heads=3", "num_heads=3 .* d_model=8"),
        ("model.embedding_std=-1", "embedding_std=-1"),
        ("data.tokenizer=bpe:many", "'bpe:many'"),
        ("trainer.precision=half", "'half'"),
        ("+callbacks.rate._target_=lightning.Nope", r"lightning\.Nope"),
        ("optim._target_=torch.optim.SGD", r"optim: .* ~optim\.KEY"),
        ("trainer.max_steps=0", r"total_steps=0 .* trainer\.max_steps"),
        ("schedule.warmup_steps=200", r"warmup_steps=200 .* total_steps=8"),
    ],
)
def test_model_and_optimizer_are_checked_before_data(tiny_config, tmp_path, monkeypatch, override, message):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"), one_line_errors():
        train(tiny_config("text_tiny", override))
    assert not (tmp_path / "corpora").exists()


def test_model_without_resets_on_packed_text_is_an_error(tiny_config, tmp_path):
    with pytest.raises(ValueError, match=r"data\.reset_at_documents=true"):
        train(tiny_config("text_tiny", "model=nn_lstm", "data.reset_at_documents=true"))
    assert not (tmp_path / "corpora").exists()


def test_last_run_with_a_numeric_name(tiny_config):
    train(tiny_config("parity", "name=2026"))
    with pytest.raises(FileNotFoundError, match="outputs/2026"):
        train(tiny_config("parity", "name=2026", "ckpt_path=last", run="next"))


def test_diverging_run_is_an_error(tiny_config):
    with pytest.raises(FloatingPointError, match=r"nan .*optim\.lr"):
        train(tiny_config("parity", "optim.lr=1e38", "trainer.gradient_clip_val=null"))


def test_accumulation_consumes_more_batches_per_step(tiny_config):
    config = tiny_config("parity", "global_batch_size=12")
    assert config.trainer.accumulate_grad_batches == 3
    train(config)
    assert [int(row["step"]) for row in metrics(Path(config.run_dir)) if row["val/loss"]] == [3, 7]
    assert checkpoint.load(checkpoint.find(config.run_dir))["StateTracking"]["position"] == 8 * 12


@pytest.fixture
def _without_wandb_key(monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    import wandb  # slow

    wandb.setup()  # reads the environment, once for all tests of a process


@pytest.mark.usefixtures("_without_wandb_key")
def test_wandb_without_a_key_is_offline_and_checkpoints_contain_its_id(tiny_config):
    config = tiny_config("parity", "logger=wandb", "+logger.wandb.tags=[a,b]")
    train(config)
    (file,) = Path(config.run_dir).glob("wandb/offline-run-*/*.wandb")
    saved = checkpoint.load(checkpoint.find(config.run_dir))["config"]
    assert saved["logger"]["wandb"]["id"] == file.parent.name.rpartition("-")[2]


def test_resumed_run_keeps_its_wandb_run(tiny_config):
    first = tiny_config("parity", "logger=wandb")
    name_wandb_run(first.logger, {})
    again = tiny_config("parity", "logger=[csv,wandb]")
    name_wandb_run(again.logger, OmegaConf.to_container(first.logger))
    assert again.logger.wandb.id == first.logger.wandb.id is not None
    other = tiny_config("parity", "logger=wandb", "logger.wandb.id=mine")
    name_wandb_run(other.logger, OmegaConf.to_container(first.logger))
    assert other.logger.wandb.id == "mine"
    name_wandb_run(tiny_config("parity").logger, OmegaConf.to_container(first.logger))


def test_changed_tokenizer_folder_does_not_affect_a_run(tiny_config, tmp_path):
    """Resuming and evaluation read the copy in the folder of the run."""
    trained = [tmp_path / f"bpe_{size}" for size in (300, 280)]
    texts = [file.read_text() for file in tmp_path.glob("texts/*.txt")]
    for folder, size in zip(trained, (300, 280), strict=True):
        tokenization.train(texts, size).save_pretrained(folder)
    named = shutil.copytree(trained[0], tmp_path / "named")
    config = tiny_config("text_tiny", f"data.tokenizer={named}", "schedule.total_steps=20", run="first")
    result = train(config)
    shutil.copytree(trained[1], named, dirs_exist_ok=True)
    assert evaluate(config.run_dir) == pytest.approx(result)
    longer = ["schedule.total_steps=20", "trainer.max_steps=9", f"ckpt_path={config.run_dir}"]
    second = tiny_config("text_tiny", f"data.tokenizer={named}", *longer, run="second")
    train(second)
    files = (trained[0] / "tokenizer.json", Path(second.run_dir) / "tokenizer" / "tokenizer.json")
    assert files[0].read_text() == files[1].read_text()


def test_resumed_run_prepares_its_tokens_once(tiny_config, tmp_path):
    """The cache key does not depend on where and when the run's copy of the tokenizer was written."""
    for step in (4, 6):
        resume = [f"ckpt_path={tmp_path}/outputs/text_tiny/run"] if step > 4 else []
        train(tiny_config("text_tiny", "schedule.total_steps=20", f"trainer.max_steps={step}", *resume))
        (prepared,) = tmp_path.glob("corpora/*/manifest.json")
        shutil.rmtree(prepared.parents[1])


def test_options_of_pytorch_and_lightning(tiny_config):
    """Optimizer options, callbacks, another progress bar, and a profiler."""
    callbacks = "lightning.pytorch.callbacks"
    profiler = {"_target_": "lightning.pytorch.profilers.SimpleProfiler", "dirpath": "profiles", "filename": "simple"}
    options = [f"+callbacks.bar._target_={callbacks}.RichProgressBar", "trainer.enable_progress_bar=true"]
    options += [f"+callbacks.rate._target_={callbacks}.LearningRateMonitor", "+optim.fused=false"]
    config = tiny_config("parity", *options, *(f"+trainer.profiler.{key}={value}" for key, value in profiler.items()))
    train(config)
    groups = checkpoint.load(checkpoint.find(config.run_dir))["optimizer_states"][0]["param_groups"]
    assert not any(group["fused"] for group in groups)
    rows = metrics(Path(config.run_dir))
    assert any(row.get("lr-AdamW/pg1") for row in rows)
    assert "train_dataloader_next" in Path("profiles", "fit-simple.txt").read_text()
    assert any(float(row["train/data_wait"] or 0) > 0 for row in rows)


def test_callback_that_monitors_an_unknown_value_is_an_error(tiny_config, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    stop = "+callbacks.stop={_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/nothing}"
    with pytest.raises(SystemExit, match=r"`val/nothing` .*`val/loss`"), one_line_errors():
        train(tiny_config("parity", stop))


@pytest.mark.usefixtures("_without_wandb_key")
def test_wrong_wandb_key_is_an_error(tiny_config, monkeypatch, tmp_path):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "too-short")
    with pytest.raises(SystemExit, match=r"WANDB_API_KEY .*WANDB_MODE=offline"), one_line_errors():
        train(tiny_config("parity", "logger=wandb"))


def test_training_without_a_logger(tiny_config):
    config = tiny_config("parity", "logger=none")
    assert not math.isnan(train(config)["ranges"][0]["accuracy"])
    assert not (Path(config.run_dir) / "metrics.csv").exists()
