"""The correctness suite on the CPU, for the backend made for it."""

import pytest
import torch

from flashrnn import get_cell
from tests.problems import MINIMAL_GATED
from tests.suite import (
    CELL_CASES,
    HEADS_CASES,
    LAYOUT_CASES,
    LENGTH_CASES,
    NORMALISED_CASES,
    RESET_CASES,
    SIZE_CASES,
    Case,
    check,
    check_no_states,
)

WIDTHS = (1, 20, 33, 64, 100, 512)  # head sizes that fill a width of the kernels, and such that do not
# Kernels of cells that reduce over units are compiled for each head size: one of each cell, and the others are slow.
NORMALISED = [
    case if (case.D, case.reset) == (33, True) else pytest.param(case, marks=pytest.mark.slow)
    for case in NORMALISED_CASES
]
SLOW_NORMALISED = [pytest.param(case, marks=pytest.mark.slow) for case in NORMALISED_CASES]
LARGE_CASES = [Case(get_cell("gru"), 11, 9, 2, 387, reset=True), Case(MINIMAL_GATED, 6, 9, 1, 400, time_major=True)]
CASES = [
    *CELL_CASES,
    *NORMALISED,
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


OF_BFLOAT16 = [*CELL_CASES, *SLOW_NORMALISED, *LAYOUT_CASES, *LARGE_CASES]


@pytest.mark.parametrize("case", [*OF_BFLOAT16, *(case for case in RESET_CASES if case.D == 32)], ids=str)
def test_cpu_fused_bfloat16(case):
    check("cpu_fused", case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("backend", ["cpu_fused", "vanilla"])
@pytest.mark.parametrize("case", CELL_CASES, ids=str)
def test_no_states(case, backend):
    check_no_states(backend, case, torch.float64, "cpu")


@pytest.mark.parametrize("case", [*CELL_CASES, *LAYOUT_CASES, *SLOW_NORMALISED[:6]], ids=str)
def test_cpu_fused_float64(case):
    check("cpu_fused", case, torch.float64, "cpu")
