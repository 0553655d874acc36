"""The correctness suite: cases and checks for every backend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flashrnn import Cell, flashrnn, get_cell
from flashrnn.dispatch import BACKENDS, padding
from flashrnn.problem import Problem, tf32_allowed
from tests.problems import (
    CELLS,
    HOISTED,
    LAYERNORM,
    NORMALISED,
    Inputs,
    all_states,
    random_inputs,
    random_reset,
    results,
)
from tests.tolerances import assert_close

LSTM = get_cell("lstm")


class Case(NamedTuple):
    cell: Cell = LSTM
    B: int = 5
    T: int = 20
    N: int = 2
    D: int = 32
    reset: bool = False
    time_major: bool = False

    def __str__(self) -> str:
        sizes = f"{self.cell.name}-{self.B}x{self.T}x{self.N}x{self.D}"
        return sizes + "-reset" * self.reset + "-time_major" * self.time_major


CELL_CASES = [Case(cell, N=3, D=64) for cell in CELLS]
RESET_CASES = [Case(cell, 9, 33, D=D, reset=True) for cell in CELLS for D in (32, 256)]
LENGTH_CASES = [Case(B=B, T=T, N=1) for B in (1, 3, 16, 65) for T in (1, 2, 63, 257, 1024)]
SIZES = (1, 16, 20, 22, 32, 33, 48, 64, 72, 96, 100, 128, 144, 160, 192, 256, 320, 512, 768, 1024, 2048)
SIZE_CASES = [Case(B=11, T=9, N=2 if D <= 256 else 1, D=D) for D in SIZES]
HEADS_CASES = [Case(B=9, T=6, N=N, D=16) for N in (1, 7, 48)]
LAYOUT_CASES = [
    *(Case(cell, B=9, T=33, time_major=True) for cell in (LSTM, get_cell("gru"))),
    Case(B=9, T=33, D=33, time_major=True, reset=True),
]
SPREAD_CASES = [Case(B=B, T=9, N=1, D=768) for B in (2, 23, 33)]  # batches spread over all clusters of a GPU
NORMALISED_CASES = [
    *(Case(cell, N=3, D=64) for cell in NORMALISED),
    *(Case(cell, 9, 33, D=33, reset=True) for cell in NORMALISED),
    *(Case(cell, B=B, T=T, N=1, D=D) for cell in LAYERNORM for B, T, D in ((1, 1, 1), (17, 2, 256), (3, 257, 20))),
]
RESIDENT_NORMALISED_CASES = [  # even sizes that are no multiples of the tiles, on clusters and grids
    *(Case(cell, 9, 33, D=34, reset=True) for cell in NORMALISED),
    *(Case(cell, B=9, T=17, N=1, D=400, reset=True) for cell in NORMALISED if cell not in LAYERNORM),
    *(Case(cell, B=17, T=9, N=1, D=D) for cell in LAYERNORM for D in (256, 768, 1100)),
]
HOISTED_CASES = [  # with enough steps for hoisting
    *(Case(cell, 9, 40, D=250, reset=True, time_major=True) for cell in HOISTED),
    *(Case(cell, B=17, T=33, N=1, D=D) for cell in HOISTED for D in (256, 768, 1100)),
    *(Case(cell, B=9, T=40, N=1, D=512, reset=True) for cell in HOISTED),  # loaders, and two sequences of a cluster
]
ALL_CASES = [
    *CELL_CASES,
    *NORMALISED_CASES,
    *RESET_CASES,
    *LENGTH_CASES,
    *SIZE_CASES,
    *HEADS_CASES,
    *LAYOUT_CASES,
    *SPREAD_CASES,
]


@contextmanager
def allowing_tf32(allowed: bool = True) -> Iterator[None]:
    """A context in which PyTorch allows TF32 for matrix products, or not."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def tf32_on_the_processor(dtype: torch.dtype, device: torch.device) -> bool:
    """Return `tf32_allowed` for a GPU, for tests that run kernels of GPUs on the processor."""
    return tf32_allowed(dtype, torch.device("cuda"))


