"""Results of the paper: training and collecting runs, and the pages made from their data."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from benchmarks import RESULTS, generation_page, layers_page, sweep_page
from reproduction import (
    ENTRIES,
    context,
    extrapolation_throughput,
    kernel_speed,
    language_model,
    loss_curves,
    record,
    state_tracking,
    text_runs,
)
from reproduction.accuracy import MODELS, SEEDS, extrapolated
from reproduction.parity import PARITY
from reproduction.result import ROOT, Options, Reproduction, paper, save, write
from reproduction.runs import LOG, Run, collect, failure, train
from reproduction.state_tracking import GRID, SELECTION_SEED, STATE_TRACKING, selected
from scripts import reproduce
from tests.tiny_runs import config
from training.configuration import titles
from training.provenance import short

H100, H200 = RESULTS / "h100", RESULTS / "h200"


def leave_run(folder, model="lstm", data="parity", seed=0, accuracies=(1.0, 0.5), chance=0.5, step=250, fitted=1.0):
    """Write the files of a run of scripts.train; without `accuracies`, those of a failed run."""
    (folder / ".hydra").mkdir(parents=True)
    choices = {"model": model, "data": data, "experiment": "parity"}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"model={model}", "ckpt_path=x"]))
    if accuracies is None:
        (folder / LOG).write_text("step 1\nerror: out of memory\n(HYDRA_FULL_ERROR=1 shows where)\n")
        return
    lengths = [[40, 63], [64, 255]]
    evaluation = {
        "task": data,
        "chance": chance,
        "parameters": 1234,
        "step": step,
        "devices": 1,
        "training_lengths": [1, 40],
        "environment": {"commit": "abc", "device": "a CPU"},
        "in_distribution": {"lengths": [1, 40], "accuracy": fitted, "sequences": 4},
        "ranges": [{"lengths": ab, "accuracy": a, "sequences": 4} for ab, a in zip(lengths, accuracies, strict=True)],
        "accuracy_by_length": {"40": 1.0, "41": 0.5, "250": 0.5},
        "config": {
            "seed": seed,
            "global_batch_size": None,
            "data": {"batch_size": 128},
            "model": {"num_heads": 1},
            "trainer": {"accumulate_grad_batches": 1},
        },
    }
    (folder / "eval.json").write_text(json.dumps(evaluation))
    (folder / "metrics.csv").write_text("step,train/step_time,train/tokens_per_second\n9,9,1\n19,2,50\n29,,\n39,1,60\n")


def rows(page):
    return [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("|")]


def test_parity_page_shows_runs_and_the_paper(tmp_path):
    leave_run(tmp_path / "runs" / "0_lstm")
    leave_run(tmp_path / "runs" / "1_lstm", seed=1, accuracies=(1.0, 1.0))
    leave_run(tmp_path / "runs" / "0_mamba", model="mamba", accuracies=(0.5, 0.5))
    leave_run(tmp_path / "runs" / "0_gru", model="gru", accuracies=None)
    options = Options(quick=True, runs=tmp_path / "runs", out=tmp_path)
    page, figure = write("parity", PARITY, PARITY.measure(options), tmp_path)
    assert rows(page)[2:] == [
        ["mamba", "1,234", "0.5000", "0.5000", "0.5000", "0 of 1", "0.56"],
        ["lstm", "1,234", "1.0000", "0.7500", "0.7777", "1 of 2", "1.00"],
    ]
    assert "error: out of memory: `model=gru`" in page.read_text()
    assert re.search(
        r"250 steps of 128 sequences of 1-40, 2 seeds \(.*lstm.* on parity\)\. By commit abc on a CPU", page.read_text()
    )
    assert "quick run" in page.read_text()
    assert figure.stat().st_size > 10_000


def test_recall_page_names_models_that_extrapolate(tmp_path):
    task = "recall_symmetric_3_8_of_16"
    for model, accuracies in {"lstm": (0.5, 0.25), "hybrid": (1.0, 1.0), "transformer": (0.5, 0.2)}.items():
        leave_run(tmp_path / "runs" / f"0_{model}", model=model, data=task, accuracies=accuracies)
    for file in tmp_path.glob("runs/*/.hydra/hydra.yaml"):
        file.write_text(file.read_text().replace("experiment: parity", "experiment: recall"))
    recall = reproduce.load("recall")
    options = Options(quick=True, runs=tmp_path / "runs", out=tmp_path)
    page, figure = write("recall", recall, recall.measure(options), tmp_path)
    assert [row[0] for row in rows(page)[2:]] == ["transformer", "lstm", "hybrid"]
    assert rows(page)[-1] == ["hybrid", "1,234", "1.0000", "1.0000", "1.0000", "1 of 1"]
    assert "Accuracy above 0.99 beyond the training lengths: hybrid." in page.read_text()
    assert figure.exists()


def test_state_tracking_page_is_a_table_of_tasks_by_models(tmp_path):
    for seed, accuracy in enumerate((1.0, 0.9)):
        leave_run(tmp_path / "runs" / f"s3_{seed}", data="s3", seed=seed, accuracies=(accuracy,) * 2, chance=1 / 6)
    leave_run(tmp_path / "runs" / "parity", model="transformer", accuracies=(0.5, 0.5))
    options = Options(runs=tmp_path / "runs", out=tmp_path)
    page, figure = write("state_tracking", STATE_TRACKING, STATE_TRACKING.measure(options), tmp_path)
    assert rows(page)[0] == ["task", "transformer", "lstm", "chance"]
    assert rows(page)[2:] == [
        ["parity", "0.500 (0/1)", "", "0.500"],
        ["s3", "", "0.950 (1/2)", "0.167"],
    ]
    assert figure.exists()


def test_state_tracking_page_shows_selected_settings_and_marks(tmp_path):
    leave_run(tmp_path / "runs" / "s3", data="s3", fitted=0.9)
    leave_run(tmp_path / "runs" / "selection", data="s3", seed=SELECTION_SEED, fitted=0.8)
    for run, own in (("s3", ""), ("selection", ", seed=100")):
        overrides = f"[model=lstm, model.num_blocks=1, model.mlp=false, optim.lr=2e-3{own}]"
        (tmp_path / "runs" / run / ".hydra" / "overrides.yaml").write_text(overrides)
    options = Options(runs=tmp_path / "runs", out=tmp_path)
    page, _ = write("state_tracking", STATE_TRACKING, STATE_TRACKING.measure(options), tmp_path)
    assert ["s3", "0.555* (0/1)", "0.500"] in rows(page)
    assert ["s3", "lstm", "1", "false", "2e-3", "0.800", "0.900", "0.555", "0 of 1"] in rows(page)


def test_tasks_that_no_selection_run_learnt_are_found():
    found = {"s3": (0.2, 0.9), "s5": (0.05, 0.06), "a5": (0.02, 0.9)}
    selections = [
        {"data": task, "in_distribution": {"accuracy": value}} for task, values in found.items() for value in values
    ]
    assert state_tracking.not_learnt(selections, {"s3": 1 / 6, "s5": 1 / 120}) == ["s5"]


def test_attention_kernels_are_counted():
    content = json.loads((H100 / "kernels_main.json").read_text())
    attention = [row for row in content["rows"] if row["implementation"] == "attention"][:3]
    content["rows"] = [
        row | {"kernel": name} for row, name in zip(attention, ("cudnn", "flash_2", "cudnn"), strict=True)
    ]
    assert kernel_speed.attention_kernels([content]) == {"cudnn": 2, "flash_2": 1}


def test_settings_with_the_best_accuracy_at_training_lengths_are_selected(tmp_path):
    candidates = [Run(tmp_path / str(k), ("data=s3", *setting)) for k, setting in enumerate(GRID)]
    assert selected(candidates) is None
    for k, accuracy in ((1, 0.5), (3, 0.9), (7, 0.9)):
        leave_run(candidates[k].folder, fitted=accuracy, accuracies=(1.0 - accuracy,) * 2)
    assert selected(candidates) == GRID[3]


def test_extrapolated_accuracy_weighs_all_lengths_equally():
    parts = [{"lengths": [40, 63], "accuracy": 1.0}, {"lengths": [64, 255], "accuracy": 0.5}]
    assert extrapolated({"ranges": parts}) == pytest.approx((24 + 192 / 2) / 216)


def test_rows_contain_overrides_and_speed(tmp_path):
    leave_run(tmp_path / "0_lstm", seed=3)
    (row,) = collect(tmp_path)
    assert row["overrides"] == ["model=lstm"]
    assert (row["seed"], row["batch_size"], row["devices"]) == (3, 128, 1)
    assert (row["step_time"], row["tokens_per_second"]) == (2.0, 50.0)


def test_batch_size_of_a_row_is_that_of_an_optimizer_step(tmp_path):
    leave_run(tmp_path / "0_lstm")
    file = tmp_path / "0_lstm" / "eval.json"
    evaluation = json.loads(file.read_text()) | {"devices": 2}
    evaluation["config"]["trainer"]["accumulate_grad_batches"] = 3
    file.write_text(json.dumps(evaluation))
    assert collect(tmp_path)[0]["batch_size"] == 768


def test_runs_are_added_to_a_file_and_replace_those_with_equal_overrides(tmp_path):
    leave_run(tmp_path / "new" / "0_lstm", seed=7)
    leave_run(tmp_path / "new" / "0_gru", model="gru")
    earlier = tmp_path / "earlier.json"
    kept = {"overrides": ["model=elman"], "model": "elman"}
    earlier.write_text(json.dumps({"runs": [kept, {"overrides": ["model=lstm"], "model": "lstm", "seed": 0}]}))
    found = collect(tmp_path / "new", earlier)
    assert found[0] == kept
    assert [(row["model"], row["seed"]) for row in found[1:]] == [("gru", 0), ("lstm", 7)]
    leave_run(tmp_path / "failed" / "0_lstm", accuracies=None)
    leave_run(tmp_path / "failed" / "1_lstm", model="mamba")
    (_, _, other) = collect(tmp_path / "failed", earlier)
    assert (other["model"], "error" in other) == ("mamba", False)  # the earlier result is kept
    with pytest.raises(ValueError, match="kernels_main"):
        collect(tmp_path / "new", H100 / "kernels_main.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity", "add_to=FILE"], "add_to: .*runs="),
        (["parity", "runs=.", "add_to=nothing.json"], r"nothing\.json"),
        (["roofline", "runs=.", "add_to=FILE"], "runs, add_to: .*language_model"),
    ],
)
def test_invalid_add_to_is_an_error(arguments, message, monkeypatch):
    file = str(RESULTS / "cpu" / "parity.json")
    monkeypatch.setattr("sys.argv", ["reproduce", *(argument.replace("FILE", file) for argument in arguments)])
    with pytest.raises(SystemExit, match=message):
        reproduce.main()


def test_collecting_other_runs_does_not_overwrite_results(tmp_path):
    leave_run(tmp_path / "runs" / "0_lstm")
    options = Options(runs=tmp_path / "runs", out=tmp_path)
    (file,) = PARITY.measure(options)
    PARITY.measure(options)
    leave_run(tmp_path / "others" / "0_gru", model="gru")
    with pytest.raises(ValueError, match=r"1 runs .*`model=lstm`"):
        PARITY.measure(Options(runs=tmp_path / "others", out=tmp_path))
    PARITY.measure(Options(runs=tmp_path / "others", add_to=file, out=tmp_path))
    assert len(json.loads(file.read_text())["runs"]) == 2


@pytest.mark.parametrize("other", [{"seed": 0}, {"seed": 1, "step": 9}], ids=["seed", "steps"])
def test_runs_of_a_row_must_differ_only_in_their_seeds(tmp_path, other):
    leave_run(tmp_path / "0_lstm")
    leave_run(tmp_path / "other", **other)
    with pytest.raises(ValueError, match=r"lstm .*parity .*`model=lstm`.*`"):
        PARITY.measure(Options(runs=tmp_path, out=tmp_path))


def test_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        collect(tmp_path)


def test_folder_without_finished_runs_is_an_error(tmp_path):
    leave_run(tmp_path / "0_gru", model="gru", accuracies=None)
    with pytest.raises(ValueError, match=rf"{tmp_path} [\s\S]*error: out of memory: `model=gru`"):
        collect(tmp_path)


def test_run_resumed_in_another_folder_is_not_a_failure(tmp_path):
    leave_run(tmp_path / "broken_off", accuracies=None)
    leave_run(tmp_path / "went_on")
    assert [row.get("error") for row in collect(tmp_path)] == [None]


def test_later_evaluations_are_ignored(tmp_path):
    leave_run(tmp_path / "0_lstm")
    later = tmp_path / "0_lstm" / "evaluate_later" / "eval.json"
    later.parent.mkdir()
    later.write_text("{}")
    assert collect(tmp_path)[0]["parameters"] == 1234


def test_runs_are_skipped_resumed_or_started(tmp_path, monkeypatch, capfd):
    commands = []

    def run(command, stdout, **_):
        commands.append(command[3:])
        stdout.write("error: no such thing\n")
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    leave_run(tmp_path / "finished")
    (tmp_path / "finished" / ".hydra" / "overrides.yaml").write_text("[name=finished, seed=1, ckpt_path=x]")
    broken_off = tmp_path / "broken_off"
    (broken_off / "checkpoints").mkdir(parents=True)
    (broken_off / "checkpoints" / "previous.ckpt").touch()  # killed after last.ckpt was moved away
    names = ("finished", "broken_off", "new")
    train([Run(tmp_path / name, (f"name={name}",)) for name in names], Options(overrides=("seed=1",)))
    assert [command[0] for command in commands] == ["name=broken_off", "name=new"]
    assert f"ckpt_path='{broken_off}'" in commands[0]
    assert not any("ckpt_path" in argument for argument in commands[1])
    assert all("seed=1" in command for command in commands)
    assert re.search("name=new .*error: no such thing", capfd.readouterr().out)


def test_run_with_other_overrides_is_an_error(tmp_path):
    leave_run(tmp_path / "0_lstm")
    with pytest.raises(ValueError, match=r"0_lstm .*`model=lstm`.*`model=lstm seed=1`"):
        train([Run(tmp_path / "0_lstm", ("model=lstm",))], Options(overrides=("seed=1",)))


def test_task_is_that_of_the_evaluation(tmp_path):
    leave_run(tmp_path / "0_lstm", data="parity")
    file = tmp_path / "0_lstm" / "eval.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task": "even_pairs"}))
    assert collect(tmp_path)[0]["data"] == "even_pairs"


@pytest.mark.parametrize(
    ("name", "what"), [("parity", "accuracies of parity"), ("loss_curves", "step times"), ("context", "step times")]
)
def test_runs_of_another_result_are_an_error(name, what, tmp_path):
    leave_run(tmp_path / "0_lstm")
    file = tmp_path / "0_lstm" / "eval.json"
    result = json.loads(file.read_text())
    del result["ranges"]
    file.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=f"{tmp_path} .*{what}"):
        reproduce.load(name).measure(Options(runs=tmp_path, out=tmp_path))


def test_run_that_failed_before_its_first_checkpoint_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    record = tmp_path / "run" / ".hydra"
    record.mkdir(parents=True)
    record.joinpath("overrides.yaml").write_text("[name=run, data.seed=1]")
    train([Run(tmp_path / "run", ("name=run",))], Options(overrides=("data.seed=2",)))
    assert (tmp_path / "run" / LOG).exists()


@pytest.mark.parametrize("wrong", ["seeds=1", "optim.lr=fast", "trainer.accelerator=gpu"])
def test_wrong_override_starts_no_run(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises((ConfigCompositionException, ValueError), match=wrong.partition("=")[0]):
        train([Run(tmp_path / "new", ("name=new",))], Options(overrides=(wrong,)))
    assert not (tmp_path / "new").exists()


def test_error_of_a_sweep_job_is_read_from_its_log(tmp_path):
    (tmp_path / "train.log").write_text("[2026-01-01][training.failed_run][ERROR] - failed\nValueError: too large\n")
    assert failure(tmp_path) == "ValueError: too large"


def test_interrupt_starts_no_further_runs(tmp_path, monkeypatch):
    begun = []

    def run(command, **_):
        begun.append(command)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.2)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        train([Run(tmp_path / str(k), ()) for k in range(20)], Options())
    assert len(begun) <= 3


@pytest.mark.slow
def test_real_run_is_collected(tmp_path):
    sizes = ("model.d_model=8", "model.num_blocks=1", "data.max_length=6", "data.eval_lengths=[6,9]")
    short = ("data.eval_batches=1", "schedule.warmup_steps=1", "trainer.max_steps=20", "trainer.accelerator=cpu")
    run = Run(tmp_path / "0_elman", ("experiment=parity", "data=s3", "model=elman", *sizes, *short))
    train([run], Options())
    assert run.finished, (run.folder / LOG).read_text()
    (row,) = collect(tmp_path)
    assert (row["experiment"], row["data"], row["model"], row["seed"], row["step"]) == ("parity", "s3", "elman", 0, 20)
    assert row["tokens_per_second"] > 0
    assert 0 <= extrapolated(row) <= 1


@pytest.mark.parametrize(
    ("name", "quick", "compiled"),
    [("parity", True, set()), ("parity", False, {"mlstm"}), ("state_tracking", False, {"mlstm"})],
)
def test_models_that_benefit_are_compiled(name, quick, compiled, monkeypatch, tmp_path):
    asked = []
    for module in ("runs", "state_tracking"):
        monkeypatch.setattr(f"reproduction.{module}.train", lambda runs, options: asked.extend(runs))
    monkeypatch.setattr("reproduction.accuracy.collect", lambda *_: [])
    reproduce.load(name).measure(Options(quick=quick, out=tmp_path))
    overrides = [dict(override.split("=") for override in run.overrides) for run in asked]
    assert {asked["model"] for asked in overrides} == set(MODELS)
    assert {asked["model"] for asked in overrides if asked["compile"] == "true"} == compiled


def test_seeds_of_a_model_train_together_on_a_gpu(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("reproduction.together.in_processes", lambda asked, number: calls.extend(asked))
    monkeypatch.setattr("reproduction.parity.made_on", lambda rows: "h100")
    monkeypatch.setattr("reproduction.accuracy.collect", lambda *_: [])
    reproduce.load("parity").measure(Options(out=tmp_path))
    of_models = [{tuple(run.overrides[2:4]) for run in call.args[0]} for call in calls]
    assert of_models == [{(f"model={model}", f"seed={seed}") for seed in SEEDS} for model in MODELS]


def test_quick_result_does_not_replace_a_full_one(tmp_path):
    file = save("parity", Options(out=tmp_path), {"runs": []})
    with pytest.raises(ValueError, match=f"{file} .*out="):
        save("parity", Options(quick=True, out=tmp_path), {"runs": []})


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("module", [language_model, loss_curves], ids=["language_model", "loss_curves"])
def test_overrides_of_language_models_are_valid(module, quick, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("reproduction.runs.train", lambda runs, options: asked.extend(runs))
    monkeypatch.setattr(module, "collect", lambda folder, *more: [])
    (file,) = reproduce.load(module.__name__.split(".")[-1]).measure(Options(quick=quick, out=tmp_path))
    assert file.stem not in titles("benchmark")  # it must not replace a benchmark's file
    assert len(asked) == len(paper("language_model") if module is language_model else loss_curves.MODELS)
    for run in asked:
        composed = config(*run.overrides, f"run_dir={run.folder}")
        OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert composed.data.context_length == (128 if quick and module is loss_curves else 1024)


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_contexts_are_trained_on_the_same_number_of_tokens(quick, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("reproduction.runs.train", lambda runs, options: asked.extend(runs))
    monkeypatch.setattr(context, "collect", lambda folder, *more: [])
    reproduce.load("context").measure(Options(quick=quick, out=tmp_path))
    composed = [config(*run.overrides, f"run_dir={run.folder}") for run in asked]
    for one in composed:
        OmegaConf.to_container(one, resolve=True, throw_on_missing=True)
    assert len({one.data.context_length * one.data.batch_size * one.trainer.max_steps for one in composed}) == 1
    assert {one.data.context_length for one in composed} == set(context.CONTEXTS)


def test_context_page_shows_perplexity_by_position(tmp_path):
    def run(model, context_length, stateful, *perplexities, seen=None, lane=None):
        losses = [math.log(perplexity) for perplexity in perplexities]
        return {
            "model": model, "overrides": [f"data.context_length={context_length}", f"data.stateful={stateful}"],
            "lane_tokens": lane, "parameters": 10**7,
            "step": 10, "step_time": 0.5, "tokens_per_second": 2e6, "perplexity": 9.0, "seed": 0,
            "context_length": context_length, "stateful": stateful, "eval_context": seen,
            "by_position": {"window": 128, "documents": 3, "losses": losses},
            "environment": {"commit": "abc", "device": "a GPU"},
        }  # fmt: skip

    runs = [
        run("lstm", 128, False, 8.0, *[6.0] * 7, *[4.0] * 8),
        run("lstm", 128, True, 8.0, *[5.0] * 7, *[2.0] * 8),
        run("lstm", 128, True, 8.0, *[5.0] * 7, *[3.0] * 8, lane=16384),
        run("transformer", 1024, False, 8.0, *[5.0] * 7, *[100.0] * 8),
        run("transformer", 1024, False, 8.0, *[5.0] * 7, *[5.0] * 8, seen=1024),
    ]
    file = tmp_path / "context.json"
    file.write_text(json.dumps({"command": "context", "quick": False, "runs": runs}))
    page, figure = write("context", reproduce.load("context"), [file], tmp_path)
    assert rows(page)[0][4:7] == ["0-127", "128-1023", "1024-2047"]
    assert [row[0] for row in rows(page)[2:]] == [
        "lstm, context 128",
        "lstm, context 128, state carried",
        "lstm, context 128, state carried over 16384 tokens",
        "transformer, context 1024",
        "transformer, context 1024, blocks apart",
    ]
    assert [row[6] for row in rows(page)[2:]] == ["4.00", "2.00", "3.00", "100.00", "5.00"]
    assert figure.exists()
    expected = "128: 4.00 without a carried state, 2.00 in one lane for each row, 3.00 in shuffled lanes"
    assert expected in context._finding(runs)


def test_over_length_page_shows_perplexity_state_and_speed(tmp_path):
    def run(model, stateful, perplexities, sizes, seen=None):
        losses = [math.log(perplexity) for perplexity in perplexities]
        return {
            "model": model, "overrides": [model, str(stateful), str(seen)], "perplexity": 9.0, "step_time": 0.5,
            "context_length": 1024, "stateful": stateful, "lane_tokens": None, "eval_context": seen,
            "by_position": {"window": 128, "documents": 3, "losses": losses, "state_mib": sizes},
            "environment": {"commit": "abc", "device": "a GPU"},
        }  # fmt: skip

    runs = [
        run("lstm", True, [8.0, *[4.0] * 15], [0.5] * 16),
        run("transformer", False, [8.0, *[5.0] * 15], list(range(1, 17))),
        run("transformer", False, [8.0, *[6.0] * 15], [1] * 16, seen=1024),
    ]
    timed = [
        {"model": "Transformer", "batch": 1, "context": 1024, "error": "out of memory"},
        {"model": "LSTM", "batch": 1, "context": 4096, "ms_per_token": 0.2, "tokens_per_s": 5000.0, "peak_mib": 13.2},
        {"model": "LSTM", "batch": 1, "context": 1024, "ms_per_token": 0.2, "tokens_per_s": 5001.0, "peak_mib": 13.1},
        {"model": "LSTM", "batch": 64, "context": 128, "ms_per_token": 0.2, "tokens_per_s": 1.0, "peak_mib": 13.2},
    ]
    files = [tmp_path / "context.json", tmp_path / "generation.json"]
    files[0].write_text(json.dumps({"command": "context", "quick": False, "runs": runs}))
    by = {"command": "generation", "commit": "abc", "machine": {"gpu": "a GPU"}, "versions": {"torch": "2"}}
    files[1].write_text(json.dumps(by | {"rows": timed}))
    page, figure = write("over_length", reproduce.load("over_length"), files, tmp_path)
    found = rows(page)
    assert found[0][1:4] == ["0-127", "128-1023", "1024-2047"]
    assert [row[1:5] for row in found[2:5]] == [
        ["8.00", "4.00", "4.00", "0.5"],
        ["8.00", "5.00", "5.00", "16"],
        ["8.00", "6.00", "6.00", "1"],
    ]
    assert [row[:3] for row in found[7:]] == [
        ["LSTM", "1,024", "5001.0"],
        ["LSTM", "4,096", "5000.0"],
        ["Transformer", "1,024", "out of memory"],
    ]
    assert figure.exists()


def test_language_model_table_shows_runs_and_the_paper():
    run = {
        "experiment": "python_160m", "model": "lstm", "num_heads": 1, "seed": 0, "devices": 1, "parameters": 190506240,
        "step": 920, "step_time": 0.1, "tokens_per_second": 327_680.0, "perplexity": 15.55, "overrides": ["seed=0"],
        "environment": {"commit": "abc", "device": "a GPU"},
    }  # fmt: skip
    run |= {"unigram_perplexity": 1000.0}
    alternating = run | {"perplexity": 15.65, "overrides": ["model.mixer.backend=cuda"], "unigram_perplexity": 1001.0}
    cudnn = run | {"model": "nn_lstm", "perplexity": 16.5, "overrides": ["seed=0"]}
    scaled = cudnn | {"perplexity": 15.75, "overrides": ["seed=0", "trainer.precision=16-mixed"]}
    broken = {
        "experiment": "python_160m",
        "model": "transformer",
        "overrides": ["model=transformer"],
        "error": "killed",
    }
    runs = [broken, run | {"seed": 1, "perplexity": 16.0}, run, alternating, cudnn, scaled]
    contents = [{"quick": True, "runs": runs}]
    _, fused, by_steps, by_cudnn, *others = language_model.LANGUAGE_MODEL.table(contents)
    assert fused[3::2] == ["190", "0.200", "1.7", "15.6 (30 M)"]  # 524,288 tokens on eight GPUs, 30,000 steps
    assert by_steps[9] == "15.7 (30 M)"
    assert by_cudnn[9] == "15.8 (30 M)"  # the run with scaled gradients
    assert all(row[3::2] == ["", "", "", ""] for row in others)
    notes = " ".join(language_model.LANGUAGE_MODEL.notes(contents))
    assert "scaled-down" in notes
    assert "killed: `model=transformer`" in notes
    assert re.search(r"`lstm, 1 head`, `nn_lstm, 1 head, trainer\.p.*model\.mixer\.backend=cuda` .*1001\.0", notes)


def test_loss_curves_of_runs_with_few_logged_steps(tmp_path):
    run = {"model": "lstm", "num_heads": 1, "seed": 0, "overrides": [], "perplexity": 9.0, "step_time": 0.1}
    for points in (3, 30):
        curve = [[10 * number, 5.0] for number in range(points)]
        loss_curves.LOSS_CURVES.draw([{"runs": [run | {"curve": curve}]}], tmp_path / "drawn.png")
        assert (tmp_path / "drawn.png").stat().st_size > 0


def test_loss_curves_of_different_texts_are_an_error(monkeypatch, tmp_path):
    run = {"perplexity": 12.5, "step_time": 0.07, "environment": {"device": "a GPU"}, "experiment": "python_160m"}
    found = [run | {"unigram_perplexity": unigram} for unigram in (1026.7, 1031.5)]
    monkeypatch.setattr(loss_curves, "collect", lambda *_: found)
    with pytest.raises(ValueError, match="text"):
        loss_curves.LOSS_CURVES.measure(Options(runs=tmp_path, out=tmp_path))
    found[0]["experiment"] = "text_tiny"
    with pytest.raises(ValueError, match=r"text_tiny.*experiment=python_160m"):
        loss_curves.LOSS_CURVES.measure(Options(runs=tmp_path, out=tmp_path))


def test_language_models_outside_of_the_table_are_an_error(monkeypatch, tmp_path):
    run = {"perplexity": 12.5, "step_time": 0.07, "model": "gru", "num_heads": 3, "overrides": [], "seed": 0}
    monkeypatch.setattr(language_model, "collect", lambda *_: [run])
    with pytest.raises(ValueError, match=str(tmp_path)):
        language_model.LANGUAGE_MODEL.measure(Options(runs=tmp_path, out=tmp_path))


def test_loss_curves_contain_only_finished_runs(tmp_path):
    finished = {
        "model": "lstm", "overrides": ["model=lstm"], "num_heads": 12, "parameters": 164553984, "step": 30,
        "perplexity": 12.5, "step_time": 0.07, "tokens_per_second": 468_000.0, "seed": 0,
        "environment": {"commit": "abc", "device": "a GPU"},
        "curve": [(step, 10.0 - step / 10) for step in range(1, 31)],
    }  # fmt: skip
    broken = {"model": "gru", "overrides": ["model=gru"], "error": "out of memory", "curve": []}
    file = tmp_path / "loss_curves.json"
    file.write_text(json.dumps({"command": "loss_curves", "quick": False, "runs": [finished, broken]}))
    page, figure = write("loss_curves", reproduce.load("loss_curves"), [file], tmp_path)
    assert rows(page)[2:] == [["lstm, 12 heads", "164.6", "30", "1.0", "12.50", "70.0", "468,000", "a GPU"]]
    assert "out of memory" in page.read_text()
    assert figure.exists()


def test_names_contain_overrides_that_are_not_shared():
    def run(model, *more, seed=0):
        return {
            "model": model,
            "num_heads": 1,
            "seed": seed,
            "overrides": [f"model={model}", "trainer.max_steps=9", *more],
        }

    half, single = "trainer.precision=bf16-mixed", "trainer.precision=32-true"
    assert text_runs.names([run("lstm", half), run("lstm", single), run("gru", single, "seed=1", seed=1)]) == [
        f"lstm, 1 head, {half}", f"lstm, 1 head, {single}", f"gru, 1 head, seed 1, {single}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sources", "number"),
    [
        ("kernel_speed", ["kernels_heads", "kernels_main"], "lstm, 12 × 64, 16, 1024"),
        ("roofline", ["kernels_heads", "kernels_batch"], "TFLOP/s"),
        ("complexity", ["kernels_length", "kernels_batch", "kernels_heads"], "exponent"),
    ],
)
def test_pages_of_stored_results(tmp_path, name, sources, number):
    files = [H200 / f"{source}.json" for source in sources]
    page, figure = write(name, reproduce.load(name), files, tmp_path)
    assert page == tmp_path / "h200" / f"{name}.md"
    assert any(number in cell for row in rows(page) for cell in row)
    assert "NVIDIA H200" in page.read_text()
    assert figure.exists()


def test_times_of_two_gpus_are_an_error(tmp_path):
    files = [H200 / "kernels_heads.json", H100 / "kernels_main.json"]
    with pytest.raises(ValueError, match="NVIDIA H100 80GB HBM3 and NVIDIA H200"):
        write("kernel_speed", reproduce.load("kernel_speed"), files, tmp_path)


def test_full_runs_take_precedence_and_ratios_of_two_runs_are_marked():
    """If several files contain a job, the full run counts. Ratios between two runs have a mark."""

    def row(name, ms, run, D=64):
        case = {"function": "lstm", "N": 768 // D, "D": D, "B": 16, "T": 1024, "dtype": "bfloat16", "mode": "forward"}
        return case | {"implementation": name, "ms": {"p50": ms}, "run": run}

    quick, careful = {"command": "kernels --quick"}, {"command": "kernels", "quick": False}
    swept = [
        row("ours", 2.0, 1),
        row("flashrnn_1.0.8", 20.0, 0),
        row("ours", 2.0, 1, 32),
        row("flashrnn_1.0.8", 9.0, 0, 32),
    ]
    main = [row("ours", 1.0, 0), row("flashrnn_1.0.8", 11.0, 0)]
    contents = [
        {"suite": "heads", "runs": [quick, quick], "rows": swept},
        {"suite": "main", "runs": [careful], "rows": main},
    ]
    _, of_main, of_two_runs = kernel_speed.KERNEL_SPEED.table(contents)
    assert of_main[2:5] == ["1.00", "11.00", "11.0"]
    assert of_two_runs[2:5] == ["2.00", "9.00", "4.5 †"]
    assert "†" in kernel_speed.KERNEL_SPEED.what


def test_short_commit_keeps_the_dirty_mark():
    assert short("a" * 40) == "a" * 12
    assert short("a" * 40 + "-dirty") == "a" * 12 + "-dirty"


def test_file_of_another_result_is_an_error(tmp_path):
    file = H100 / "numerical_error.json"
    with pytest.raises(ValueError, match=r"numerical_error.*roofline.*kernels_heads"):
        write("roofline", reproduce.load("roofline"), [file], tmp_path)


def test_missing_gpu_is_an_error_with_advice(monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce", "kernel_speed"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"error: .*NVIDIA GPU.*files="):
        reproduce.main()


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ([], "parity"),
        (["lstm"], "parity"),
        (["parity", "job=2"], "'job'"),
        (["parity", "train.model.d_model"], r"model\.d_model: expected KEY=VALUE"),
        (["kernel_speed", "train.model.d_model=8"], r"train\.KEY: .*parity"),
        (["roofline", "jobs=2"], "jobs: .*parity"),
        (["parity", "runs=x", f"files=[{__file__}]"], "runs: .*files="),
        (["parity", "quick=true", f"files={__file__}"], "quick: .*files="),
        (["parity", "runs=x", "train.seed=1", "jobs=2"], r"train\.KEY, jobs: .*runs="),
        (["parity", "jobs=0"], "jobs=0"),
        (["parity", "files=[nowhere.json]"], r"nowhere\.json"),
    ],
)
def test_useless_and_invalid_keys_are_an_error(asked, error, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce", *asked])
    with pytest.raises(SystemExit, match=error):
        reproduce.main()


def test_training_keys_are_separated_from_the_commands_keys(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        reproduce, "load", lambda name: SimpleNamespace(measure=lambda options: asked.append(options) or [])
    )
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
    monkeypatch.setattr(
        reproduce, "load", lambda name: SimpleNamespace(measure=lambda options: pytest.fail("measured"))
    )
    with pytest.raises(SystemExit, match=r"error: .*git"):
        reproduce.main()


@pytest.mark.parametrize("name", list(ENTRIES))
def test_all_names_have_a_reproduction(name):
    assert isinstance(reproduce.load(name), Reproduction)


def test_help_does_not_import_torch():
    command = [sys.executable, "-X", "importtime", "-m", "scripts.reproduce", "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


def test_help_lists_all_names(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reproduce", "--help"])
    with pytest.raises(SystemExit):
        reproduce.main()
    words = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert words[-len(ENTRIES) :] == list(ENTRIES)


@pytest.mark.parametrize("name", list(ENTRIES))
def test_paper_values_are_numbers_or_not_known(name):
    values = paper(name)
    assert values is None or values


def test_throughput_rows_combine_speed_and_accuracy():
    ranges = [{"lengths": [40, 63], "accuracy": 1.0}]
    parity = {"runs": [{"model": model, "ranges": ranges} for model in ("lstm", "elman")]}
    run = {
        "model": "lstm", "num_heads": 12, "perplexity": 10.0, "step_time": 0.07, "devices": 2,
        "tokens_per_second": 468_000.0, "environment": {"device": "a GPU"}, "seed": 0, "overrides": [],
    }  # fmt: skip
    slower = run | {"model": "nn_lstm", "num_heads": 1, "tokens_per_second": 2000.0}
    trained = {"runs": [slower, run, run | {"model": "gru"}, run | {"seed": 1, "tokens_per_second": 1.0}]}
    assert [row[:4] for row in extrapolation_throughput.rows([parity, trained])] == [
        ("LSTM, 12 heads", "lstm", 1.0, 234_000.0),
        ("nn.LSTM, 1 head", "lstm", 1.0, 1000.0),
        ("Elman", "elman", 1.0, None),
    ]
    for wrong in ([parity], [parity, trained | {"quick": True}]):
        with pytest.raises(ValueError, match="parity, loss_curves"):
            extrapolation_throughput.rows(wrong)


def test_missing_throughput_files_are_an_error_with_advice(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)parity.*files=.*h200/parity\.json,.*h200/loss_curves\.json"):
        extrapolation_throughput.EXTRAPOLATION_THROUGHPUT.measure(Options(out=tmp_path))


WRITERS = {"sweep": sweep_page.write, "layers": layers_page.write, "generation": generation_page.write}
OF_BENCHMARKS = {page for page in RESULTS.glob("*/*.md") if page.stem in WRITERS}


@pytest.mark.parametrize("page", sorted(OF_BENCHMARKS), ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_pages_of_benchmarks_are_up_to_date(page, tmp_path):
    """`python -m scripts.benchmark figures files=[FILE]` updates them."""
    made, _ = WRITERS[page.stem](Path(shutil.copy(page.with_suffix(".json"), tmp_path)))
    assert made.read_text() == page.read_text()


@pytest.mark.parametrize(
    "page", sorted(set(RESULTS.glob("*/*.md")) - OF_BENCHMARKS), ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_pages_are_up_to_date(page, tmp_path):
    """`python -m scripts.reproduce NAME files=[...]` updates them."""
    text = page.read_text()
    name = max((name for name in ENTRIES if page.stem.startswith(name)), key=len)
    files = [page.parent / file for file in re.findall(r"\[([\w.]+\.json)\]", text.split("\n\nData: ")[1])]
    write(name, replace(reproduce.load(name), draw=lambda contents, file: None), files, tmp_path)
    made = re.sub(r"\]\([^)]*/", "](", (tmp_path / page.parent.name / page.name).read_text())  # another folder
    assert made == text


FILES = sorted(RESULTS.glob("*/*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_results_have_one_clean_commit(file):
    """Only tables of kernel times may contain several commits."""
    content = json.loads(file.read_text())
    commits = record.commits(content)
    assert len(commits) == 1 or "suite" not in content
    assert not any(commit.endswith("-dirty") for commit in commits)


def test_index_lists_all_files():
    index = (RESULTS / "README.md").read_text()
    assert not [file for file in FILES if f"({file.parent.name}/{file.name})" not in index]


def test_models_of_a_task_train_together_on_a_gpu(tmp_path, monkeypatch):
    """Runs have the same files as those of scripts.train, and all seeds have the selected settings."""
    asked = []

    def trained(runs, device, drawn, beyond):
        asked.append(runs)
        for k, folder in enumerate(runs):
            (folder / "eval.json").write_text(json.dumps({"in_distribution": {"accuracy": 1 - k / 100}}))
        return {}

    monkeypatch.setattr("training.together.train_together", trained)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    models = ["lstm", "transformer"]
    state_tracking._train_task(tmp_path, "s3", models, Options(overrides=("trainer.max_steps=200",)))
    *candidates, seeds = asked
    assert [len(of_model) for of_model in candidates] == [len(GRID)] * len(models)
    assert [made.seed for made in seeds.values()] == [0, 1, 2] * len(models)
    for k, (folder, made) in enumerate(seeds.items()):
        best = next(iter(candidates[k // 3].values()))
        assert (made.model.num_blocks, made.model.mlp, made.optim.lr) == (
            *(best.model.num_blocks, best.model.mlp, best.optim.lr),
        )
        assert made.trainer.max_steps == 200
        choices = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
        assert (choices["data"], choices["model"]) == ("s3", models[k // 3])
        assert f"seed={made.seed}" in yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
