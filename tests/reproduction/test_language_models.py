"""Pages of language models: the table of the paper, loss curves, contexts, long documents and throughput."""

import json
import math
import re

import pytest
from omegaconf import OmegaConf

from reproduction import context, extrapolation_throughput, language_model, loss_curves, text_runs
from reproduction.result import Options, paper, write
from scripts import reproduce
from tests.reproduction.finished_runs import rows
from tests.tiny_runs import config
from training.configuration import titles


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
