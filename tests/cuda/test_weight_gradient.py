"""The kernel for d_R of narrow heads, on the processor, and its binaries."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from flashrnn import get_cell, products
from flashrnn.cells.gates import recurrent_only
from flashrnn.cuda import dtype_kernel, sum_of_partials
from flashrnn.cuda import weight_gradient as module
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.cuda.weight_gradient import Tiling, WeightGradient, compile_kernel, parameters, prelude
from flashrnn.gpu import Gpu, named_gpu
from flashrnn.memory_format import empty_in_format
from tests.cuda.host_kernel import HostKernel, compile_for_host, loaded_on_host
from tests.cuda.resident.test_kernels import GPUS
from tests.problems import random_reset
from tests.suite import Case

LSTM, GRU, ELMAN = map(get_cell, ("lstm", "gru", "elman"))


@pytest.fixture
def on_host(monkeypatch):
    """Return a function that lets the kernel run on the processor, with rows split between clusters or not."""

    def use(gpu: str, split: bool) -> Gpu:
        @cache
        def kernel(spec, device):
            tiling = Tiling.of(spec)
            entry, header = "flashrnn_weight_gradient", "kernels/weight_gradient.cuh"
            library = compile_for_host(entry, prelude(spec, tiling), header)
            shape = tiling.blocks, 32 * tiling.warps, tiling.shared_bytes
            return HostKernel(library, parameters(spec), *shape), tiling

        monkeypatch.setattr(module, "_kernel", kernel)
        monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)
        return replace(named_gpu(gpu), shared_per_block=80_000, multiprocessors=1000 if split else 1)

    return use


@pytest.mark.parametrize(
    ("case", "dtype", "states", "gpu", "split"),
    [
        pytest.param(Case(LSTM, B=5, T=70, N=2, D=64), torch.bfloat16, True, "A100", True, marks=pytest.mark.slow),
        pytest.param(Case(LSTM, B=7, T=400, N=2, D=32), torch.bfloat16, True, "H100", True, marks=pytest.mark.slow),
        (Case(GRU, B=3, T=5, N=2, D=16, reset=True), torch.float16, True, "H100", False),
        (Case(LSTM, B=3, T=40, N=2, D=10), torch.bfloat16, True, "H100", False),
        pytest.param(
            Case(GRU, B=9, T=40, N=3, D=24, reset=True, time_major=True),
            torch.bfloat16,
            False,
            "A100",
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(ELMAN, B=2, T=9, N=3, D=40, time_major=True),
            torch.bfloat16,
            True,
            "H100",
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LSTM, B=3, T=50, N=2, D=100, reset=True), torch.bfloat16, True, "H100", True, marks=pytest.mark.slow
        ),
        pytest.param(Case(ELMAN, B=3, T=20, N=5, D=12), torch.bfloat16, True, "A100", True, marks=pytest.mark.slow),
        (Case(LSTM, B=1, T=1, N=2, D=8), torch.bfloat16, True, "A100", False),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_weight_gradient_is_the_sum_over_steps_and_sequences(on_host, case, dtype, states, gpu, split):
    agrees(case, dtype, states, on_host(gpu, split))


def test_weight_gradient_with_half_of_the_heads_backwards(on_host):
    agrees(Case(GRU, B=3, T=40, N=2, D=10, time_major=True), torch.bfloat16, True, on_host("H100", False), True)


def random_operands(case: Case, dtype: torch.dtype, states: bool) -> tuple[torch.Tensor | None, ...]:
    """Return random d_Wx, d_u, h, initial states and resets."""
    cell, B, T, N, D = case[:5]
    torch.manual_seed(0)
    h = torch.randn(T, B, N, D).transpose(0, 1) if case.time_major else torch.randn(B, T, N, D)
    gates = len(cell.input_gates), len(recurrent_only(cell))
    d_Wx, d_u = (empty_in_format(h, n, N, D).normal_() for n in gates)
    h, d_Wx, d_u = h.to(dtype), d_Wx.to(dtype), d_u.to(dtype)
    initial = torch.randn(len(cell.states), B, N, D).to(dtype).float() if states else None
    reset = random_reset(B, T) if case.reset else None
    return d_Wx, d_u, h, initial, reset


def agrees(case: Case, dtype: torch.dtype, states: bool, gpu: Gpu, bidirectional: bool = False) -> None:
    """Check that the kernel's d_R equals that of `products`, and that the inputs do not change."""
    cell, B, T, N, D = case[:5]
    variant = Variant(reset=case.reset, bidirectional=bidirectional)
    spec = KernelSpec("backward", cell, N, D, B, dtype, gpu, variant)
    d_Wx, d_u, h, initial, reset = random_operands(case, dtype, states)
    before = [x.clone() for x in (h, d_Wx, d_u)]
    out = WeightGradient(spec, T, case.time_major, 0)(d_Wx, d_u, h, initial, reset)
    exact = [None if x is None else x.double() for x in (d_Wx, d_u, h, initial)]
    expected = products.weight_gradient_of_states(cell, *exact, reset, bidirectional)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4 * expected.std().item())
    assert all(torch.equal(x, y) for x, y in zip(before, (h, d_Wx, d_u), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("cell", "head_dim"),
    [("gru", 4), ("lstm", 16), ("elman", 32), ("gru", 62), ("lstm", 64), ("lstm", 96), ("gru", 100), ("lstm", 128)],
)
def test_no_register_spills(cell, head_dim, gpu):
    sizes = 768 // head_dim, head_dim, 16, torch.bfloat16
    spec = KernelSpec("backward", get_cell(cell), *sizes, named_gpu(gpu), Variant(reset=True))
    binary, tiling = compile_kernel(spec)
    assert GPUS[gpu] in binary.path.name
    assert binary.spilled == 0
    assert tiling.stages >= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_of_partials(on_host, dtype):
    on_host("H100", True)
    partial = torch.randn(3, 5, 62)
    out = sum_of_partials.sum_of_partials(partial, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, partial.sum(0).to(dtype))
