"""`triton_fused` without a GPU: the correctness suite in Triton's interpreter, and reasons why it cannot serve."""

import os
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
from tests.problems import BUILT_IN, CELLS, NORMALISED, random_inputs, results
from tests.suite import Case, check, check_numbers_beyond_float16
from tests.tolerances import assert_close

LSTM, LAYERNORM_GRU = get_cell("lstm"), get_cell("layernorm_gru")
CUDA, H100 = torch.device("cuda"), named_gpu("H100")
PROBLEM = Problem(LSTM, 12, 64, torch.bfloat16, CUDA, True, False, H100)


def reason(**changes) -> str | None:
    return TritonFused().unsupported_reason(PROBLEM._replace(**changes))


# The interpreter takes 5 to 10 ms a step: few steps, and all that differs from step to step.
CASES = [
    *(Case(cell, B=3, T=6, D=20, reset=True) for cell in CELLS),
    *(Case(cell, B=3, T=3, N=1, D=64) for cell in BUILT_IN),
    *(Case(cell, B=2, T=3, N=1, D=20, reset=True) for cell in NORMALISED),  # with padding among the units
    *(Case(LAYERNORM_GRU, B=B, T=2, N=N, D=D) for B, N, D in ((17, 1, 16), (1, 2, 1))),
    *(Case(B=B, T=T, N=1, D=16) for B, T in ((1, 1), (16, 2), (17, 1), (33, 3))),
    *(Case(B=2, T=3, N=2, D=D) for D in (1, 33)),
    Case(get_cell("gru"), B=9, T=3, time_major=True),
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case):
    check("triton_fused", case, torch.float32, "cpu")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", [*(Case(cell, B=3, T=5) for cell in BUILT_IN), Case(B=3, T=3, N=1, D=128)], ids=str)
def test_float16(case):
    check("triton_fused", case, torch.float16, "cpu")
    check("triton_fused", case, torch.float16, "cpu", flashrnn)


@pytest.mark.usefixtures("interpreted")
def test_a_layer_norm_in_float16():
    check("triton_fused", Case(LAYERNORM_GRU, B=2, T=2, N=1, D=20), torch.float16, "cpu")


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_that_triton_cannot_make_says_so(monkeypatch):
    class Failing:
        def __getitem__(self, grid):
            return self

        def __call__(self, *arguments, **constants):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launch, "_kernels", lambda interpret: SimpleNamespace(forward=Failing()))
    expected = r"^the forward of cell 'lstm' cannot be made by Triton: Failed to find C compiler$"
    with pytest.raises(KernelUnavailable, match=expected):
        flashrnn(*random_inputs(LSTM, 3, 4, 1, 16, torch.float32), backend="triton_fused")


@pytest.mark.usefixtures("interpreted")
def test_numbers_beyond_float16():
    check_numbers_beyond_float16("triton_fused", "cpu")


@pytest.mark.usefixtures("interpreted")
def test_inference_and_the_gradient_of_the_output_alone():
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
def test_a_step_without_factors_and_with_constant_gradients():
    cell = Cell("adder", lambda g, k, h: torch.relu(g) + 0.5 * k, ("h",), input_gates=("g",), recurrent_gates=("g",))
    inputs = random_inputs(cell, 2, 3, 1, 4, torch.float32)
    found, expected = (results(flashrnn, inputs, function=cell, backend=b) for b in ("triton_fused", "vanilla"))
    assert_close(found, expected, torch.float32)


def test_the_environment_variable_serves_the_cpu():
    program = (
        "import torch; from flashrnn import flashrnn\n"
        "inputs = torch.randn(2, 3, 4, 1, 4), torch.randn(4, 1, 4, 4), torch.randn(4, 1, 4)\n"
        "out, ref = (flashrnn(*inputs, backend=b)[0] for b in ('triton_fused', 'vanilla'))\n"
        "torch.testing.assert_close(out, ref)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


def test_problems_that_are_served():
    assert reason() is None
    assert reason(head_dim=128, cell=get_cell("slstm")) is None
    assert reason(dtype=torch.float32, heads=1, head_dim=33, reset=True) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"device": torch.device("cpu")},
            "it runs on CUDA and ROCm GPUs, and on the CPU under TRITON_INTERPRET=1 only",
        ),
        ({"device": torch.device("mps")}, "it runs on CUDA and ROCm GPUs, not on mps"),
        ({"dtype": torch.float64}, "it computes in bfloat16, float16 and float32, not in torch.float64"),
        ({"head_dim": 129}, "it serves head sizes up to 128, got 129"),
        (
            {"head_dim": 96, "dtype": torch.float32},
            "the recurrent matrices of a head take 256 KiB (head size 96, padded to 128, torch.float32), "
            "and the 227 KiB of a multiprocessor must hold them and a step",
        ),
    ],
    ids=["cpu", "device", "dtype", "head size", "room"],
)
def test_reasons_of_the_problem(changes, expected):
    assert reason(**changes) == expected


def test_reasons_of_the_gpu():
    v100 = replace(named_gpu("A100"), name="V100", capability=(7, 0))
    assert reason(assumed_gpu=v100) == "it needs compute capability 8.0, V100 has 7.0"
    rtx_4090 = named_gpu("RTX 4090")
    assert reason(assumed_gpu=rtx_4090) is None
    assert reason(assumed_gpu=rtx_4090, head_dim=100).endswith(
        "the 99 KiB of a multiprocessor must hold them and a step"
    )


@pytest.mark.usefixtures("interpreted")
def test_reasons_of_the_interpreter():
    assert reason() == "under TRITON_INTERPRET=1 it runs on the CPU alone"
    assert (
        reason(device=torch.device("cpu")) == "Triton's interpreter computes bfloat16 wrongly; use float16 or float32"
    )


def test_cell_without_a_scalar_graph():
    cell = Cell("sorted", lambda g, h: torch.lgamma(g + h), ("h",))
    assert reason(cell=cell).startswith("cell 'sorted' uses the operator aten.lgamma.default")


def test_triton_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert reason() == "triton is not installed; it comes with PyTorch for GPUs on Linux"
