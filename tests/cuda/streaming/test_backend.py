"""Backend `cuda` without a GPU: its kernels on the processor, compared with the reference, and its binaries."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from flashrnn import Cell, flashrnn, get_cell
from flashrnn.cuda import spec, weight_gradient
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.cuda.streaming import backend as streaming
from flashrnn.cuda.streaming import parameters
from flashrnn.cuda.streaming.backend import Cuda, compile_kernel, header
from flashrnn.cuda.streaming.tiling import Rows, Tiling, best_tiling, prelude, shared_bytes
from flashrnn.gpu import named_gpu
from flashrnn.problem import Problem
from tests.cuda.host_kernel import HostKernel, compile_for_host
from tests.problems import CELLS, COMPETING, LEAKY_ELMAN, MINIMAL_GATED, PEEPHOLE_LSTM, random_inputs
from tests.suite import Case, check, check_numbers_beyond_float16, check_tf32, tf32_on_the_processor

LSTM, GRU, SLSTM = map(get_cell, ("lstm", "gru", "slstm"))
# A cell with an input-only gate, a recurrent-only gate and a gate with only a bias.
THREE_KINDS = Cell("three_kinds", lambda x, r, b, h: torch.tanh(x + r * b), ("h",), ("x",), ("r",))
H100, A100, B200 = map(named_gpu, ("H100", "A100", "B200"))
SPILLED = 32  # allowed spills per thread in bytes: a few instructions of hundreds
TRAINING = Variant(aux=torch.float16, training=True)


@pytest.fixture
def on_host(monkeypatch, other_backends):
    """Return a function that lets `cuda` run on the processor with these tilings, `at_once` blocks at a time."""

    def use(tilings: dict[str, Tiling], at_once: int) -> None:
        @cache
        def kernel(spec, device):
            direction, tiling = spec.direction, tilings[spec.direction]
            library = compile_for_host(f"flashrnn_stream_{direction}", prelude(spec, tiling), header(spec))
            shape = None, tiling.threads, shared_bytes(spec, tiling)
            return HostKernel(library, parameters.streaming(spec), *shape, at_once), tiling

        monkeypatch.setattr(streaming, "_kernel", kernel)
        monkeypatch.setattr(streaming, "device_gpu", lambda index: H100)
        monkeypatch.setattr(spec, "tf32_allowed", tf32_on_the_processor)
        monkeypatch.setattr(weight_gradient, "has_kernel", lambda spec: False)
        monkeypatch.setattr(Cuda, "unsupported_reason", lambda self, problem: None)

    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    yield use
    torch.use_deterministic_algorithms(False)


def tilings(cell, D: int, dtype: torch.dtype, units: int, seq_tiles: int, warps: int, depth: int) -> dict[str, Tiling]:
    """Return tilings for both directions with the necessary number of vectors."""
    found = {}
    for direction in ("forward", "backward"):
        vectors = -(-Rows.of(KernelSpec(direction, cell, 1, D, 1, dtype, H100)).length * dtype.itemsize // 64)
        warp_vectors = -(-vectors // warps)
        found[direction] = Tiling(units, seq_tiles, warps, warp_vectors, min(depth, warp_vectors))
    return found


@pytest.mark.parametrize(
    ("case", "dtype", "tiling", "at_once"),
    [
        # padding in all directions; more vectors than are prefetched, and not a multiple
        pytest.param(Case(LSTM, B=3, T=5, N=2, D=37), torch.float16, (8, 1, 1, 2), 100, marks=pytest.mark.slow),
        # blocks with several items, of several groups; several cells per thread
        (Case(GRU, B=19, T=4, N=2, D=23, reset=True), torch.float16, (8, 1, 1, 1), 3),
        pytest.param(
            Case(SLSTM, B=18, T=3, N=1, D=16, reset=True), torch.float32, (8, 2, 1, 1), 1, marks=pytest.mark.slow
        ),
        pytest.param(
            Case(MINIMAL_GATED, B=3, T=4, N=2, D=11, time_major=True),
            torch.bfloat16,
            (8, 1, 2, 1),
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(PEEPHOLE_LSTM, B=2, T=3, N=1, D=20), torch.float32, (8, 1, 2, 2), 100, marks=pytest.mark.slow
        ),
        (Case(THREE_KINDS, B=3, T=4, N=2, D=16), torch.bfloat16, (8, 1, 1, 1), 2),
        pytest.param(
            Case(get_cell("layernorm_lstm"), B=3, T=3, N=1, D=20),
            torch.float32,
            (8, 1, 2, 1),
            100,
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(COMPETING, B=17, T=3, N=1, D=18), torch.float32, (8, 2, 1, 1), 100, marks=pytest.mark.slow),
        # steps with reductions: several launches, and an odd head size
        (Case(get_cell("layernorm_gru"), B=18, T=3, N=2, D=27, reset=True), torch.bfloat16, (8, 1, 1, 1), 5),
        pytest.param(
            Case(LEAKY_ELMAN, B=2, T=3, N=2, D=9, reset=True, time_major=True),
            torch.float32,
            (16, 1, 1, 1),
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_kernels_on_the_processor(on_host, case, dtype, tiling, at_once):
    on_host(tilings(case.cell, case.D, dtype, *tiling), at_once)
    check("cuda", case, dtype, "cpu")
    if len(case.cell.states) > 1:  # only h may have a gradient
        check("cuda", case, dtype, "cpu", flashrnn)


@pytest.mark.slow
def test_kernels_with_tf32_on_the_processor(on_host):
    case = Case(SLSTM, B=18, T=5, N=1, D=21, reset=True)
    on_host(tilings(case.cell, case.D, torch.float32, 8, 2, 2, 1), at_once=2)
    check_tf32("cuda", case, "cpu")


@pytest.mark.slow
def test_gradients_with_numbers_beyond_float16(on_host):
    on_host(tilings(SLSTM, 16, torch.float16, 8, 1, 2, 1), at_once=100)
    check_numbers_beyond_float16("cuda", "cpu")


def test_gradients_of_biases_are_summed_in_float32(on_host):
    """The gradient of each step is 1.001, which bfloat16 would round to 1."""
    cell = Cell("scaled", lambda g, h: 1.001 * g, ("h",))
    on_host(tilings(cell, 16, torch.bfloat16, 8, 1, 2, 1), at_once=1)
    B, T, N, D = 3, 5, 2, 16
    Wx, R = torch.randn(B, T, 1, N, D).bfloat16(), torch.zeros(1, N, D, D).bfloat16()
    b = torch.zeros(1, N, D, requires_grad=True)
    flashrnn(Wx, R, b, function=cell, backend="cuda")[0].sum().backward()
    torch.testing.assert_close(b.grad, torch.full_like(b, 1.001 * B * T))


@pytest.mark.slow
def test_inference_on_the_processor(on_host):
    """Kernels that store no residual return the same states as in training."""
    case = Case(SLSTM, B=3, T=4, N=2, D=11)
    on_host(tilings(case.cell, case.D, torch.float32, 8, 1, 2, 1), at_once=100)
    inputs = random_inputs(case.cell, case.B, case.T, case.N, case.D).to(torch.float32)
    trained = flashrnn(*inputs, case.cell, "cuda")
    with torch.no_grad():
        inferred = flashrnn(*inputs, case.cell, "cuda")
    for found, expected in zip(inferred, trained, strict=True):
        assert torch.equal(found, expected)


def test_rows_are_stored_in_the_order_of_multiplication():
    """For each vector, the elements of all rows of a block, padded with zeros."""
    N, gates, D, K = 2, 3, 5, 40
    tiling = Tiling(units=4, seq_tiles=1, warps=2, warp_vectors=2, depth=1)
    rows = torch.randn(N, gates, D, K, generator=torch.Generator().manual_seed(0))
    found = streaming.in_order(rows, tiling)
    assert found.shape == (N, 2, 4, gates, 4, 16)
    assert torch.equal(found[1, 0, 2, 1, 3], torch.cat([rows[1, 1, 3, 32:], torch.zeros(8)]))
    assert torch.equal(found[1, 1, 1, 2, 0], rows[1, 2, 4, 16:32])
    assert not found[:, 1, :, :, 1:].any()
    assert not found[:, :, 3].any()


def binaries() -> list[tuple]:
    """Return GPU, cell, heads, head size, batch and dtype of tested binaries."""
    cells = [(H100, cell, 1, 1024, 16, torch.bfloat16) for cell in CELLS]
    sizes = [(H100, LSTM, *size, torch.bfloat16) for size in ((12, 64, 16), (1, 4096, 16), (4, 2048, 256), (3, 33, 1))]
    floats = [(H100, cell, 1, 1024, batch, torch.float32) for cell, batch in ((LSTM, 16), (SLSTM, 64))]
    return [*cells, *sizes, *floats, (A100, LSTM, 1, 768, 64, torch.float16), (B200, SLSTM, 1, 2048, 64, torch.float32)]


def name(value) -> str:
    return str(getattr(value, "name", value))


@pytest.mark.usefixtures("one_batch")
@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "cell", "heads", "head_dim", "batch", "dtype"), binaries(), ids=name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_binaries_have_few_spills(direction, gpu, cell, heads, head_dim, batch, dtype):
    binary, _ = compile_kernel(KernelSpec(direction, cell, heads, head_dim, batch, dtype, gpu, TRAINING))
    assert gpu.arch in binary.path.name
    assert binary.spilled <= SPILLED


@pytest.mark.usefixtures("one_batch")
@pytest.mark.parametrize(
    ("direction", "variant"),
    [
        ("forward", replace(TRAINING, aux=None, training=False)),
        ("forward", replace(TRAINING, reset=True)),
        ("backward", replace(TRAINING, reset=True, aux=torch.float32, d_aux=True)),
    ],
    ids=str,
)
def test_variants_have_few_spills(direction, variant):
    spec = KernelSpec(direction, SLSTM, 1, 1024, 16, torch.bfloat16, H100, variant)
    assert compile_kernel(spec)[0].spilled <= SPILLED


@pytest.mark.usefixtures("one_batch")
@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "cell", "batch"), [(H100, LSTM, 16), (H100, SLSTM, 64), (A100, LSTM, 16)], ids=name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_binaries_with_tf32_have_few_spills(direction, gpu, cell, batch):
    variant = replace(TRAINING, aux=torch.float32, tf32=True)
    spec = KernelSpec(direction, cell, 1, 1024, batch, torch.float32, gpu, variant)
    assert compile_kernel(spec)[0].spilled <= SPILLED


@pytest.mark.parametrize("gpu", [H100, A100, B200], ids=name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_work_is_spread_over_the_whole_gpu(direction, gpu):
    """In the waves of work items of a step, at least 60 % of the multiprocessors have work."""
    for heads, D, batch in ((12, 64, 16), (1, 768, 16), (1, 1024, 64), (1, 4096, 16), (4, 2048, 16), (1, 8192, 256)):
        tiling = best_tiling(KernelSpec(direction, LSTM, heads, D, batch, torch.bfloat16, gpu))
        items = tiling.groups(heads, batch) * tiling.unit_blocks(D)
        waves = -(-items // gpu.multiprocessors)
        assert items >= 0.6 * waves * gpu.multiprocessors, (heads, D, batch, tiling)


PROBLEM = Problem(LSTM, 1, 4096, torch.bfloat16, torch.device("cuda"), True, False, H100)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"head_dim": 1001, "dtype": torch.float32}, None),
        ({"device": torch.device("cpu")}, "it runs on CUDA GPUs, not on cpu"),
        ({"dtype": torch.float64}, "it computes in bfloat16, float16 and float32, not in torch.float64"),
    ],
    ids=["supported", "odd float32", "device", "dtype"],
)
def test_reasons_for_unsupported_problems(changes, expected):
    assert Cuda().unsupported_reason(PROBLEM._replace(**changes)) == expected


def test_reason_of_a_cell_with_too_many_gates():
    names = [f"g{k}" for k in range(57)]
    scope = {}
    exec(f"def step({', '.join(names)}, h): return {' + '.join(names)}", scope)
    reason = Cuda().unsupported_reason(PROBLEM._replace(cell=Cell("many", scope["step"], ("h",))))
    assert reason.startswith("forward does not fit: no solution")
    assert "registers" in reason
