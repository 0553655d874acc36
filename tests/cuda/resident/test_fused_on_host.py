"""The kernels of backend `cuda_fused` on the processor, compared with the reference."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashrnn import Cell, FlashRNN, cuda_layer, flashrnn, functional, get_cell, repeated, residual
from flashrnn.cuda import dtype_kernel, short_gradients, spec, weight_gradient
from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.resident import backend, calls, resources, single_step
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.parameters import fused
from flashrnn.cuda.resident.source import gate_format, prelude
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.gpu import named_gpu
from flashrnn.residual import converted
from tests.cuda.host_kernel import (
    HostKernel,
    compile_for_host,
    loaded_on_host,
    short_gradients_on_host,
    single_step_on_host,
)
from tests.problems import COMPETING, NORMALISED_LSTM, NORMALISED_STATE, all_states
from tests.suite import Case, check, check_tf32, equal_units, inputs_for, large_mean_of_c, tf32_on_the_processor
from tests.tolerances import assert_close

LSTM, GRU, SLSTM, LAYERNORM_LSTM, LAYERNORM_GRU = map(
    get_cell, ("lstm", "gru", "slstm", "layernorm_lstm", "layernorm_gru")
)


def tiled(unit_tiles, k_slices, batch_tiles, sequences, blocks, **others) -> Tiling:
    """Return a tiling. In clusters with fewer sequences than columns, their number is an argument by default."""
    fewer = blocks > 1 and sequences < 8 * batch_tiles
    rest = {"grid": False, "stages": 4, "register_fragments": 4, "any_sequences": fewer} | others
    return Tiling(unit_tiles, k_slices, batch_tiles, sequences, blocks, **rest)


# A thread that reads the results of each chunk as soon as all blocks have signalled it.
WATCHED = """
void watched(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  Thread reader;
  if (blockIdx.x == 0 && threadIdx.x == 0)
    start(reader, [=] {
      const i64 B = params.B, T = params.T;
      u32 sum = 0, *counter = params.progress;
      for (int done = 0, end; (end = done + chunk_steps(done, T - done)) < T; done = end) {
        await(counter++, BLOCKS);
        for (int step = done; step < end; step++)
          for (i64 b = 0; b < B; b++) {
            const i64 row = b * params.row_b + (T - 1 - step) * params.row_t;
            for (i64 i = 0; i < GI * ROW; i++) sum += params.d_x[row * GI * ROW + i].bits;
            for (i64 i = 0; i < GU * ROW; i++) sum += params.d_u[row * GU * ROW + i].bits;
          }
      }
      CHECK(counter > params.progress && sum > 0);
    });
  flashrnn_backward(PARAMETER_NAMES);
  if (blockIdx.x == 0 && threadIdx.x == 0) join(reader);
}
"""


class Counting(HostKernel):
    """A kernel with counters of chunks, whose final values are checked."""

    def launch(self, groups: int, by_name: Mapping[str, Argument]) -> None:
        counters = torch.zeros(4, dtype=torch.int32)
        super().launch(groups, {**by_name, "progress": counters})
        assert counters.tolist() == [self.blocks, self.blocks, 0, 0]  # chunks of 16 steps; the last one has no counter


@pytest.fixture
def on_host(monkeypatch, other_backends):
    """Return a function that lets `cuda_fused` run on the processor with these tilings; `watched`: signal chunks."""

    def use(tilings: dict[str, Tiling], watched: bool = False) -> None:
        @cache
        def kernel(choose, spec, device, dependent=False):
            direction, chosen = spec.direction, tilings[spec.direction]
            shared = resources.shared_bytes(spec, chosen)
            counts = watched and direction == "backward"
            text = prelude(replace(spec, gpu=named_gpu("H100")) if counts else spec, chosen, shared)
            entry, more = ("watched", WATCHED) if counts else (f"flashrnn_{direction}", "")
            library = compile_for_host(entry, text, f"resident/kernels/{direction}.cuh", more)
            kind = Counting if counts else HostKernel
            return kind(library, fused(spec), chosen.blocks, chosen.threads, shared), chosen

        monkeypatch.setattr(backend, "_kernel", kernel)
        monkeypatch.setattr(backend, "meanwhile", lambda *_: nullcontext())  # do not compile for a GPU
        monkeypatch.setattr(backend, "tf32_allowed", tf32_on_the_processor)
        monkeypatch.setattr(backend, "device_gpu", lambda index: named_gpu("A100"))  # d_R is computed after the loop
        monkeypatch.setattr(spec, "tf32_allowed", tf32_on_the_processor)
        monkeypatch.setattr(short_gradients, "serves", lambda spec, steps: False)
        monkeypatch.setattr(weight_gradient, "has_kernel", lambda spec: False)
        monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)
        monkeypatch.setattr(CudaFused, "unsupported_reason", lambda self, problem: None)

    for cached in (backend._forward, backend._backward, backend._plan):  # they depend on tilings
        cached.cache_clear()
    yield use
    for cached in (backend._forward, backend._backward, backend._plan):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("case", "dtype", "forward", "backward"),
    [
        (Case(LSTM, B=3, T=4, N=2, D=30), torch.bfloat16, tiled(2, 1, 1, 8, 1, stages=8), tiled(2, 1, 1, 8, 1)),
        (Case(LSTM, B=6, T=4, N=1, D=30), torch.float16, tiled(2, 1, 1, 4, 1), tiled(2, 1, 1, 4, 1)),
        (Case(GRU, B=3, T=67, N=1, D=16, reset=True), torch.float32, tiled(1, 1, 1, 4, 1), tiled(1, 1, 1, 8, 1)),
        pytest.param(
            Case(SLSTM, B=9, T=5, N=1, D=32, reset=True),
            torch.float32,
            tiled(1, 2, 1, 2, 2),
            tiled(1, 2, 2, 16, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(GRU, B=5, T=6, N=1, D=64),
            torch.float16,
            tiled(2, 1, 1, 4, 2),
            tiled(1, 4, 1, 4, 4, stages=2, register_fragments=0),
            marks=pytest.mark.slow,
        ),
        (
            Case(LSTM, B=6, T=5, N=1, D=30, reset=True),
            torch.bfloat16,
            tiled(1, 1, 1, 4, 2, any_sequences=False),
            tiled(2, 1, 1, 4, 1),
        ),
        pytest.param(
            Case(LSTM, B=3, T=6, N=1, D=192),
            torch.bfloat16,
            tiled(3, 1, 1, 4, 4),
            tiled(3, 2, 1, 8, 4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LSTM, B=9, T=8, N=1, D=64),
            torch.bfloat16,
            tiled(1, 2, 1, 8, 4, grid=True),
            tiled(1, 4, 2, 16, 4, grid=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "one block",
        "one block of few sequences",
        "resets of three words",
        "cluster float32",
        "cluster float16",
        "cluster of few sequences",
        "cluster in slices",
        "grid",
    ],
)
def test_kernels_on_the_processor(on_host, case, dtype, forward, backward):
    on_host({"forward": forward, "backward": backward})
    check("cuda_fused", case, dtype, "cpu")


@pytest.mark.parametrize(
    ("case", "dtype", "forward", "backward"),
    [
        pytest.param(
            Case(LAYERNORM_LSTM, B=3, T=3, N=2, D=30),
            torch.float32,
            tiled(2, 1, 1, 8, 1),
            tiled(2, 1, 1, 8, 1),
            marks=pytest.mark.slow,
        ),
        (
            Case(NORMALISED_LSTM, B=3, T=3, N=1, D=58, reset=True),
            torch.bfloat16,
            tiled(4, 4, 1, 8, 1),
            tiled(4, 2, 2, 16, 1),
        ),
        pytest.param(
            Case(COMPETING, B=9, T=3, N=1, D=32),
            torch.float32,
            tiled(2, 2, 2, 16, 1),
            tiled(2, 1, 1, 8, 1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_LSTM, B=7, T=3, N=1, D=32),
            torch.bfloat16,
            tiled(2, 1, 1, 4, 1),
            tiled(2, 2, 2, 8, 1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_GRU, B=3, T=3, N=1, D=32),
            torch.bfloat16,
            tiled(2, 1, 1, 8, 1),
            tiled(2, 1, 1, 8, 1),
            marks=pytest.mark.slow,
        ),
        # Half of the warps compute parts of the steps of the others.
        (Case(LAYERNORM_LSTM, B=3, T=5, N=2, D=32), torch.bfloat16, tiled(2, 1, 1, 2, 1), tiled(2, 1, 1, 2, 1)),
        # All of R is in registers, from which the weights of the mean are computed.
        (
            Case(LAYERNORM_LSTM, B=3, T=4, N=2, D=64),
            torch.bfloat16,
            tiled(4, 1, 1, 2, 1, register_fragments=16),
            tiled(4, 1, 1, 2, 1),
        ),
        pytest.param(
            Case(LAYERNORM_LSTM, B=9, T=4, N=1, D=32, reset=True),
            torch.float16,
            tiled(2, 1, 1, 8, 1, register_fragments=8),
            tiled(2, 1, 1, 8, 1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_LSTM, B=5, T=3, N=1, D=16),
            torch.float16,
            tiled(1, 1, 1, 4, 1, register_fragments=4),
            tiled(1, 1, 1, 4, 1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_GRU, B=3, T=3, N=1, D=32),
            torch.float32,
            tiled(2, 1, 1, 2, 1, stages=3),
            tiled(2, 1, 1, 2, 1, stages=3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(NORMALISED_LSTM, B=3, T=35, N=1, D=64, reset=True),
            torch.float16,
            tiled(4, 1, 1, 2, 1),
            tiled(4, 1, 1, 2, 1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(COMPETING, B=3, T=4, N=1, D=32, reset=True),
            torch.bfloat16,
            tiled(2, 1, 1, 2, 1, register_fragments=0),
            tiled(2, 1, 1, 2, 1, register_fragments=0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(NORMALISED_LSTM, B=7, T=3, N=1, D=64, reset=True),
            torch.bfloat16,
            tiled(4, 2, 1, 8, 1),
            tiled(4, 1, 1, 4, 1),
            marks=pytest.mark.slow,
        ),
        (
            Case(NORMALISED_STATE, B=3, T=5, N=2, D=16),
            torch.float32,
            tiled(1, 1, 1, 4, 1, register_fragments=0),
            tiled(1, 1, 2, 16, 1, register_fragments=0),
        ),
        pytest.param(
            Case(LAYERNORM_LSTM, B=5, T=4, N=1, D=60),
            torch.float32,
            tiled(2, 1, 1, 4, 2, any_sequences=False),
            tiled(1, 2, 1, 6, 4, any_sequences=False),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_GRU, B=5, T=4, N=1, D=60),
            torch.bfloat16,
            tiled(2, 1, 1, 4, 2),
            tiled(1, 2, 1, 6, 4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(COMPETING, B=3, T=4, N=1, D=30, reset=True),
            torch.float32,
            tiled(1, 2, 1, 8, 2),
            tiled(1, 1, 1, 2, 2),
            marks=pytest.mark.slow,
        ),
        (Case(LAYERNORM_LSTM, B=3, T=4, N=1, D=60), torch.bfloat16, tiled(2, 4, 1, 4, 2), tiled(1, 4, 1, 4, 4)),
        pytest.param(
            Case(COMPETING, B=3, T=4, N=1, D=62, reset=True),
            torch.float32,
            tiled(1, 2, 1, 2, 4),
            tiled(1, 2, 1, 4, 4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(NORMALISED_STATE, B=9, T=5, N=1, D=144),
            torch.float16,
            tiled(1, 1, 2, 10, 9, any_sequences=False),
            tiled(1, 1, 1, 8, 9),
            marks=pytest.mark.slow,
        ),
        (
            Case(LAYERNORM_LSTM, B=3, T=4, N=1, D=128),
            torch.bfloat16,
            tiled(2, 2, 1, 4, 4, any_sequences=False),
            tiled(2, 2, 1, 4, 4, any_sequences=False, loaders=4),
        ),
        pytest.param(
            Case(NORMALISED_LSTM, B=5, T=35, N=1, D=128, reset=True),
            torch.float16,
            tiled(2, 4, 1, 4, 4, any_sequences=False),
            tiled(2, 2, 1, 2, 4, any_sequences=False, loaders=4, stages=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_LSTM, B=9, T=3, N=1, D=60),
            torch.bfloat16,
            tiled(1, 2, 1, 8, 4, grid=True),
            tiled(1, 4, 2, 16, 4, grid=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(LAYERNORM_LSTM, B=7, T=4, N=1, D=62, reset=True),
            torch.float32,
            tiled(1, 4, 1, 8, 4, grid=True),
            tiled(1, 4, 1, 8, 4, grid=True),
            marks=pytest.mark.slow,
        ),
        (
            Case(COMPETING, B=3, T=5, N=1, D=30, reset=True),
            torch.float32,
            tiled(1, 1, 1, 8, 2, grid=True),
            tiled(1, 2, 1, 8, 2, grid=True),
        ),
    ],
    ids=[
        "one block",
        "one block in slices",
        "one block maximum",
        "one block of few sequences",
        "rows that are no multiple of the threads",
        "warps that help",
        "centred sums",
        "centred sums with resets",
        "centred sums in eight lanes",
        "warps that help in float32",
        "warps that help with resets",
        "warps that help maximum",
        "a warp for a sequence",
        "a warp for four sequences",
        "cluster",
        "cluster of any number of sequences",
        "cluster maximum",
        "cluster of few sequences",
        "cluster of few sequences maximum",
        "cluster of nine",
        "cluster with loaders",
        "cluster with loaders and resets",
        "grid",
        "grid of one cell for each lane",
        "grid maximum",
    ],
)
def test_cells_with_reductions_on_the_processor(on_host, case, dtype, forward, backward):
    on_host({"forward": forward, "backward": backward})
    check("cuda_fused", case, dtype, "cpu")


@pytest.mark.parametrize(
    "run", [pytest.param(all_states, marks=pytest.mark.slow), flashrnn], ids=["all states", "h alone"]
)
def test_equal_units_are_normalised_to_zero(on_host, run):
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(1, 1, 1, 8, 2)})
    check("cuda_fused", Case(LAYERNORM_LSTM, B=3, T=3, N=1, D=30), torch.bfloat16, "cpu", run, equal_units)


def test_centred_sums_of_equal_units_are_zero(on_host):
    on_host({"forward": tiled(2, 1, 1, 2, 1, register_fragments=8), "backward": tiled(2, 1, 1, 2, 1)})
    check("cuda_fused", Case(LAYERNORM_LSTM, B=3, T=3, N=1, D=32), torch.bfloat16, "cpu", flashrnn, equal_units)


@pytest.mark.slow
def test_states_that_are_normalised_are_stored_exactly(on_host):
    """Even if the cell allows storing its states in float16."""
    cell = Cell("half_states", LAYERNORM_LSTM.step, LAYERNORM_LSTM.states, float16_states=True)
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(2, 1, 1, 8, 1)})
    check("cuda_fused", Case(cell, B=3, T=3, N=1, D=30), torch.bfloat16, "cpu", flashrnn, large_mean_of_c)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (Case(LSTM, B=3, T=6, N=2, D=30), tiled(2, 1, 1, 8, 1, stages=8), tiled(2, 1, 1, 8, 1)),
        (Case(SLSTM, B=9, T=5, N=1, D=32, reset=True), tiled(1, 2, 1, 2, 2), tiled(1, 2, 2, 16, 2)),
        (Case(LSTM, B=6, T=5, N=1, D=62), tiled(1, 4, 1, 4, 4), tiled(1, 4, 1, 4, 4)),
        (Case(GRU, B=9, T=8, N=1, D=110), tiled(1, 1, 1, 8, 7, grid=True), tiled(1, 1, 2, 16, 7, grid=True)),
    ],
    ids=["one block", "cluster", "cluster in slices", "grid"],
)
def test_kernels_with_tf32_on_the_processor(on_host, case, forward, backward):
    on_host({"forward": forward, "backward": backward})
    check_tf32("cuda_fused", case, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (Case(LSTM, B=3, T=35, N=1, D=30), tiled(2, 1, 1, 8, 1, stages=8), tiled(2, 1, 1, 8, 1)),
        (
            Case(GRU, B=4, T=35, N=1, D=64),
            tiled(2, 1, 1, 4, 2),
            tiled(1, 4, 1, 4, 4, stages=2, register_fragments=0),
        ),
        (Case(LSTM, B=9, T=35, N=1, D=64), tiled(1, 2, 1, 8, 4, grid=True), tiled(1, 4, 2, 16, 4, grid=True)),
    ],
    ids=["one block", "cluster", "grid"],
)
def test_chunks_are_signalled_after_their_results_are_written(on_host, case, forward, backward):
    on_host({"forward": forward, "backward": backward}, watched=True)
    check("cuda_fused", case, torch.bfloat16, "cpu", flashrnn)


def test_padded_heads(on_host, monkeypatch):
    monkeypatch.setattr(functional, "padding", lambda name, cell, heads, head_dim, *others: -head_dim % 8)
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(2, 1, 1, 8, 1)})
    check("cuda_fused", Case(LSTM, B=3, T=4, N=2, D=27, time_major=True), torch.bfloat16, "cpu", flashrnn)


@pytest.mark.parametrize("time_major", [False, True], ids=["", "time_major"])
def test_gates_padded_to_whole_cache_lines(on_host, monkeypatch, time_major):
    monkeypatch.setattr(residual, "_WHOLE_LINES_ABOVE", 16)
    gate_format.cache_clear()
    assert gate_format(LSTM, 2, 24, torch.bfloat16) == "NDG+"
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(2, 1, 1, 8, 1)})
    check("cuda_fused", Case(LSTM, B=3, T=4, N=2, D=24, time_major=time_major), torch.bfloat16, "cpu")
    gate_format.cache_clear()


def test_nan_does_not_spread_to_other_sequences(on_host):
    """For small heads, a warp reduces several sequences at once."""
    on_host({"forward": tiled(2, 1, 1, 4, 1), "backward": tiled(2, 1, 1, 4, 1)})
    inputs = inputs_for("cuda_fused", Case(LAYERNORM_LSTM, B=4, T=2, N=1, D=32), torch.bfloat16, torch.device("cpu"))
    Wx, *others = (x.detach() for x in inputs)
    Wx[1, 0, 0, 0, 3] = torch.nan
    h, _ = flashrnn(Wx, *others, function=LAYERNORM_LSTM, backend="cuda_fused")
    assert h.isfinite().all(dim=(1, 2, 3)).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("D", "forward", "backward"),
    [
        pytest.param(32, tiled(2, 1, 1, 8, 1), tiled(2, 1, 1, 4, 1), marks=pytest.mark.slow),
        (60, tiled(1, 4, 1, 4, 4, any_sequences=False), tiled(1, 4, 1, 4, 4, any_sequences=False)),
        pytest.param(60, tiled(2, 1, 2, 8, 2), tiled(1, 2, 2, 16, 4), marks=pytest.mark.slow),
        pytest.param(60, tiled(1, 2, 1, 8, 4, grid=True), tiled(1, 4, 1, 8, 4, grid=True), marks=pytest.mark.slow),
    ],
    ids=["one block", "cluster of few sequences", "cluster", "grid"],
)
def test_float32_numbers_of_all_magnitudes(on_host, D, forward, backward):
    """Products are those of float16 numbers with a scale per sequence."""
    on_host({"forward": forward, "backward": backward})
    inputs = inputs_for("cuda_fused", Case(LAYERNORM_GRU, B=4, T=3, N=1, D=D), torch.float32, torch.device("cpu"))
    sizes = torch.tensor([1e-30, 1.0, 1e30, torch.nan]).view(4, 1, 1, 1)
    states = inputs.states.detach() * torch.tensor([1.0, 1e-6, 1e6, 1.0]).view(1, 4, 1, 1)
    d_h = torch.randn(4, 3, 1, D, generator=torch.Generator().manual_seed(1)) * sizes

    def run(dtype: torch.dtype, backend: str) -> list[dict[str, torch.Tensor]]:
        Wx, R, b, first = (x.detach().to(dtype).requires_grad_() for x in inputs._replace(states=states))
        h, _ = flashrnn(Wx, R, b, first, function=LAYERNORM_GRU, backend=backend)
        d_Wx, d_first = torch.autograd.grad(h, (Wx, first), d_h.to(dtype))
        return [{"h": h[i], "d_Wx": d_Wx[i], "d_states": d_first[:, i]} for i in range(3)]

    for out, reference in zip(run(torch.float32, "cuda_fused"), run(torch.float64, "vanilla"), strict=True):
        assert_close(out, reference, torch.float32)


def test_backward_does_not_overwrite_gates_of_a_retained_graph(on_host):
    """Without retain_graph, the gradient of Wx is written to their memory."""
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(2, 1, 1, 8, 1)})
    inputs = inputs_for("cuda_fused", Case(LSTM, B=3, T=4, N=2), torch.bfloat16, torch.device("cpu"))
    h, last = flashrnn(*inputs, function=LSTM, backend="cuda_fused")
    gates = h.grad_fn.saved_tensors[5]
    saved = gates.clone()
    other, _ = flashrnn(*inputs, function=LSTM, backend="vanilla")
    written = converted(saved, CudaFused().gate_format(LSTM, 2, 32, torch.bfloat16), "GND", LSTM, None, 32)
    assert_close({"gates": written}, {"gates": other.grad_fn.saved_tensors[5]}, torch.bfloat16)
    loss = h.float().square().sum() + last.sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert torch.equal(gates, saved)
    second = torch.autograd.grad(loss, inputs)
    assert not torch.equal(gates, saved)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("time_major", "changes"),
    [(False, {}), (True, {}), (True, {"states": None}), (False, {"b": torch.float32})],
    ids=["", "time_major", "no states", "wide bias"],
)
def test_repeated_call_reuses_the_decisions(on_host, monkeypatch, time_major, changes):
    """Gradients equal those of the first call, also with a retained graph and with hooks of saved tensors."""
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(2, 1, 1, 8, 1)})
    monkeypatch.setattr(calls, "zeros", lambda device, size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(repeated, "on_gpu", lambda x: True)
    monkeypatch.setattr(repeated, "_CALLS", {})
    case = Case(LSTM, B=3, T=4, N=2, time_major=time_major)
    Wx, R, b, states = (x.detach() for x in inputs_for("cuda_fused", case, torch.bfloat16, torch.device("cpu")))
    given = [Wx, R, b.to(changes.get("b", torch.bfloat16)), *([] if "states" in changes else [states.float()])]
    given = [x.requires_grad_() for x in given]

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return flashrnn(*given, function=LSTM, backend="cuda_fused")

    def gradients(call=call, **options) -> tuple[torch.Tensor, ...]:
        h, last = call()
        return torch.autograd.grad(h.float().square().sum() + last.sum(), given, **options)

    first = gradients(lambda: checkpoint(call, use_reentrant=False))  # the backward pass repeats the call
    (known,) = repeated._CALLS.values()
    assert known.training
    monkeypatch.setattr(functional, "_check", None)
    for again in (gradients(), gradients(retain_graph=True)):
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(first, again, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x):
        torch.testing.assert_close(gradients(), first, rtol=2e-2, atol=1e-2)  # the order of sums may differ
    with pytest.raises(RuntimeError, match="second derivative"):
        gradients(create_graph=True)[0].sum().backward()


def test_initial_states_may_have_the_batch_outermost_in_memory(on_host):
    on_host({"forward": tiled(2, 1, 1, 8, 1), "backward": tiled(2, 1, 1, 8, 1)})
    *others, states = inputs_for("cuda_fused", Case(LSTM, B=3, T=4, N=2), torch.bfloat16, torch.device("cpu"))
    by_sequence = states.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()

    def gradients(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, last = flashrnn(*others, states, function=LSTM, backend="cuda_fused")
        return torch.autograd.grad(h.float().square().sum() + last.sum(), [*others, states])

    assert all(torch.equal(x, y) for x, y in zip(gradients(states), gradients(by_sequence), strict=True))


ONE_BLOCK = {"forward": tiled(2, 1, 1, 8, 1, stages=8), "backward": tiled(2, 1, 1, 8, 1)}
CLUSTER = {
    "forward": tiled(2, 1, 1, 4, 2),
    "backward": tiled(1, 4, 1, 4, 4, stages=2, register_fragments=0),
}


@pytest.mark.parametrize(
    ("steps", "options", "tilings"),
    [
        (None, {"hidden_size": 60, "num_heads": 2}, ONE_BLOCK),
        (4, {"hidden_size": 60, "num_heads": 2}, ONE_BLOCK),
        (4, {"hidden_size": 32, "bidirectional": True}, ONE_BLOCK),
        pytest.param(
            5,
            {"hidden_size": 64, "bidirectional": True, "batch_first": True, "function": "gru"},
            CLUSTER,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["step", "sequence", "both directions", "both directions in clusters"],
)
def test_cuda_layer_launches_these_kernels(on_host, monkeypatch, steps, options, tilings):
    serves = short_gradients.serves
    on_host(tilings)
    monkeypatch.setattr(short_gradients, "serves", serves)
    monkeypatch.setattr(short_gradients, "_kernel", short_gradients_on_host)
    monkeypatch.setattr(single_step, "_kernel", single_step_on_host)
    monkeypatch.setattr(calls, "zeros", lambda device, size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(cuda_layer, "on_gpu", lambda x: True)
    monkeypatch.setattr(cuda_layer, "is_faster", lambda *_: True)
    monkeypatch.setattr(calls, "joined_states", torch.cat)  # no address: it is invalid in another process
    cuda_layer._forward.cache_clear()
    torch.manual_seed(0)
    short = FlashRNN(6, backend="cuda_fused", dtype=torch.bfloat16, **options)
    shape = (3,) if steps is None else (3, steps) if short.batch_first else (steps, 3)
    x = torch.randn(*shape, 6, dtype=torch.bfloat16)

    def results(network: FlashRNN, call) -> list[torch.Tensor]:
        with torch.no_grad():
            _, states = call(x, None, None)
        out, last = call(x, states, None)
        last = last if isinstance(last, tuple) else (last,)
        loss = out.float().sin().sum() + sum((i + 2) * state.square().sum() for i, state in enumerate(last))
        return [out, *last, *torch.autograd.grad(loss, network.parameters())]

    found = results(short, lambda *arguments: cuda_layer.run(short, *arguments))
    cuda_layer._forward.cache_clear()
    monkeypatch.setattr(cuda_layer, "run", lambda *_: None)
    general = FlashRNN(6, backend="vanilla", dtype=torch.bfloat16, **options)
    general.load_state_dict(short.state_dict())
    expected = results(general, general.step if steps is None else general)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
