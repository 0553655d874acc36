"""Planned tilings and explanations of calls."""

import re
from itertools import islice

import pytest
import torch

from flashrnn import Cell, FlashRNN, UnsupportedProblem, get_cell
from flashrnn.__main__ import main
from flashrnn.cuda.resident.solver import tilings
from flashrnn.cuda.spec import KernelSpec
from flashrnn.gpu import named_gpu
from flashrnn.plan import auto_backend, explain, plans

SIZES = (1, 768, 16, torch.bfloat16, named_gpu("H200"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plans_are_the_solvers_tilings_in_order(direction):
    found = list(islice(plans(direction, "lstm", *SIZES), 20))
    chosen = islice(tilings(KernelSpec(direction, get_cell("lstm"), *SIZES)), 20)
    assert [(p.blocks, p.grid, 32 * p.warps) for p in found] == [(t.blocks, t.grid, t.threads) for t in chosen]
    assert [plan.cycles for plan in found] == sorted(plan.cycles for plan in found)


def test_cycles_are_those_of_a_time_step():
    plan = next(plans("forward", "lstm", *SIZES))
    assert 1000 < plan.cycles < 6000  # 0.5 to 3 µs


def test_fragments_contain_all_of_r():
    plan = next(plans("forward", "lstm", *SIZES))
    assert plan.blocks * plan.warps * plan.fragments * 16 * 16 >= 4 * 768 * 768


def test_sizes_that_do_not_fit_are_an_error():
    with pytest.raises(UnsupportedProblem, match=r"forward .*chip"):
        next(plans("forward", "lstm", 1, 4096, 16, torch.bfloat16, named_gpu("A100")))


def test_backend_of_a_cpu_and_of_a_gpu():
    assert auto_backend("lstm", 12, 64, torch.bfloat16, named_gpu("H100")) == "cuda_fused"
    assert auto_backend("lstm", 1, 4096, torch.bfloat16, named_gpu("H100")) == "cuda"
    assert auto_backend("lstm", 1, 64, torch.bfloat16, None) == "cpu_fused"


def test_odd_head_sizes_are_planned_with_padding():
    h100 = named_gpu("H100")
    assert auto_backend("lstm", 1, 1001, torch.bfloat16, h100) == "cuda_fused"
    assert auto_backend("lstm", 1, 4001, torch.bfloat16, h100) == "cuda"
    infinite = Cell("infinite", lambda f, h: h * torch.log(f), states=("h",))  # at f = 0, as in padding
    assert auto_backend(infinite, 1, 1001, torch.bfloat16, h100) == "cuda"
    assert auto_backend("lstm", 1, 63, torch.float64, None) == "cpu_fused"


@pytest.mark.parametrize(
    ("sizes", "gpu", "backend", "taken", "refused"),
    [
        ((12, 64), "H100", "auto", "cuda_fused", []),
        ((1, 4096), "H100", "auto", "cuda", ["cuda_fused", "triton_fused"]),
        ((1, 64), None, "vanilla", "vanilla", []),
        ((1, 64), None, "auto", "cpu_fused", ["cuda_fused", "triton_fused", "cuda"]),
    ],
)
def test_explain_names_backend_and_reasons(sizes, gpu, backend, taken, refused):
    text = explain("lstm", *sizes, 16, torch.bfloat16, gpu and named_gpu(gpu), backend=backend)
    _, *lines = text.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("not")] == [f"not {name}" for name in refused]
    assert f"{taken} runs it" in lines
    assert sum("cycles per time step" in line for line in lines) == (2 if taken == "cuda_fused" else 0)


def test_network_explains_its_calls():
    assert "cpu_fused runs it" in FlashRNN(8, 64, function="gru").explain(16, torch.float32)
    assert "PyTorch's own kernel" in FlashRNN(8, 256).explain(16)
    assert "PyTorch's own kernel" not in FlashRNN(8, 256).explain(16, reset=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": "16"}, "batch must be an integer, got '16'"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"dtype": "float32"}, "dtype .*torch.bfloat16, got 'float32'"),
        ({"gpu": "H100"}, "named_gpu.*'H100'"),
    ],
)
def test_wrong_arguments_are_an_error(wrong, message):
    given = {"function": "lstm", "heads": 1, "head_dim": 64, "batch": 16, "dtype": torch.float32, "gpu": None} | wrong
    with pytest.raises((TypeError, ValueError), match=message):
        explain(**given)


class TestCommandLine:
    def test_explain(self, capsys):
        assert main(["explain", "--heads", "1", "--head-dim", "1001", "--batch", "16", "--gpu", "H100"]) == 0
        assert "cuda_fused runs it, with heads padded by 7" in capsys.readouterr().out

    def run(self, *more):
        return main(["tilings", "--heads", "1", "--head-dim", "768", "--batch", "16", *more])

    def test_tilings_prints_the_requested_number_per_direction(self, capsys):
        assert self.run("--gpu", "H200", "--count", "3") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["forward"] * 3 + ["backward"] * 3
        assert "cycles per step" in lines[0]

    def test_tilings_prints_an_error_if_nothing_fits(self, capsys):
        assert self.run("--gpu", "A100", "--head-dim", "4096") == 1
        assert capsys.readouterr().err.startswith("error: forward ")

    def test_tilings_without_a_gpu_lists_gpu_names(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert self.run() == 1
        assert re.search("--gpu .* A100,", capsys.readouterr().err)
