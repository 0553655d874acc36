"""The benchmark of data, with a few documents."""

import logging
import sys

import pytest

from benchmarks import data as measured
from data import corpora
from scripts import benchmark


@pytest.fixture
def _few_documents(tmp_path, monkeypatch):
    for k in range(100):
        tmp_path.joinpath(f"{k}.py").write_text(f"state_{k} = {k} * state_{k + 1}\n" * 60)
    monkeypatch.setattr(corpora, "_python_files", lambda *_: sorted(map(str, tmp_path.glob("*.py"))))
    monkeypatch.setattr(measured, "CONTEXT_LENGTH", 32)
    monkeypatch.setattr(measured, "BATCH_SIZE", 8)


@pytest.mark.slow
@pytest.mark.usefixtures("_few_documents")
def test_rows_have_rates(tmp_path, monkeypatch):
    rows = list(measured.rows())
    assert [row.get("processes", row.get("num_workers")) for row in rows] == [0, 2, 0, 2]
    for row in rows[:2]:
        rates = row["tokens_per_processor_second"]
        assert rates["ours"] > 0
        assert row["time_over_bare"] == pytest.approx(rates["encode_batch"] / rates["ours"], rel=0.5)
    assert all(row["tokens_per_second"] > 0 for row in rows[2:])


def test_command_measures_data(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "rows", lambda: [{"what": "reading"}])
    measured.rows.__doc__ = "A test."
    monkeypatch.setattr(sys, "argv", ["benchmark", "data", f"out={tmp_path}", "commit=abc"])
    benchmark.main()
    assert logging.getLogger().level == logging.WARNING  # no log messages between the rows
    assert '"what": "reading"' in (tmp_path / "cpu" / "data.json").read_text()
