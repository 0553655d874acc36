"""The sweep without a GPU: cliffs, measured cases, and the page."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import sweep, sweep_page
from benchmarks.cases import FORWARD, MODES, TRAINING, Case, Job
from benchmarks.cliffs import cliffs, misranked
from benchmarks.results import KernelResults, by_job
from benchmarks.sweep_cases import CASES, SERIES
from flashrnn.gpu import named_gpu
from scripts import benchmark

CASE = Case("lstm", 1, 768, 16, 512)
RUN = {"command": "this test", "commit": "abc", "machine": {"gpu": "a GPU"}}


class TestCliffs:
    def test_size_that_is_slower_than_a_larger_one_is_a_cliff(self):
        (cliff,) = cliffs({400: 2.69, 384: 1.41, 512: 1.14 * 2}, 1.08)
        assert (cliff.size, cliff.faster, cliff.ms, cliff.faster_ms) == (400, 512, 2.69, 2.28)
        assert cliff.ratio == pytest.approx(1.18, abs=0.01)

    def test_cliff_is_compared_with_the_fastest_larger_size(self):
        assert [(c.size, c.faster) for c in cliffs({1: 3.0, 2: 2.0, 3: 2.5, 4: 1.0, 5: 1.5}, 1.08)] == [
            (1, 4),
            (2, 4),
            (3, 4),
        ]

    def test_growth_within_the_tolerance_is_not_a_cliff(self):
        assert cliffs({8: 1.08, 16: 1.0, 24: 1.2, 32: 1.2}, 1.08) == []
        assert [c.size for c in cliffs({8: 1.09, 16: 1.0}, 1.08)] == [8]

    @pytest.mark.parametrize("times", [{}, {8: 1.0}])
    def test_too_few_sizes_have_no_cliff(self, times):
        assert cliffs(times, 1.05) == misranked(times, times) == []


class TestRanks:
    def test_wrongly_ranked_neighbours_are_found(self):
        estimated, measured = {8: 1.0, 16: 2.0, 24: 1.5}, {8: 1.0, 16: 1.5, 24: 3.0}
        assert misranked(estimated, measured) == [(16, 24, 0.75, 2.0)]
        assert misranked(measured, estimated) == [(16, 24, 2.0, 0.75)]

    def test_noise_and_equal_estimates_are_ignored(self):
        assert misranked({8: 2.0, 16: 1.0}, {8: 1.0, 16: 1.01}) == []
        assert misranked({8: 1.0, 16: 1.0}, {8: 1.0, 16: 2.0}) == []

    def test_sizes_without_an_estimate_are_ignored(self):
        assert misranked({8: 1.0, 16: 2.0}, {8: 1.0, 9: 5.0, 16: 2.0}) == []


class TestCases:
    def test_series_vary_one_field_and_cover_common_sizes(self):
        for series in SERIES:
            sizes = [getattr(case, series.field) for case in series.cases]
            assert sizes == sorted({*sizes})
            assert len({replace(case, **{series.field: 1}) for case in series.cases}) == 1
        one_head, twelve_heads, *_ = SERIES
        assert {31, 63, 65, 767, 768, 769, 1111, 1536} <= {case.D for case in one_head.cases}
        assert {*range(8, 257, 8)} < {case.D for case in twelve_heads.cases}

    def test_case_in_two_series_is_measured_once(self):
        assert CASES.count(CASE) == 1
        assert len(CASES) == sum(len(series.cases) for series in SERIES) - 2


@pytest.fixture
def _h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sweep, "device_gpu", lambda index: named_gpu("H200"))


@pytest.mark.usefixtures("_h200")
class TestExpectation:
    def test_estimate_of_training_includes_both_loops(self):
        forward, training = (sweep.expectation(Job(CASE, mode)) for mode in MODES)
        assert list(forward["tilings"]) == ["forward"]
        assert list(training["tilings"]) == ["forward", "backward"]
        assert 0.5 < forward["estimate_ms"] < training["estimate_ms"] < 5

    def test_other_backends_have_no_estimate(self):
        assert sweep.expectation(Job(replace(CASE, D=4096), TRAINING)) == {"backend": "cuda"}


def measured(ms, **more):
    return {"ms": {"p20": ms, "p50": ms, "p80": ms}} | more


class TestCommand:
    def run(self, monkeypatch, tmp_path, *options):
        monkeypatch.setattr(sweep, "gpu_folder", lambda: "gpu")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        arguments = ["benchmark", "sweep", f"out={tmp_path}", "commit=abc", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        benchmark.main()
        return json.loads((tmp_path / "gpu" / "sweep.json").read_text())

    @pytest.mark.slow
    def test_command_measures_matching_and_missing_cases(self, monkeypatch, tmp_path, capsys):
        compiled = []
        monkeypatch.setattr(sweep, "compile_ahead", compiled.append)
        monkeypatch.setattr(sweep, "row", lambda job: measured(1.0, backend="cuda_fused", estimate_ms=0.9))
        content = self.run(monkeypatch, tmp_path, "case=[lstm-1x768-B16-*]")
        assert [row["mode"] for row in content["rows"]] == [*MODES]
        content = self.run(monkeypatch, tmp_path, "case=['lstm-1x768-B1[67]-*']")
        assert [row["B"] for row in content["rows"]] == [16, 16, 17, 17]
        assert [[case.B for case in cases] for cases in compiled] == [[16], [17]]
        assert str(tmp_path / "gpu" / "sweep.md") in capsys.readouterr().out

    def test_error_is_a_row(self, monkeypatch, tmp_path):
        def row(job):
            if job.mode == FORWARD:
                raise ArithmeticError("relative errors")
            return measured(1.0)

        monkeypatch.setattr(sweep, "compile_ahead", lambda cases: None)
        monkeypatch.setattr(sweep, "row", row)
        forward, training = self.run(monkeypatch, tmp_path, "case=[lstm-1x768-B16-*]")["rows"]
        assert forward["error"] == "ArithmeticError: relative errors"
        assert training["ms"]["p50"] == 1


@pytest.fixture
def file(tmp_path):
    """Write results in which time and estimate equal the size, but 1 × 400 takes as long as 1 × 1000."""
    results = KernelResults(tmp_path / "sweep_gpu.json", {"what": "a test", "suite": "sweep"}, RUN)
    for case in CASES:
        ms, estimate = (1000 if case.D == 400 else case.D) * case.B, case.D * case.B
        for mode in MODES:
            results._rows[Job(case, mode), "ours"] = {
                **vars(case), "mode": mode, "implementation": "ours", "run": 0, **measured(ms, estimate_ms=estimate)
            }  # fmt: skip
    results.add(Job(CASE, FORWARD), "ours", {"error": "out of memory"})
    results.finish()
    return results.path


def test_page_lists_cliffs_and_wrong_ranks(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "figures", f"files={file}"])
    benchmark.main()
    page = file.with_suffix(".md").read_text()
    assert "| head size | 1 head, batch 16 | forward | 400 | 16000.000 | 416 | 6656.000 | 2.40 |" in page
    assert "| head size | 1 head, batch 16 | forward+backward | 400, 416 | 1.04 | 0.42 |" in page
    assert page.count("| head size |") == 4
    assert "batch size |" not in page.partition("## Cliffs")[2]
    assert file.with_suffix(".png").stat().st_size > 10_000
    assert str(file.with_suffix(".md")) in capsys.readouterr().out


def test_cliffs_are_marked_in_the_figure(file):
    from matplotlib.figure import Figure

    jobs = by_job(json.loads(file.read_text())["rows"])
    series, _, rows = next(sweep_page.panels(jobs))
    axes = Figure().subplots()
    sweep_page._curves(axes, series, rows)
    marked = axes.lines[2]
    assert (list(marked.get_xdata()), list(marked.get_ydata())) == ([400], [16000])
    assert 768 not in axes.lines[0].get_xdata()  # out of memory


def test_second_half_of_consecutive_calls_is_timed(monkeypatch):
    from benchmarks import timing

    monkeypatch.setattr(timing, "_consecutive_ms", lambda run, calls: [9.0] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0])
    assert timing.measure_in_a_row(lambda: None, [], False) == {"ms": {"p20": 1.8, "p50": 3.0, "p80": 4.2}}
