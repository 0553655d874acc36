"""The benchmark of text generation with small models: rows, page, figure, and resuming."""

import json
import sys

import pytest

from benchmarks import generation, generation_page, results
from scripts import benchmark

SMALL = {"vocab_size": 20, "d_model": 8, "num_blocks": 2}


@pytest.fixture
def small(monkeypatch):
    models = {name: model._replace(heads=1) for name, model in generation.CPU_MODELS.items()}
    monkeypatch.setattr(generation, "CPU_MODELS", models)
    monkeypatch.setattr(generation, "SMALL", SMALL)
    monkeypatch.setattr(generation, "NEW_TOKENS", 4)
    monkeypatch.setattr(generation.torch, "set_num_threads", lambda number: None)


@pytest.fixture
def run(small, monkeypatch, tmp_path):
    def run():
        arguments = ["generation", f"out={tmp_path}", "commit=abc", "contexts=[4,64]"]
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        benchmark.main()
        return json.loads((tmp_path / "cpu" / "generation.json").read_text())

    return run


@pytest.mark.slow
def test_memory_and_speed_by_context(run, tmp_path):
    rows = {(row["model"], row["context"]): row for row in run()["rows"]}
    assert set(rows) == {(model, context) for model in generation.CPU_MODELS for context in (4, 64)}
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(1000 / row["ms_per_token"], rel=0.01)
    assert rows["LSTM", 4]["cache_mib"] == rows["LSTM", 64]["cache_mib"]
    # Keys and values of width 8 in 2 blocks for all tokens but the last, which is not read.
    assert rows["Transformer", 64]["cache_mib"] == pytest.approx(2 * 67 * (2 * 8) * 4 / 2**20, abs=1e-4)
    assert (tmp_path / "cpu" / "generation.png").stat().st_size > 10_000
    assert "| LSTM | 1 | 64 |" in (tmp_path / "cpu" / "generation.md").read_text()


def test_interrupted_run_is_resumed(run, monkeypatch):
    measured = []

    def measure(case, bandwidth):
        measured.append(case)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return {"ms_per_token": 1.0, "tokens_per_s": 1000.0, "first_token_s": 1.0}

    monkeypatch.setattr(generation, "measure", measure)
    with pytest.raises(SystemExit):
        run()
    assert len(run()["rows"]) == 6
    assert len(measured) == 3 + 4


def test_rows_of_another_commit_are_measured_again(tmp_path):
    results.write(tmp_path / "a.json", "what", "abc", [{"model": "sLSTM"}])
    (tmp_path / "a.json").rename(tmp_path / "a.partial.json")
    assert results.rows_before(tmp_path / "a.json", "abc") == [{"model": "sLSTM"}]
    content = json.loads((tmp_path / "a.partial.json").read_text()) | {"rows": [{"model": "LSTM"}]}
    (tmp_path / "a.partial.json").write_text(json.dumps(content))
    assert results.rows_before(tmp_path / "a.json", "abc") == [{"model": "LSTM"}]
    assert results.rows_before(tmp_path / "a.json", "def") == []


def test_llama_has_as_many_parameters_as_our_transformer(monkeypatch):
    monkeypatch.setattr(generation, "LARGE", {"vocab_size": 100, "d_model": 48, "num_blocks": 2})
    config = generation._llama_config(generation.LARGE, 12)
    assert 3 * config.hidden_size * config.intermediate_size == 8 * 48 * 48


def test_page_compares_with_llama(tmp_path):
    row = {"first_token_s": 0.1, "peak_mib": 1.0, "reading_ms": 0.06}
    cases = generation.cases(gpu=True)
    assert {case.model for case in cases} == set(generation.GPU_MODELS)
    rows = [case._asdict() | row | {"ms_per_token": 0.1, "tokens_per_s": 1e4 * case.batch} for case in cases]
    rows[-1] |= {"ms_per_token": 2.0}
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "processor": "a processor"}
    file = tmp_path / "generation.json"
    file.write_text(json.dumps({"what": "what", "machine": machine, "rows": rows}))
    page, figure = generation_page.write(file)
    assert figure.stat().st_size > 10_000
    assert "| 20.0 |" in page.read_text()
