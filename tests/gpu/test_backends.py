"""The correctness suite on a GPU, for every backend."""

import itertools

import pytest
import torch

from flashrnn import backends, flashrnn, get_cell, hoisting
from tests.problems import LAYERNORM, NORMALISED, cell_name
from tests.suite import (
    ALL_CASES,
    CELL_CASES,
    HOISTED_CASES,
    LAYOUT_CASES,
    RESET_CASES,
    RESIDENT_NORMALISED_CASES,
    SIZE_CASES,
    Case,
    check,
    check_no_states,
    check_numbers_beyond_float16,
    equal_units,
    inputs_for,
    large_mean_of_c,
)

ON_GPU = [name for name in backends() if name not in ("cpu_fused", "vanilla")]


@pytest.mark.parametrize("case", [*ALL_CASES, *RESIDENT_NORMALISED_CASES], ids=str)
@pytest.mark.parametrize("backend", ON_GPU)
def test_bfloat16(backend, case):
    check(backend, case, torch.bfloat16, "cuda:0")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CELL_CASES, *SIZE_CASES], ids=str)
@pytest.mark.parametrize("backend", ON_GPU)
def test_other_dtypes(backend, case, dtype):
    check(backend, case, dtype, "cuda:0")
    check(backend, case, dtype, "cuda:0", flashrnn)


@pytest.mark.parametrize("case", [*CELL_CASES, *RESET_CASES, *SIZE_CASES, *LAYOUT_CASES], ids=str)
@pytest.mark.parametrize("backend", ON_GPU)
def test_h_without_other_states(backend, case):
    check(backend, case, torch.bfloat16, "cuda:0", flashrnn)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", NORMALISED, ids=cell_name)
@pytest.mark.parametrize("backend", ON_GPU)
def test_other_dtypes_of_normalised_cells(backend, cell, dtype):
    check(backend, Case(cell, N=3, D=64), dtype, "cuda:0", flashrnn)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *itertools.product(HOISTED_CASES, (torch.bfloat16, torch.float16)),
        *((case, torch.float32) for case in HOISTED_CASES if case.D <= 256),  # larger heads do not fit on the chip
    ],
    ids=str,
)
def test_hoisted_normalisation(case, dtype):
    assert hoisting.serves(case.cell, "cuda_fused", dtype, torch.device("cuda:0"), case.T, case.N, case.D)
    check("cuda_fused", case, dtype, "cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("cell", LAYERNORM, ids=cell_name)
@pytest.mark.parametrize("backend", ON_GPU)
def test_equal_units_are_normalised_to_zero(backend, cell, D, dtype):
    check(backend, Case(cell, N=1, D=D), dtype, "cuda:0", change=equal_units)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_inputs_are_normalised_to_zero_before_the_loop(dtype):
    check("cuda_fused", Case(LAYERNORM[0], T=40, N=1, D=256), dtype, "cuda:0", change=equal_units)


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("backend", ON_GPU)
def test_states_that_are_normalised_are_stored_exactly(backend, D):
    check(backend, Case(LAYERNORM[0], N=1, D=D), torch.bfloat16, "cuda:0", flashrnn, large_mean_of_c)


@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("D", [64, 256, 1024])
@pytest.mark.parametrize("cell", ["gru", "slstm"])
@pytest.mark.parametrize("backend", ON_GPU)
def test_missing_states_are_zeros(backend, cell, D, T):
    check_no_states(backend, Case(get_cell(cell), T=T, N=1, D=D), torch.bfloat16, "cuda:0")


@pytest.mark.parametrize("backend", ON_GPU)
def test_gradients_with_numbers_beyond_float16(backend):
    check_numbers_beyond_float16(backend, "cuda")


@pytest.mark.parametrize("D", [64, 63])
@pytest.mark.parametrize("backend", ON_GPU)
def test_retained_graph_gives_the_same_gradients_again(backend, D):
    inputs = inputs_for(backend, Case(N=1, D=D), torch.bfloat16, torch.device("cuda"))
    h, _ = flashrnn(*inputs, backend=backend)
    loss = h.float().square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
