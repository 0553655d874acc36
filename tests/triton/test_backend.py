"""Backend `triton_fused` without a GPU: the correctness suite in Triton's interpreter, and unsupported calls."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashrnn import Cell, flashrnn, get_cell
from flashrnn.gpu import named_gpu
from flashrnn.problem import KernelUnavailable, Problem
from flashrnn.triton import backend, launch
from flashrnn.triton.backend import TritonFused
from tests.problems import CELLS, NORMALISED, random_inputs, results
from tests.suite import Case, check, check_numbers_beyond_float16
from tests.tolerances import assert_close

LSTM, LAYERNORM_GRU = get_cell("lstm"), get_cell("layernorm_gru")
CUDA, H100 = torch.device("cuda"), named_gpu("H100")
PROBLEM = Problem(LSTM, 12, 64, torch.bfloat16, CUDA, True, False, H100)


def reason(**changes) -> str | None:
    return TritonFused().unsupported_reason(PROBLEM._replace(**changes))


# Few steps, because the interpreter takes 5 to 10 ms per step.
CASES = [
    *(Case(cell, B=3, T=4, D=20, reset=True) for cell in CELLS),
    Case(get_cell("slstm"), B=3, T=3, N=1, D=64),
    *(Case(cell, B=2, T=3, N=1, D=20, reset=True) for cell in NORMALISED[1:]),  # with padded units
    pytest.param(Case(NORMALISED[0], B=2, T=3, N=1, D=20, reset=True), marks=pytest.mark.slow),
    *(Case(LAYERNORM_GRU, B=B, T=2, N=N, D=D) for B, N, D in ((17, 1, 16), (1, 2, 1))),
    *(Case(B=B, T=T, N=1, D=16) for B, T in ((1, 1), (16, 2), (33, 3))),
    *(Case(B=2, T=3, N=2, D=D) for D in (1, 33)),
    Case(get_cell("gru"), B=9, T=3, time_major=True),
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case):
    check("triton_fused", case, torch.float32, "cpu")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", [Case(get_cell("slstm"), B=3, T=3), Case(B=3, T=3, N=1, D=128)], ids=str)
def test_float16(case):
    check("triton_fused", case, torch.float16, "cpu")
    check("triton_fused", case, torch.float16, "cpu", flashrnn)


@pytest.mark.usefixtures("interpreted")
def test_layer_norm_in_float16():
    check("triton_fused", Case(LAYERNORM_GRU, B=2, T=2, N=1, D=20), torch.float16, "cpu")


@pytest.mark.usefixtures("interpreted")
def test_failed_compilation_is_an_error_with_the_reason(monkeypatch):
    class Failing:
        def __getitem__(self, grid):
            return self

        def __call__(self, *arguments, **constants):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launch, "_kernels", lambda interpret: SimpleNamespace(forward=Failing()))
    expected = r"forward .*'lstm' .*: Failed to find C compiler$"
    with pytest.raises(KernelUnavailable, match=expected):
        flashrnn(*random_inputs(LSTM, 3, 4, 1, 16, torch.float32), backend="triton_fused")


@pytest.mark.usefixtures("interpreted")
def test_gradients_with_numbers_beyond_float16():
    check_numbers_beyond_float16("triton_fused", "cpu")


@pytest.mark.usefixtures("interpreted")
def test_inference_and_gradients_of_the_output_only():
    inputs = random_inputs(LSTM, 3, 4, 1, 16, torch.float32)
    with torch.no_grad():
        found, expected = (
            dict(zip(("h", "last states"), flashrnn(*inputs, backend=name), strict=True))
            for name in ("triton_fused", "vanilla")
        )
    assert_close(found, expected, torch.float32)
    found, expected = (
        torch.autograd.grad(flashrnn(*inputs, backend=name)[0].square().sum(), inputs)
        for name in ("triton_fused", "vanilla")
    )
    assert_close(dict(enumerate(found)), dict(enumerate(expected)), torch.float32)


@pytest.mark.usefixtures("interpreted")
def test_step_without_factors_and_with_constant_gradients():
    cell = Cell("adder", lambda g, k, h: torch.relu(g) + 0.5 * k, ("h",), input_gates=("g",), recurrent_gates=("g",))
    inputs = random_inputs(cell, 2, 3, 1, 4, torch.float32)
    found, expected = (results(flashrnn, inputs, function=cell, backend=b) for b in ("triton_fused", "vanilla"))
    assert_close(found, expected, torch.float32)


def test_environment_variable_enables_the_cpu():
    program = (
        "import torch; from flashrnn import flashrnn\n"
        "inputs = torch.randn(2, 3, 4, 1, 4), torch.randn(4, 1, 4, 4), torch.randn(4, 1, 4)\n"
        "out, ref = (flashrnn(*inputs, backend=b)[0] for b in ('triton_fused', 'vanilla'))\n"
        "torch.testing.assert_close(out, ref)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


def test_supported_problems():
    assert reason() is None
    assert reason(head_dim=128, cell=get_cell("slstm")) is None
    assert reason(dtype=torch.float32, heads=1, head_dim=33, reset=True) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"device": torch.device("cpu")},
            "CPU .*TRITON_INTERPRET=1",
        ),
        ({"device": torch.device("mps")}, "CUDA and ROCm.* mps"),
        ({"dtype": torch.float64}, r"bfloat16, float16 and float32.* torch\.float64"),
        ({"head_dim": 129}, " 128.* 129"),
        (
            {"head_dim": 96, "dtype": torch.float32},
            "256 KiB .*96.* 128, torch.float32.* 227 KiB",
        ),
    ],
    ids=["cpu", "device", "dtype", "head size", "shared memory"],
)
def test_reasons_for_unsupported_problems(changes, expected):
    assert re.search(expected, reason(**changes))


def test_reason_for_an_old_gpu():
    v100 = replace(named_gpu("A100"), name="V100", capability=(7, 0))
    assert re.search(r"8\.0.* V100 .*7\.0", reason(assumed_gpu=v100))
    rtx_4090 = named_gpu("RTX 4090")
    assert reason(assumed_gpu=rtx_4090) is None
    assert "99 KiB" in reason(assumed_gpu=rtx_4090, head_dim=100)


@pytest.mark.usefixtures("interpreted")
def test_reasons_in_the_interpreter():
    assert "TRITON_INTERPRET=1" in reason()
    assert re.search("bfloat16 .*float16 or float32", reason(device=torch.device("cpu")))


def test_cell_without_a_scalar_graph_is_not_supported():
    cell = Cell("sorted", lambda g, h: torch.lgamma(g + h), ("h",))
    assert re.search(r"'sorted' .*aten\.lgamma\.default", reason(cell=cell))


def test_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert "triton" in reason()
