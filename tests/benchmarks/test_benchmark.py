"""The benchmark of kernels, tested without a GPU."""

import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from benchmarks import kernels, ours, reference_cpu, time_loop, timing
from benchmarks.cases import FORWARD, MODES, SUITES, TRAINING, Case, Job, select
from benchmarks.kernels import InProcess
from benchmarks.peers import PyPIFlashRNN
from benchmarks.results import KernelResults, milliseconds
from benchmarks.table import print_table
from benchmarks.timing import QUICK
from benchmarks.worker import Worker
from flashrnn import get_cell
from scripts import benchmark
from tests import fresh
from tests.tiny_runs import environment
from training.configuration import composed, titles

ROOT = Path(__file__).parents[2]
CASE = Case("lstm", 12, 64, 16)
RUN = {"command": "this test", "commit": "abc", "machine": {"gpu": "a GPU"}}


def measured(ms, peak_mib=100.0, **more):
    return {"ms": {"p20": ms / 2, "p50": ms, "p80": 2 * ms}, "peak_mib": peak_mib, **more}


def results(path, suite="main", commit="abc"):
    return KernelResults(path, {"what": "a test", "suite": suite}, RUN | {"commit": commit})


def worker(code, **options):
    return Worker([sys.executable, "-c", code], cwd=ROOT, **options)


class TestCases:
    def test_patterns_select_cases_and_none_selects_all(self):
        assert [case.B for case in select("main", ["lstm-12x64-*", "lstm-1x768-B64-*"])] == [16, 32, 64, 64]
        assert select("length", []) == list(SUITES["length"])

    def test_pattern_without_match_lists_the_cases(self):
        with pytest.raises(ValueError, match=r"'gru-\*'[\s\S]*lstm-48x16-B16-T1024-bfloat16"):
            select("heads", ["lstm-*", "gru-*"])

    def test_shapes_are_those_of_the_cell(self):
        assert Case("gru", 2, 8, 3, 5).shapes() == {"Wx": (3, 5, 3, 2, 8), "R": (3, 2, 8, 8), "b": (4, 2, 8)}


class TestCheckBeforeTiming:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("function", ["lstm", "slstm"])
    def test_correct_results_pass(self, function, mode):
        errors = ours.check(Job(Case(function, 2, 8, 3), mode), "vanilla", "cpu")
        assert set(errors) == ({"h"} if mode == FORWARD else {"h", "d_Wx", "d_R", "d_b"})
        assert 0 < errors["h"] < 1e-2

    def test_wrong_results_are_an_error(self, monkeypatch):
        right = ours.flashrnn

        def wrong_when_fast(*inputs, function, backend):
            h, last = right(*inputs, function=function, backend="vanilla")
            return h * 1.1 if backend == "fast" else h, last

        monkeypatch.setattr(ours, "flashrnn", wrong_when_fast)
        with pytest.raises(ArithmeticError, match=r"h 1.0e-01 \(bound 1.0e-02\), d_Wx"):
            ours.check(Job(Case("lstm", 2, 8, 3), TRAINING), "fast", "cpu")


@pytest.mark.parametrize("in_a_row", [False, True])
def test_measure_runs_forward_or_all_gradients(in_a_row, monkeypatch):
    monkeypatch.setattr(timing, "device_ms", lambda run, repetitions: run())
    monkeypatch.setattr(timing, "_consecutive_ms", lambda run, calls: [run()] * calls)
    monkeypatch.setattr(timing, "quantiles", lambda results: results[0] if in_a_row else results)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_peak_mib", lambda run: 0)
    measure = timing.measure_in_a_row if in_a_row else partial(timing.measure, effort=QUICK)
    inputs = timing.random_inputs({"Wx": (2, 3), "R": (3, 3), "b": (3,)}, torch.float32, "cpu")

    def forward():
        Wx, R, b = inputs
        return Wx @ R + b

    out = measure(forward, inputs, False)["ms"]
    assert not out.requires_grad
    gradients = measure(forward, inputs, True)["ms"]
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize(
    ("name", "compiled"), [("elman", False), pytest.param("lstm", True, marks=pytest.mark.slow), ("slstm", False)]
)
def test_time_loop_equals_the_cell(name, compiled, monkeypatch):
    case = Case(name, 2, 8, 3, T=5, dtype="float64")
    assert time_loop.supports(case)
    loop = partial(time_loop.time_loop, get_cell(name))
    if compiled:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        loop = time_loop.compiled(loop, [])
    inputs = timing.random_inputs(case.shapes(), torch.float64, "cpu")
    d_h = torch.randn(3, 5, 2, 8, dtype=torch.float64)
    h = loop(*inputs)
    exact = ours.results(case, TRAINING, inputs, d_h, "vanilla")
    for result, right in zip((h, *torch.autograd.grad(h, inputs, d_h)), exact.values(), strict=True):
        torch.testing.assert_close(result, right)


