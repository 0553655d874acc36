"""Pages of accuracies: parity, recall and state tracking."""

import json
import re

import pytest
import yaml

from reproduction import state_tracking
from reproduction.accuracy import MODELS, SEEDS, extrapolated
from reproduction.parity import PARITY
from reproduction.result import Options, write
from reproduction.runs import Run
from reproduction.state_tracking import GRID, SELECTION_SEED, STATE_TRACKING, selected
from scripts import reproduce
from tests.reproduction.finished_runs import leave_run, rows


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
    assert rows(page)[2:] == [["parity", "0.500 (0/1)", "", "0.500"], ["s3", "", "0.950 (1/2)", "0.167"]]
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


def test_settings_with_the_best_accuracy_at_training_lengths_are_selected(tmp_path):
    candidates = [Run(tmp_path / str(k), ("data=s3", *setting)) for k, setting in enumerate(GRID)]
    assert selected(candidates) is None
    for k, accuracy in ((1, 0.5), (3, 0.9), (7, 0.9)):
        leave_run(candidates[k].folder, fitted=accuracy, accuracies=(1.0 - accuracy,) * 2)
    assert selected(candidates) == GRID[3]


def test_extrapolated_accuracy_weighs_all_lengths_equally():
    parts = [{"lengths": [40, 63], "accuracy": 1.0}, {"lengths": [64, 255], "accuracy": 0.5}]
    assert extrapolated({"ranges": parts}) == pytest.approx((24 + 192 / 2) / 216)


@pytest.mark.parametrize("other", [{"seed": 0}, {"seed": 1, "step": 9}], ids=["seed", "steps"])
def test_runs_of_a_row_must_differ_only_in_their_seeds(tmp_path, other):
    leave_run(tmp_path / "0_lstm")
    leave_run(tmp_path / "other", **other)
    with pytest.raises(ValueError, match=r"lstm .*parity .*`model=lstm`.*`"):
        PARITY.measure(Options(runs=tmp_path, out=tmp_path))


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
