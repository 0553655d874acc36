"""Properties of the CUDA kernels besides correct results: reproducibility, streams, CUDA graphs, memory."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flashrnn import FlashRNN, flashrnn, get_cell
from flashrnn.cuda.resident import backend, concurrent_gradient
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.cuda.zeros import _cached_zeros
from flashrnn.gpu import named_gpu
from flashrnn.memory_format import empty_in_format
from flashrnn.products import weight_gradient_of_states
from tests.problems import Inputs, random_reset, results
from tests.suite import Case, check, inputs_for
from tests.tolerances import assert_close

LSTM = get_cell("lstm")


both_backends = pytest.mark.parametrize("backend", ["cuda_fused", "cuda"])


def on_gpu(backend: str, B: int, T: int, N: int, D: int) -> Inputs:
    return inputs_for(backend, Case(B=B, T=T, N=N, D=D), torch.bfloat16, torch.device("cuda", 0))


@pytest.mark.parametrize("D", [64, 768])
@both_backends
def test_reruns_are_bitwise_equal(backend, D):
    inputs = on_gpu(backend, 16, 100, 1, D)
    first = results(flashrnn, inputs, function=LSTM, backend=backend)
    second = results(flashrnn, inputs, function=LSTM, backend=backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("D", [200, 254])
def test_gates_padded_to_whole_cache_lines(cell, D, time_major):
    case = Case(get_cell(cell), B=11, T=9, N=3, D=D, reset=time_major, time_major=time_major)
    check("cuda_fused", case, torch.bfloat16, "cuda:0")


@pytest.mark.parametrize(("N", "D", "B"), [(12, 64, 16), (1, 768, 16), (1, 768, 64)], ids=str)
def test_call_runs_no_copy_or_fill_kernels(N, D, B):
    case = Case(B=B, T=32, N=N, D=D, time_major=True)
    Wx, R, b, _ = inputs_for("cuda_fused", case, torch.bfloat16, torch.device("cuda", 0))
    d_h = torch.randn(32, B, N, D, device="cuda", dtype=torch.bfloat16).transpose(0, 1)

    def run():
        h, _ = flashrnn(Wx, R, b, None, LSTM, "cuda_fused")
        torch.autograd.grad(h, (Wx, R, b), d_h)

    b = b.detach().float().requires_grad_()
    run()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]
    assert "flashrnn_forward" in names
    assert "flashrnn_backward" in names
    assert not [name for name in names if re.search("copy|memcpy|memset|fill|transpose", name, re.IGNORECASE)]


@both_backends
def test_compiled_layer_equals_the_eager_layer_under_autocast(backend):
    torch.manual_seed(0)
    layer = FlashRNN(64, 128, num_heads=2, function="slstm", batch_first=True, device="cuda", backend=backend)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(4, 33, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out, expected = compiled(x)[0], layer(x)[0]
        assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(y.float().square().sum(), layer.parameters()) for y in (out, expected)]
    assert_close(*({str(k): g for k, g in enumerate(gs)} for gs in gradients), torch.bfloat16)
    assert {g.dtype for g in gradients[0]} == {torch.float32}


@both_backends
def test_many_concurrent_calls_on_two_streams(backend):
    small, wide = on_gpu(backend, 8, 16, 2, 64), on_gpu(backend, 8, 16, 1, 512)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = [flashrnn(*inputs, backend=backend)[0].detach() for inputs in (small, wide)]
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(5000):
            for stream, inputs in zip(streams, (small, wide), strict=True):
                with torch.cuda.stream(stream):
                    last = flashrnn(*inputs, backend=backend)[0]
                    if inputs is small:
                        first = last
    torch.cuda.synchronize()
    assert torch.equal(first, expected[0])
    assert torch.equal(last, expected[1])


def test_new_thread_can_launch_kernels():
    """If PyTorch's cache provides the memory, the launch is the thread's first call of the driver."""
    inputs = on_gpu("cuda_fused", B=3, T=5, N=2, D=64)
    expected = flashrnn(*inputs)[0].clone()
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(lambda: flashrnn(*inputs)[0]).result(), expected)


@pytest.mark.parametrize("D", [64, 63, 1024])
@both_backends
def test_cuda_graph_captures_forward_and_backward(backend, D):
    inputs = on_gpu(backend, 8, 50, 1, D)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        h, _ = flashrnn(*inputs, function=LSTM, backend=backend)
        d_h = torch.randn_like(h)
        torch.autograd.grad(h, inputs, d_h)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashrnn(*inputs, function=LSTM, backend=backend)[0]
        d_Wx = torch.autograd.grad(captured, inputs, d_h)[0]
    expected = torch.autograd.grad(flashrnn(*inputs, function=LSTM, backend=backend)[0], inputs, d_h)[0]
    assert expected.isfinite().all()
    for _ in range(3):
        d_Wx.zero_()
        graph.replay()
        assert torch.equal(d_Wx, expected)


def test_cuda_graph_captures_a_first_call_without_states():
    Wx, R, b, states = on_gpu("cuda_fused", 64, 20, 1, 768)
    stream, zero = torch.cuda.Stream(), torch.zeros_like(states)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        h, _ = flashrnn(Wx, R, b, zero, LSTM, "cuda_fused")
        d_h = torch.randn_like(h)
        (expected,) = torch.autograd.grad(h, Wx, d_h)
    torch.cuda.current_stream().wait_stream(stream)
    _cached_zeros.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashrnn(Wx, R, b, None, LSTM, "cuda_fused")[0]
        (d_Wx,) = torch.autograd.grad(captured, Wx, d_h)
    filler = [torch.full((2**18,), torch.nan, device="cuda") for _ in range(64)]  # overwrites freed zeros
    for _ in range(2):
        graph.replay()
        assert torch.equal(captured, h)
        assert torch.equal(d_Wx, expected)
    assert len(filler) == 64


def test_zeros_of_initial_states_are_allocated_and_freed_by_pytorch():
    Wx, R, b, _ = on_gpu("cuda_fused", 64, 4, 1, 768)
    _cached_zeros.cache_clear()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        flashrnn(Wx, R, b, None, LSTM, "cuda_fused")
    assert torch.cuda.memory_allocated() == before + 2**20  # at least 64 x 768 x 2 states x 4 bytes
    _cached_zeros.cache_clear()
    assert torch.cuda.memory_allocated() == before


def test_layer_compiled_to_cuda_graphs_equals_the_eager_layer():
    torch.manual_seed(0)
    layer = FlashRNN(64, 128, num_heads=2, batch_first=True, device="cuda", dtype=torch.bfloat16, backend="cuda_fused")
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    _cached_zeros.cache_clear()
    for _ in range(4):  # eager, warm-up, capture, replay
        x = torch.randn(4, 33, 64, device="cuda", dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        out, expected = compiled(x)[0], layer(x)[0]
        torch.testing.assert_close(out, expected)
        gradients = [torch.autograd.grad(y.float().square().sum(), layer.parameters()) for y in (out, expected)]
        assert_close(*({str(k): g for k, g in enumerate(gs)} for gs in gradients), torch.bfloat16)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("function", "N", "D", "B", "dtype"),
    [
        ("lstm", 12, 64, 64, torch.bfloat16),
        ("lstm", 12, 50, 16, torch.bfloat16),
        ("lstm", 12, 100, 16, torch.bfloat16),
        ("gru", 1, 768, 32, torch.bfloat16),
        ("lstm", 1, 768, 32, torch.bfloat16),
        ("lstm", 1, 768, 16, torch.bfloat16),
        ("lstm", 12, 200, 16, torch.bfloat16),  # three tiles in turns
        ("lstm", 12, 248, 16, torch.bfloat16),
        ("lstm", 12, 64, 16, torch.float32),
        ("gru", 6, 128, 16, torch.float32),
        ("lstm", 3, 256, 16, torch.float32),
        ("gru", 1, 768, 16, torch.float32),  # three tiles in turns
        ("lstm", 1, 768, 16, torch.float32),  # four tiles in turns
    ],
)
def test_overlapped_d_R_equals_d_R_after_the_loop(monkeypatch, function, N, D, B, dtype, reset, time_major):
    case = Case(get_cell(function), B=B, T=1000, N=N, D=D, time_major=time_major)
    inputs = inputs_for("cuda_fused", case, dtype, torch.device("cuda", 0))
    resets = random_reset(B, 1000).cuda() if reset else None

    # With another scale, reading memory of an earlier call gives wrong results, which the exact comparison detects.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        first, second, again = (_d_R(inputs, function, scale, resets) for scale in (1, -2, 1))
        torch.cuda.synchronize()
    assert any(event.name == "flashrnn_concurrent_gradient" for event in profiled.events())
    assert torch.equal(second, -2 * first)
    assert torch.equal(again, first)
    monkeypatch.setattr(concurrent_gradient, "overlapped", lambda *_: None)
    backend._plan.cache_clear()
    assert_close({"d_R": first}, {"d_R": _d_R(inputs, function, 1, resets)}, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("time_major", [False, True])
def test_overlapped_kernel_equals_float64(dtype, time_major):
    torch.manual_seed(0)
    B, T, N, D, producers = 16, 1000, 12, 64, 96
    outer = (T, B) if time_major else (B, T)
    d_Wx, h = torch.randn(*outer, 4, N, D, device="cuda").to(dtype), torch.randn(*outer, N, D, device="cuda").to(dtype)
    if time_major:
        d_Wx, h = d_Wx.transpose(0, 1), h.transpose(0, 1)
    reset, d_u = random_reset(B, T).cuda(), empty_in_format(h, 0, N, D)
    spec = KernelSpec("backward", LSTM, N, D, B, dtype, named_gpu("H200"), Variant(reset=True))
    tiling = concurrent_gradient.overlapped(spec, producers)
    concurrent = concurrent_gradient.ConcurrentGradient(spec, tiling, producers, h, None, reset)
    concurrent.progress.fill_(producers)  # the kernel does not wait, because there is no loop
    expected = weight_gradient_of_states(LSTM, d_Wx.double(), d_u.double(), h.double(), None, reset)
    assert_close({"d_R": concurrent(d_Wx, d_u)}, {"d_R": expected}, dtype)


def _d_R(inputs: Inputs, function: str, scale: float, reset: torch.Tensor | None = None) -> torch.Tensor:
    h, _ = flashrnn(*inputs, function=function, backend="cuda_fused", reset=reset)
    return torch.autograd.grad(h, inputs.R, torch.full_like(h, scale))[0]


def test_many_overlapped_d_R_on_two_streams():
    problems = [on_gpu("cuda_fused", 16, 128, *sizes) for sizes in ((12, 64), (1, 768))]
    expected, streams = [_d_R(inputs, "lstm", 1) for inputs in problems], [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    wrong = []
    for i in range(1000):
        scale = (1, -2)[i % 2]
        for stream, inputs, d_R in zip(streams, problems, expected, strict=True):
            with torch.cuda.stream(stream):
                wrong.append((_d_R(inputs, "lstm", scale) != scale * d_R).any())
    torch.cuda.synchronize()
    assert not torch.stack(wrong).any()


@pytest.mark.parametrize(("N", "D"), [(12, 64), (1, 768)])  # clusters, a grid
def test_cuda_graph_captures_overlapped_d_R(N, D):
    inputs = on_gpu("cuda_fused", 16, 256, N, D)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        h, _ = flashrnn(*inputs, function=LSTM, backend="cuda_fused")
        d_h = torch.randn_like(h)
        (expected,) = torch.autograd.grad(h, inputs.R, d_h)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashrnn(*inputs, function=LSTM, backend="cuda_fused")[0]
        (d_R,) = torch.autograd.grad(captured, inputs.R, d_h)
    for _ in range(3):
        graph.replay()
        assert torch.equal(d_R, expected)
        d_h.mul_(-2)
        expected = -2 * expected