def test_time_loop_supports_gates_with_both_parts_and_unrolls_few_steps():
    assert not time_loop.supports(Case("gru", 2, 8, 3))
    assert [time_loop.supports_unrolled(Case("lstm", 2, 8, 3, T)) for T in (64, 65)] == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_graphed_loop_captures_a_backward_only_in_training(mode, monkeypatch):
    graphed = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda loop, inputs: graphed.append(inputs) or loop)
    monkeypatch.setattr(time_loop, "random_inputs", partial(timing.random_inputs, device="cpu"))
    monkeypatch.setattr(time_loop, "measure", lambda forward, *options: {"h": forward()})
    h = time_loop.run(Job(Case("lstm", 2, 8, 3, T=5), mode), QUICK, time_loop.graphed)["h"]
    assert h.shape == (3, 5, 2, 8)
    assert [x.requires_grad for x in (h, *graphed[0])] == 4 * [mode == TRAINING]


class TestResults:
    def test_rows_name_their_run_and_survive_an_interruption(self, tmp_path):
        file = tmp_path / "new" / "kernels.json"
        results(file).add(Job(CASE, FORWARD), "cudnn_fp16", {"error": "no"})
        second = results(file, commit="def")
        second.add(Job(CASE, FORWARD), "ours", measured(0.5))
        assert not file.exists()
        second.finish()
        content = json.loads(file.read_text())
        assert [run["commit"] for run in content["runs"]] == ["abc", "def"]
        assert content["suite"] == "main"
        assert [(row["implementation"], row["run"]) for row in content["rows"]] == [("cudnn_fp16", 0), ("ours", 1)]
        sizes = {"function": "lstm", "N": 12, "D": 64, "B": 16, "T": 1024, "dtype": "bfloat16", "mode": FORWARD}
        assert content["rows"][1] == sizes | {"implementation": "ours", "run": 1} | measured(0.5)

    def test_later_run_measures_missing_rows_and_ours_of_other_commits(self, tmp_path):
        job = Job(CASE, FORWARD)
        first = results(tmp_path / "kernels.json")
        for name in ("ours", "cudnn_fp16"):
            first.add(job, name, measured(1))
        same, other = (results(first.path, commit=commit) for commit in ("abc", "def"))
        assert not same.missing(job, "ours")
        assert other.missing(job, "ours")
        assert not other.missing(job, "cudnn_fp16")
        assert other.missing(job._replace(mode=TRAINING), "cudnn_fp16")

    def test_time_excludes_the_input_product(self):
        assert milliseconds(measured(3.0, input_ms={"p50": 0.5})) == 2.5


class TestImplementations:
    @pytest.mark.parametrize(
        ("names", "files", "error"),
        [
            (["cudnn"], (None, None), "peer cudnn: .*cudnn_fp16, cudnn_bf16, cudnn_fp32,"),
            (["flashrnn_1.0.8"], (None, None), "flashrnn_1.0.8 needs flashrnn_wheel=PATH"),
            (["all"], ("no.whl", None), "flashrnn_wheel=no.whl "),
            (["haste_0.5.0"], (None, None), "haste_0.5.0 needs haste_sources=FOLDER"),
            (["all"], (None, "nowhere"), "haste_sources=nowhere "),
        ],
    )
    def test_unknown_peers_and_missing_files_are_errors(self, names, files, error):
        with pytest.raises(ValueError, match=f"^{error}"):
            kernels.implementations(names, *files)


