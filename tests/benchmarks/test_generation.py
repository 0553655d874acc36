"""The benchmark of generating text on the smallest models: what is counted is right, and is drawn."""

import json
import sys

import pytest

from benchmarks import generation
from scripts import benchmark


@pytest.fixture
def content(monkeypatch, tmp_path):
    monkeypatch.setattr(generation, "SMALL", {"vocab_size": 20, "d_model": 8, "num_blocks": 2, "num_heads": 1})
    monkeypatch.setattr(generation, "NEW_TOKENS", generation.WARMUP + 3)
    monkeypatch.setattr(generation.torch, "set_num_threads", lambda number: None)
    arguments = ["generation", "--out", str(tmp_path), "--commit", "abc", "--contexts", "4", "64"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    benchmark.main()
    assert (tmp_path / "cpu" / "generation.png").stat().st_size > 10_000
    return json.loads((tmp_path / "cpu" / "generation.json").read_text())


def test_memory_and_speed_by_context(content):
    rows = {(row["model"], row["context"]): row for row in content["rows"]}
    assert set(rows) == {(model, context) for model in generation.MODELS for context in (4, 64)}
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(1000 / row["ms_per_token"], rel=0.01)
    assert rows["LSTM", 4]["cache_mib"] == rows["LSTM", 64]["cache_mib"]
    # In each of 2 blocks keys and values of 8, of every token but the last, which nothing reads.
    assert rows["Transformer", 64]["cache_mib"] == pytest.approx(2 * 74 * (2 * 8) * 4 / 2**20, abs=1e-4)
