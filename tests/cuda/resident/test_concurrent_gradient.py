"""The kernel for d_R that overlaps with the time loop: results on the processor, when it is used, and its binaries."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashrnn import get_cell, products
from flashrnn.cells.gates import recurrent_only
from flashrnn.cuda.parameters import Parameter
from flashrnn.cuda.resident import backend
from flashrnn.cuda.resident import concurrent_gradient as module
from flashrnn.cuda.resident.concurrent_gradient import (
    ConcurrentGradient,
    Tiling,
    compile_kernel,
    overlapped,
    parameters,
    prelude,
)
from flashrnn.cuda.resident.solver import tilings
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from flashrnn.memory_format import empty_in_format
from tests.cuda.host_kernel import HostKernel, compile_for_host
from tests.problems import random_reset
from tests.suite import Case

LSTM, GRU, ELMAN = map(get_cell, ("lstm", "gru", "elman"))
H100 = named_gpu("H100")
PRODUCERS = 3


# Blocks that write the rows of their sequences step by step, like the loop, while other blocks read them.
LOOP = """
constexpr int PRODUCERS = 3;
static int begun = primary_blocks += PRODUCERS;
static std::atomic<int> readers{0};
void with_loop(const scalar* given, PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const u32* progress = params.progress;
  const i64 B = params.B, T = params.T;
  if (blockIdx.x >= PRODUCERS) {
    blockIdx.x -= PRODUCERS, readers++;
    while (BEGINS_LATE && primary_blocks.load(std::memory_order_acquire) > 0) yield();
    return flashrnn_concurrent_gradient(PARAMETER_NAMES);
  }
  if (threadIdx.x > 0) return;
  if (blockIdx.x == 0) {  // delay the others, to detect readers that do not wait
    while (primary_blocks.load(std::memory_order_relaxed) > 1 || readers < blockDim.x) yield();
    for (int turn = 0; turn < 100; turn++) yield();
  }
  for (int done = 0, end = 0; done < T; done++) {
    if (done == end) {
      if (done > 0) signal(const_cast<u32*>(progress++));
      end += chunk_steps(done, T - done);
    }
    for (i64 b = blockIdx.x; b < B; b += PRODUCERS) {
      const i64 row = params.row_t == 1 ? b * T + T - 1 - done : (T - 1 - done) * B + b, width = GI * HEADS * D;
      std::copy_n(given + row * width, width, const_cast<scalar*>(params.d_x) + row * width);
    }
  }
  primary_blocks.fetch_sub(1, std::memory_order_release), wake(&primary_blocks);
}
"""


@pytest.fixture
def on_host(monkeypatch):
    """Let the kernels run on the processor, the first concurrently with a loop that writes the gradients `given`, or
    `late`: when that has ended."""

    def use(given: Tensor, late: bool = False) -> None:
        @cache
        def kernel(spec, tiling, device):
            header, text = "resident/kernels/concurrent_gradient.cuh", prelude(spec, tiling)
            shape, own = (None, tiling.threads(spec.dtype), H100.shared_per_block), parameters(spec)
            if tiling.resumes:
                return HostKernel(compile_for_host("flashrnn_concurrent_gradient", text, header), own, *shape)
            loop = f"constexpr bool BEGINS_LATE = {int(late)};" + LOOP
            with_given = (Parameter("given", "const scalar*", spec.dtype), *own)
            loaded = HostKernel(compile_for_host("with_loop", text, header, loop), with_given, *shape)

            def launch(blocks, by_name):
                loaded.launch(PRODUCERS + blocks, {"given": given, **by_name})

            return SimpleNamespace(launch=launch)

        monkeypatch.setattr(module, "_kernel", kernel)

    return use


@pytest.mark.parametrize(
    ("case", "dtype", "states", "tiling"),
    [
        pytest.param(
            Case(LSTM, B=5, T=330, N=1, D=64),
            torch.bfloat16,
            True,
            Tiling(128, 64, tiles=1, blocks=2, rows=32),
            marks=pytest.mark.slow,
        ),
        (Case(LSTM, B=2, T=134, N=1, D=72, time_major=True), torch.float16, False, Tiling(128, 72, 1, 3, 64)),
        pytest.param(
            Case(ELMAN, B=1, T=131, N=1, D=296),
            torch.bfloat16,
            True,
            Tiling(128, 152, 2, 3, 32),
            marks=pytest.mark.slow,
        ),  # an empty tile
        pytest.param(
            Case(GRU, B=9, T=131, N=1, D=72, time_major=True),
            torch.bfloat16,
            True,
            Tiling(128, 40, 2, 2, 128),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(GRU, B=11, T=131, N=2, D=24, reset=True, time_major=True),
            torch.float16,
            True,
            Tiling(128, 24, 2, 1, 128),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(ELMAN, B=4, T=131, N=1, D=100, reset=True, time_major=True),
            torch.bfloat16,
            True,
            Tiling(128, 56, 2, 1, 64),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LSTM, B=3, T=180, N=2, D=56, time_major=True),
            torch.bfloat16,
            True,
            Tiling(192, 56, 3, 2, 64),
            marks=pytest.mark.slow,
        ),  # three turns; the last tiles of two blocks are empty
        pytest.param(
            Case(ELMAN, B=3, T=130, N=3, D=50), torch.bfloat16, True, Tiling(128, 56, 1, 3, 64), marks=pytest.mark.slow
        ),
        pytest.param(
            Case(GRU, B=6, T=130, N=2, D=40, reset=True, time_major=True),
            torch.float32,
            True,
            Tiling(128, 40, 2, 1, 32),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LSTM, B=3, T=180, N=1, D=72), torch.float32, True, Tiling(128, 72, 3, 1, 32), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_weight_gradient_is_the_sum_over_steps_and_sequences(on_host, case, dtype, states, tiling):
    _check_sum(on_host, case, dtype, states, tiling, 5e-6 if dtype == torch.float32 else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tiling"),
    [
        (Case(LSTM, B=3, T=131, N=1, D=36), Tiling(192, 40, 1, 1, 32)),
        (Case(GRU, B=6, T=130, N=2, D=40, reset=True, time_major=True), Tiling(128, 40, 2, 1, 32)),
    ],
    ids=["copies far ahead", "resets"],
)
def test_weight_gradient_with_tf32(on_host, case, tiling):
    _check_sum(on_host, case, torch.float32, True, tiling, 1e-4, tf32=True)


@pytest.mark.parametrize(
    ("case", "tiling", "tf32"),
    [
        (Case(ELMAN, B=2, T=134, N=1, D=72), Tiling(128, 40, 2, 1, 32), False),
        pytest.param(
            Case(LSTM, B=3, T=180, N=1, D=72, time_major=True), Tiling(128, 72, 3, 1, 32), False, marks=pytest.mark.slow
        ),
        pytest.param(
            Case(GRU, B=6, T=130, N=2, D=40, reset=True), Tiling(128, 40, 2, 1, 32), True, marks=pytest.mark.slow
        ),
    ],
    ids=["two turns", "three turns", "TF32"],
)
def test_rows_that_are_left_after_the_loop_are_added(on_host, case, tiling, tf32):
    atol = 1e-4 if tf32 else 5e-6
    added = _check_sum(on_host, case, torch.float32, True, tiling, atol, tf32, late=True)
    assert (added < case.T - 48).any()


def _check_sum(
    on_host,
    case: Case,
    dtype: torch.dtype,
    states: bool,
    tiling: Tiling,
    atol: float,
    tf32: bool = False,
    late: bool = False,
) -> Tensor | None:
    """Return the steps that the first kernel has added to each tile, if tiles take turns."""
    cell, B, T, N, D = case[:5]
    torch.manual_seed(0)
    h = torch.randn(T, B, N, D).transpose(0, 1) if case.time_major else torch.randn(B, T, N, D)
    h, given = h.to(dtype), empty_in_format(h, len(cell.input_gates), N, D).normal_().to(dtype)
    initial = torch.randn(len(cell.states), B, N, D).to(dtype).float() if states else None
    d_Wx = torch.full_like(given, torch.nan)
    d_u = empty_in_format(h, len(recurrent_only(cell)), N, D).normal_()
    reset = _resets(B, T) if case.reset else None
    on_host(given, late)
    spec = KernelSpec("backward", cell, N, D, B, dtype, H100, Variant(reset=case.reset, tf32=tf32))
    concurrent = ConcurrentGradient(spec, tiling, PRODUCERS, h, initial, reset)
    assert not concurrent.progress.any()
    out = concurrent(d_Wx, d_u)
    assert torch.equal(d_Wx, given)
    exact = [None if x is None else x.double() for x in (given, d_u, h, initial)]
    expected = products.weight_gradient_of_states(cell, *exact, reset)
    assert out.dtype == dtype
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol * expected.std().item())
    return concurrent.added


def _resets(B: int, T: int) -> Tensor:
    """Return resets at the first step, at steps around the end of a chunk, at all steps, and at random steps."""
    reset = random_reset(B, T)
    reset[0] = False
    reset[0, [0, T - 33, T - 32, T - 17, T - 16, T - 1]] = True
    reset[1] = True
    return reset


@pytest.mark.parametrize(
    ("cell", "heads", "head_dim", "batch", "dtype", "producers", "blocks"),
    [
        (LSTM, 12, 64, 64, torch.bfloat16, 96, 24),
        (LSTM, 12, 100, 16, torch.bfloat16, 96, 36),
        (LSTM, 12, 248, 16, torch.bfloat16, 96, 36),
        (LSTM, 1, 768, 32, torch.bfloat16, 96, 36),
        (LSTM, 1, 768, 32, torch.bfloat16, 112, None),  # 36 blocks do not fit
        (LSTM, 3, 256, 64, torch.bfloat16, 120, None),  # two tiles per block would take longer than the loop
        (LSTM, 1, 64, 16, torch.bfloat16, 8, None),  # too little work
        (GRU, 12, 64, 64, torch.bfloat16, 120, None),
        (ELMAN, 3, 256, 16, torch.bfloat16, 96, 24),
        (LSTM, 12, 64, 32, torch.float32, 96, 24),
        (
            LSTM,
            12,
            64,
            64,
            torch.float32,
            96,
            24,
        ),  # faster than narrow products of cuBLAS
        (LSTM, 1, 128, 256, torch.float32, 32, None),  # wide enough for cuBLAS
        (LSTM, 1, 512, 16, torch.float32, 64, 64),
        (LSTM, 1, 768, 16, torch.float32, 96, 36),  # four tiles per block
        (LSTM, 3, 512, 64, torch.float32, 96, None),  # six products of splits take longer than the loop and cuBLAS
        (LSTM, 12, 62, 32, torch.float32, 96, None),  # rows are not multiples of 16 bytes
    ],
)
def test_kernel_is_used_if_it_fits_next_to_the_loop(cell, heads, head_dim, batch, dtype, producers, blocks):
    tiling = overlapped(KernelSpec("backward", cell, heads, head_dim, batch, dtype, H100), producers)
    assert (tiling.blocks if tiling else None) == blocks


@pytest.fixture
def chosen(monkeypatch):
    """Return a function that returns the tiling next to the loop of an LSTM 12 x 64, B = 16."""

    def choose_with(T=1024, dtype=torch.bfloat16, reset=False, at_once=1000, **of_the_loop):
        monkeypatch.setattr(backend, "load", lambda *_: SimpleNamespace(at_once=at_once))
        monkeypatch.setattr(backend, "meanwhile", lambda *_: nullcontext())

        def choose(spec):
            return None, replace(next(tilings(spec)), **of_the_loop)

        spec = KernelSpec("backward", LSTM, 12, 64, 16, dtype, H100, Variant(reset, torch.float16, training=True))
        return backend._backward_kernel(choose, spec, T, device=0)[2]

    return choose_with


@pytest.mark.parametrize("changes", [{}, {"reset": True}, {"dtype": torch.float32}], ids=str)
def test_kernel_overlaps_with_a_loop_that_leaves_multiprocessors_free(chosen, changes):
    assert chosen(**changes).blocks == 24


@pytest.mark.parametrize(
    "changes", [{"T": 127}, {"at_once": 23}, {"sequences": 1}], ids=["short", "two waves", "another tiling"]
)
def test_kernel_does_not_overlap_with_a_short_or_large_loop(chosen, changes):
    assert chosen(**changes) is None


@pytest.mark.parametrize("name", ["A100", "B200"])
def test_kernel_requires_warpgroup_products(name):
    assert overlapped(KernelSpec("backward", LSTM, 12, 64, 16, torch.bfloat16, named_gpu(name)), 48) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 100, 128, 256, 384, 768])
def test_no_register_spills_in_the_loop(head_dim, dtype):
    """The kernel depends on the head size and on the number of gates only."""
    spec = KernelSpec("backward", LSTM, 768 // head_dim, head_dim, 16, dtype, H100, Variant(reset=True))
    for idle in (12, 36, 132):
        if tiling := Tiling.of(spec, idle):
            binary = compile_kernel(spec, tiling)
            assert binary.spilled <= (0 if tiling.tiles == 1 else 200)  # several tiles spill between turns