class TestMeasure:
    def test_error_is_a_result_and_the_run_continues(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

        def run(job, effort):
            if job.mode == FORWARD:
                raise RuntimeError("no such kernel\nand more of it")
            return measured(2)

        ready = results(tmp_path / "kernels.json")
        kernels.measure([CASE], [InProcess("ours", run)], ready, QUICK)
        forward, training = json.loads(ready.path.read_text())["rows"]
        assert forward["error"] == "RuntimeError: no such kernel\nand more of it"
        assert training["ms"]["p50"] == 2
        assert "forward ours: RuntimeError: no such kernel\n" in capsys.readouterr().out

    def test_run_ends_if_the_gpu_is_lost(self, tmp_path):
        def run(job, effort):
            raise RuntimeError("illegal memory access")

        ready = results(tmp_path / "kernels.json")
        with pytest.raises((RuntimeError, AssertionError)):  # raised by torch.cuda.synchronize
            kernels.measure([CASE], [InProcess("ours", run)], ready, QUICK)
        assert [row["error"] for row in ready.rows] == ["RuntimeError: illegal memory access"]

    def test_only_missing_and_supported_jobs_run(self, tmp_path):
        ready, ran = results(tmp_path / "kernels.json"), []
        ready.add(Job(CASE, FORWARD), "peer", measured(1))
        peer = InProcess("peer", lambda job, effort: ran.append(job) or measured(1), lambda case: case.B == 16)
        kernels.measure([CASE, replace(CASE, B=32)], [peer], ready, QUICK)
        assert ran == [Job(CASE, TRAINING)]


class TestWorker:
    def test_answers_are_independent_of_printed_output(self):
        code = """if 1:
            import os
            from benchmarks.worker import serve
            kept = []
            def add(x):
                print("noise")
                os.system("echo noise of a compiler")
                kept.append(x)
                return {"kept": kept}
            serve({"add": add, "fail": lambda: {}["key"]})"""
        with worker(code) as asked:
            assert asked.ask(60, do="add", x=1) == {"kept": [1]}
            assert asked.ask(60, do="fail") == {"error": "KeyError: 'key'"}
            assert asked.ask(60, do="add", x=2) == {"kept": [1, 2]}

    def test_error_contains_the_exit_code_and_output(self):
        with worker("import sys; print('out of luck', file=sys.stderr); sys.exit(3)") as asked:
            error = "the process ended with code 3; its output:\nout of luck\n"
            assert asked.ask(60, do="add") == {"error": error}
            assert asked.ask(60, do="add") == {"error": error}

    def test_timeout_is_an_error(self):
        start = time.monotonic()
        with worker("import time; time.sleep(60)") as asked:
            assert asked.ask(0.3, do="add")["error"].startswith("no answer within 0.3 s")
        assert time.monotonic() - start < 30


@pytest.fixture
def wheel(tmp_path):
    """Return a fake wheel with the module structure of flashrnn 1.0.8."""
    file = tmp_path / "flashrnn-1.0.8-py3-none-any.whl"
    with ZipFile(file, "w") as content:
        content.writestr("flashrnn/__init__.py", "from .flashrnn import flashrnn")
        content.writestr("flashrnn/flashrnn/__init__.py", "from .flashrnn import flashrnn")
        content.writestr(
            "flashrnn/flashrnn/flashrnn.py",
            "def get_gpu_info(device_id): raise OSError('does not compile')\n"
            "def flashrnn(device): return get_gpu_info(device)\n",
        )
    return file


class TestPyPIFlashRNN:
    @pytest.fixture
    def peer(self, wheel, tmp_path):
        """Return a peer whose process fails to build batches of 32 and answers with its arguments."""
        code = """if 1:
            import os
            from benchmarks.worker import serve
            def build(backend, function, shapes, dtype):
                assert os.environ["MAX_JOBS"]
                if shapes["Wx"][0] == 32:
                    raise ValueError("No working solution")
                return {"build_s": 50.0}
            serve({"build": build, "measure": lambda **asked: {"process": os.getpid(), "asked": asked}})"""
        return PyPIFlashRNN(wheel, parallel=2, command=(sys.executable, "-c", code), folder=tmp_path / "built")

    def test_each_size_is_built_once_for_all_lengths(self, peer, tmp_path):
        lock = tmp_path / "built" / "extensions" / "lstm" / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        cases = [CASE, replace(CASE, T=256), replace(CASE, B=32), replace(CASE, function="slstm")]
        jobs = [Job(case, mode) for case in cases for mode in MODES]
        found = dict(peer.measure(jobs, QUICK))
        assert set(found) == set(jobs)
        processes = [{found[Job(case, mode)].get("process") for mode in MODES} for case in cases]
        assert processes[0] == processes[1] != processes[3]
        assert processes[2] == {None}
        assert found[Job(cases[2], FORWARD)] == {"error": "ValueError: No working solution"}
        answer = found[Job(cases[1], TRAINING)]
        assert answer["build_s"] == 50
        assert answer["asked"] == {
            "backend": "cuda_fused",
            "function": "lstm",
            "shapes": {"Wx": [16, 256, 4, 12, 64], "R": [4, 12, 64, 64], "b": [4, 12, 64]},
            "dtype": "bfloat16",
            "training": True,
            "effort": list(QUICK),
        }
        assert not lock.exists()
        assert (tmp_path / "built" / "flashrnn-1.0.8-py3-none-any" / "flashrnn" / "__init__.py").exists()

    def test_process_loads_the_package_with_our_device_query(self, peer, tmp_path):
        code = """if 1:
            import sys, types
            from pathlib import Path
            import torch
            from benchmarks import pypi_flashrnn
            gpu = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
            torch.cuda.get_device_properties = lambda device: gpu
            print(pypi_flashrnn.load(Path(sys.argv[1]))(0)["multiProcessorCount"], "flashrnn.op" in sys.modules)"""
        done = fresh.program(code, str(peer._unpack()), folder=tmp_path, environment=environment())
        assert done.stdout == "132 False\n", done.stderr


@pytest.fixture
def suite_file(tmp_path):
    """Return a function that writes results of a suite in which peers take 8 times as long or run out of memory."""

    def write(suite):
        ready = results(tmp_path / f"kernels_{suite}.json", suite)
        for case in SUITES[suite]:
            for mode in MODES:
                ready.add(Job(case, mode), "ours", measured(0.4))
                ready.add(Job(case, mode), "flashrnn_1.0.8", measured(3.2) if case.B < 64 else {"error": "memory"})
                if case.N == 1:
                    ready.add(Job(case, mode), "cudnn_fp16", measured(1.0, input_ms={"p50": 0.2}))
        ready.finish()
        return ready.path

    return write


class TestReport:
    def test_table_has_all_implementations_and_the_ratio(self, suite_file, capsys):
        print_table(json.loads(suite_file("main").read_text())["rows"])
        header, *lines = capsys.readouterr().out.splitlines()
        assert header.split() == ["case", "mode", "ours", "µs/step", "flashrnn_1.0.8", "cudnn_fp16", "ratio"]
        first = "lstm-12x64-B16-T1024-bfloat16 forward 0.400 0.391 3.200 8.00"
        assert lines[0].split() == first.split()
        assert lines[4].split()[2:5] == ["0.400", "0.391", "error"]
        assert lines[15].split()[2:7] == ["0.400", "0.391", "3.200", "0.800", "2.00"]

    @pytest.mark.parametrize("suite", ["main", "backends", "heads"])  # bars, groups of bars, and curves
    def test_all_kinds_of_figures_are_drawn(self, suite, suite_file, monkeypatch, capsys):
        file = suite_file(suite)
        monkeypatch.setattr(sys, "argv", ["benchmark", "figures", f"files=[{file}]"])
        benchmark.main()
        assert file.with_suffix(".png").stat().st_size > 10_000
        assert str(file.with_suffix(".png")) in capsys.readouterr().out

    def test_file_of_another_benchmark_is_an_error(self):
        file = ROOT / "docs" / "results" / "cpu" / "reference_cpu.json"
        with pytest.raises(ValueError, match=r"reference_cpu\.json"):
            benchmark.write_page(file)


class TestCommandLine:
    def run(self, monkeypatch, *arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
        benchmark.main()

    def refused(self, monkeypatch, *arguments):
        with pytest.raises(SystemExit) as stopped:
            self.run(monkeypatch, *arguments)
        return stopped.value.code

    @pytest.mark.parametrize("name", [name for name in titles("benchmark") if name != "figures"])
    def test_keys_of_a_benchmark_are_the_arguments_of_its_module(self, name):
        module = import_module(f"benchmarks.{name}")
        keys = set(composed([f"benchmark={name}"], "benchmark"))
        if not hasattr(module, "run"):
            keys -= {"out", "commit"}
        assert set(signature(getattr(module, "run", None) or module.rows).parameters) - {"known"} == keys

    def test_names_are_listed(self, monkeypatch):
        assert "calls, counters" in self.refused(monkeypatch)
        assert "layers" in self.refused(monkeypatch, "lstm")
        assert "files=[FILE" in self.refused(monkeypatch, "figures")

    @pytest.mark.parametrize("name", ["kernels", "first_call"])
    def test_missing_gpu_is_an_error(self, name, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        error = self.refused(monkeypatch, name)
        assert re.search(r"^error: .*NVIDIA GPU", error)

    def test_without_a_commit_nothing_is_measured(self, monkeypatch, tmp_path):
        monkeypatch.setattr("training.provenance.commit", lambda: None)
        monkeypatch.setattr(reference_cpu, "rows", lambda: pytest.fail("measured"))
        error = self.refused(monkeypatch, "reference_cpu", f"out={tmp_path}")
        assert re.search("^error: .*git", error)

    def test_interrupted_run_keeps_the_earlier_result_and_its_own_rows(self, monkeypatch, tmp_path):
        def rows():
            """A test."""
            yield {"ms": 1}
            raise ValueError("out of luck")

        monkeypatch.setattr(reference_cpu, "rows", rows)
        (tmp_path / "cpu").mkdir()
        tmp_path.joinpath("cpu", "reference_cpu.json").write_text("earlier")
        assert "out of luck" in self.refused(monkeypatch, "reference_cpu", f"out={tmp_path}", "commit=abc")
        assert tmp_path.joinpath("cpu", "reference_cpu.json").read_text() == "earlier"
        measured = json.loads(tmp_path.joinpath("cpu", "reference_cpu.partial.json").read_text())
        assert (measured["rows"], measured["commit"]) == ([{"ms": 1}], "abc")

    def test_command_measures_a_case_into_the_folder(self, monkeypatch, tmp_path, wheel, capsys):
        monkeypatch.setattr(kernels, "gpu_folder", lambda: "gpu")
        monkeypatch.setattr(ours, "run", lambda job, effort: measured(0.5 + (effort == QUICK)))
        options = ("case=[lstm-12x64-B16-*]", "peers=[]", "quick=true", f"out={tmp_path}", "commit=abc")
        self.run(monkeypatch, "kernels", *options)
        content = json.loads((tmp_path / "gpu" / "kernels_main.json").read_text())
        assert [row["ms"]["p50"] for row in content["rows"]] == [1.5, 1.5]
        assert content["runs"][0]["commit"] == "abc"
        assert content["runs"][0]["command"].startswith("python -m scripts.benchmark kernels 'case=[lstm-12x64-B16-*]'")
        assert content["runs"][0]["quick"]
        assert str(tmp_path / "gpu" / "kernels_main.json") in capsys.readouterr().out

    @pytest.mark.parametrize("rank", [0, 1])
    def test_only_the_first_process_writes_under_torchrun(self, rank, monkeypatch, tmp_path):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("benchmarks.results.gpu_folder", lambda: "gpu")
        asked = []

        def rows(models, batch_sizes, accumulate, known):
            """A test."""
            asked.append((models, batch_sizes, accumulate))
            yield {"ms": 1}

        monkeypatch.setattr("benchmarks.language_model.rows", rows)
        models = "models=['model=lstm model.num_heads=1',model]"
        self.run(monkeypatch, "language_model", models, "batch_sizes=8", f"out={tmp_path}", "commit=12e4567")
        assert asked == [(["model=lstm model.num_heads=1", "model"], [8], [1])]
        written = [json.loads(file.read_text())["commit"] for file in tmp_path.glob("gpu/language_model_x2.json")]
        assert written == ["12e4567"] * (rank == 0)

    def test_command_measures_the_reference(self, monkeypatch, tmp_path):
        monkeypatch.setattr(reference_cpu, "processor_time", lambda runs: {k: {"p50": 1.0} for k in runs})
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        monkeypatch.setattr(reference_cpu, "_SIZES", [(2, 3, 2, 4)])
        self.run(monkeypatch, "reference_cpu", f"out={tmp_path}")
        content = json.loads((tmp_path / "cpu" / "reference_cpu.json").read_text())
        assert [row["cell"] for row in content["rows"]] == ["lstm", "slstm"]
        assert content["commit"]
