"""Finished runs are collected, added to earlier results, and stored."""

import json

import pytest

from benchmarks import RESULTS
from reproduction.parity import PARITY
from reproduction.result import Options, save
from reproduction.runs import collect, failure
from scripts import reproduce
from tests.reproduction.finished_runs import leave_run


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
        collect(tmp_path / "new", RESULTS / "h100" / "kernels_main.json")


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


def test_error_of_a_sweep_job_is_read_from_its_log(tmp_path):
    (tmp_path / "train.log").write_text("[2026-01-01][training.failed_run][ERROR] - failed\nValueError: too large\n")
    assert failure(tmp_path) == "ValueError: too large"


def test_quick_result_does_not_replace_a_full_one(tmp_path):
    file = save("parity", Options(out=tmp_path), {"runs": []})
    with pytest.raises(ValueError, match=f"{file} .*out="):
        save("parity", Options(quick=True, out=tmp_path), {"runs": []})
