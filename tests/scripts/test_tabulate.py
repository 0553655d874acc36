"""The table says what the evaluations of a multirun say."""

import json

import pytest

from scripts.tabulate import main


def evaluation(accuracies):
    lengths = [[6, 8], [9, 12]]
    return {
        "task": "parity",
        "chance": 0.5,
        "parameters": 1234,
        "seconds": 5.4,
        "training_lengths": [1, 6],
        "ranges": [{"lengths": ab, "accuracy": a, "sequences": 4} for ab, a in zip(lengths, accuracies, strict=True)],
        "environment": {"torch": "2.13.0"},
        "config": {"seed": 0},
    }


def test_table_of_a_sweep(tmp_path):
    (tmp_path / "multirun.yaml").write_text("hydra: {overrides: {task: ['model=lstm,gru', seed=0]}}")
    for name, accuracies in {"0_lstm": (1.0, 0.75), "10_elman": (1.0, 1.0), "2_gru": (0.5, 0.25)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.json").write_text(json.dumps(evaluation(accuracies)))
    main(str(tmp_path), str(tmp_path / "table"))
    text = (tmp_path / "table.md").read_text()
    assert "python -m scripts.train -m model=lstm,gru seed=0" in text
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| lstm | 1,234 | 0 | 1.0000 | 0.7500 | 0.50 | 5 |",
        "| gru | 1,234 | 0 | 0.5000 | 0.2500 | 0.50 | 5 |",
        "| elman | 1,234 | 0 | 1.0000 | 1.0000 | 0.50 | 5 |",
    ]
    assert [run["model"] for run in json.loads((tmp_path / "table.json").read_text())["runs"]] == [
        "lstm",
        "gru",
        "elman",
    ]


def test_not_a_sweep(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*/eval.json in .*: expected the folder of a finished -m run"):
        main(str(tmp_path), str(tmp_path / "table"))