def problem(backend: str, case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return the problem of a case, including the padding of its heads."""
    cell, _, _, N, D, reset, _ = case
    D += padding(backend, cell.key, N, D, dtype, device, training=True)
    return Problem(cell, N, D, dtype, device, training=True, reset=reset, tf32=tf32_allowed(dtype, device))


def inputs_for(backend: str, case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Return random inputs; skip the test with the reason if the backend does not support the case."""
    (chosen,) = (b for b in BACKENDS if b.name == backend)
    if reason := chosen.unsupported_reason(problem(backend, case, dtype, device)):
        pytest.skip(reason)
    inputs = random_inputs(case.cell, case.B, case.T, case.N, case.D, seed=seed)
    Wx, *others = (x.detach().to(device, dtype) for x in inputs)
    if case.time_major:
        Wx = Wx.transpose(0, 1).contiguous().transpose(0, 1)
    return Inputs(*(x.requires_grad_() for x in (Wx, *others)))


def equal_units(cell: Cell, inputs: Inputs) -> Inputs:
    """Return inputs that are equal for all units of a head."""
    Wx, R, b, states = (x.detach() for x in inputs)
    same = Wx[..., :1], R[..., :1, :1], b[..., :1], states[..., :1]
    expanded = (one.expand_as(x) for one, x in zip(same, inputs, strict=True))
    return Inputs(*(x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in expanded))


def large_mean_of_c(cell: Cell, inputs: Inputs) -> Inputs:
    """Return inputs for which an LSTM's c stays near 1000 in all units.

    The rounding error of half types is then as large as the variation over units.
    """
    Wx, R, b, states = (x.detach().clone() for x in inputs)
    b[cell.gates.index("f")] = 20
    states[1] += 1000
    return Inputs(*(x.requires_grad_() for x in (Wx, R, b, states)))


def check(
    backend: str,
    case: Case,
    dtype: torch.dtype,
    device: str,
    run: Callable = all_states,
    change: Callable[[Cell, Inputs], Inputs] = lambda cell, inputs: inputs,
) -> None:
    """Compare outputs, last states and all gradients of `run` with the float64 reference.

    The inputs are random, and modified by `change`.
    """
    inputs = change(case.cell, inputs_for(backend, case, dtype, torch.device(device)))
    options = {"function": case.cell, "of_h": case.cell.name == "slstm"}
    if case.reset:
        options["reset"] = random_reset(case.B, case.T).to(device)
    out, peers = (results(run, inputs, backend=b, **options) for b in (backend, "vanilla"))
    reference = results(run, inputs.to(torch.float64), backend="vanilla", **options)
    assert_close(out, reference, dtype, peers)


def check_tf32(backend: str, case: Case, device: str, run: Callable = flashrnn) -> None:
    """Do the same as `check` in float32 while PyTorch allows TF32."""
    options = {"function": case.cell, "of_h": case.cell.name == "slstm"}
    if case.reset:
        options["reset"] = random_reset(case.B, case.T).to(device)
    with allowing_tf32():
        inputs = inputs_for(backend, case, torch.float32, torch.device(device))
        out = results(run, inputs, backend=backend, **options)
    peers = results(run, inputs, backend="vanilla", **options)
    reference = results(run, inputs.to(torch.float64), backend="vanilla", **options)
    assert_close(out, reference, torch.float32, peers, tf32=True)


def check_no_states(backend: str, case: Case, dtype: torch.dtype, device: str) -> None:
    """Check that results without initial states are those with initial states of zero."""
    inputs = inputs_for(backend, case, dtype, torch.device(device))
    inputs = inputs._replace(states=torch.zeros_like(inputs.states).requires_grad_())

    def without_states(Wx: Tensor, R: Tensor, b: Tensor, states: Tensor, **options) -> tuple[Tensor, Tensor]:
        h, last = flashrnn(Wx, R, b, **options)
        return h, last + 0 * states  # so that `states` has a gradient

    out, expected = (
        results(run, inputs, function=case.cell, backend=backend, of_h=case.cell.name == "slstm")
        for run in (without_states, flashrnn)
    )
    del out["gradient of states"], expected["gradient of states"]
    assert_close(out, expected, dtype)


def check_numbers_beyond_float16(backend: str, device: str) -> None:
    """Check the gradients of an sLSTM with a gate and a stabiliser m beyond the range of float16."""
    cell = get_cell("slstm")
    inputs = random_inputs(cell, 3, 4, 1, 16, torch.float16)
    with torch.no_grad():
        inputs.Wx[:, 1, 0], inputs.b[cell.gates.index("i")] = 60000, 10000
    inputs = Inputs(*(x.detach().to(device).requires_grad_() for x in inputs))
    for run in (flashrnn, all_states):
        options = {"function": cell, "of_h": True}
        out = results(run, inputs, backend=backend, **options)
        reference = results(run, inputs.to(torch.float64), backend="vanilla", **options)
        gradients = [name for name in out if name.startswith("gradient")]
        assert_close(
            {name: out[name] for name in gradients}, {name: reference[name] for name in gradients}, torch.float16
        )
