"""The correctness suite for the backend of the CPU."""

import pytest
import torch

from flashrnn import get_cell
from tests.problems import (
    COMPETING,
    LAYERNORM,
    MINIMAL_GATED,
    NORMALISED_ELMAN,
    NORMALISED_LSTM,
    NORMALISED_STATE,
    PEEPHOLE_LSTM,
)
from tests.suite import (
    CELL_CASES,
    HEADS_CASES,
    LAYOUT_CASES,
    LENGTH_CASES,
    RESET_CASES,
    SIZE_CASES,
    Case,
    check,
    check_no_states,
)


def slow(case: Case):
    return pytest.param(case, marks=pytest.mark.slow)


WIDTHS = (1, 20, 33, 64, 100, 512)  # head sizes with and without padding to a width of the kernels
# Kernels of cells with reductions are compiled for each head size, in 1 to 7 s.
LAYERNORM_LSTM, LAYERNORM_GRU = LAYERNORM
NORMALISED_FLOAT32 = [
    *(Case(cell, 9, 33, D=33, reset=True) for cell in (LAYERNORM_GRU, NORMALISED_STATE, COMPETING)),
    *(slow(Case(cell, 9, 33, D=33, reset=True)) for cell in (LAYERNORM_LSTM, NORMALISED_ELMAN, NORMALISED_LSTM)),
    *(slow(Case(cell, N=3, D=64)) for cell in (LAYERNORM_LSTM, COMPETING)),
    *(slow(Case(LAYERNORM_GRU, B=B, T=T, N=1, D=D)) for B, T, D in ((1, 1, 1), (17, 2, 256), (3, 257, 20))),
]
NORMALISED_OTHERS = [slow(Case(cell, N=3, D=64)) for cell in (LAYERNORM_LSTM, LAYERNORM_GRU, COMPETING)]
# A few cells for other dtypes, with exponential, logarithm and all kinds of gates.
OF_SOME_CELLS = [Case(cell, N=3, D=64) for cell in (get_cell("slstm"), MINIMAL_GATED, PEEPHOLE_LSTM)]
LARGE_CASES = [Case(get_cell("gru"), 11, 9, 2, 387, reset=True), Case(MINIMAL_GATED, 6, 9, 1, 400, time_major=True)]
CASES = [
    *CELL_CASES,
    *NORMALISED_FLOAT32,
    *(case for case in RESET_CASES if case.D == 32),
    *(case for case in LENGTH_CASES if case.T <= 63 or (case.B == 3 and case.T == 257)),
    *(case for case in SIZE_CASES if case.D in WIDTHS),
    *HEADS_CASES,
    *LAYOUT_CASES,
    *LARGE_CASES,
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_fused_float32(case):
    check("cpu_fused", case, torch.float32, "cpu")


@pytest.mark.parametrize("case", [*OF_SOME_CELLS, *NORMALISED_OTHERS, *LAYOUT_CASES, *LARGE_CASES], ids=str)
def test_cpu_fused_bfloat16(case):
    check("cpu_fused", case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("backend", ["cpu_fused", "vanilla"])
@pytest.mark.parametrize("case", OF_SOME_CELLS, ids=str)
def test_missing_states_are_zeros(case, backend):
    check_no_states(backend, case, torch.float64, "cpu")


@pytest.mark.parametrize("case", [*OF_SOME_CELLS, *LAYOUT_CASES, *NORMALISED_OTHERS], ids=str)
def test_cpu_fused_float64(case):
    check("cpu_fused", case, torch.float64, "cpu")
