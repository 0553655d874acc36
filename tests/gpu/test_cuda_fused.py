"""The fused CUDA kernels against the float64 reference, on fresh random inputs."""

import pytest
import torch

from flashrnn import Cell, FlashRNN, flashrnn, get_cell
from flashrnn.cuda.backend import CudaFused
from flashrnn.problem import Problem
from tests.problems import CELLS, Inputs, cell_name, random_inputs, random_reset, reference_results, results
from tests.tolerances import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

LSTM = get_cell("lstm")


def on_gpu(cell: Cell, B: int, T: int, N: int, D: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs, or a skip with the reason why the backend does not serve them."""
    problem = Problem(cell, B, T, N, D, dtype, torch.device("cuda", 0), True, False)
    reason = CudaFused().supports(problem)
    if reason:
        pytest.skip(reason)
    return Inputs(*(x.detach().cuda().to(dtype).requires_grad_() for x in random_inputs(cell, B, T, N, D, seed=seed)))


def check(cell: Cell, inputs: Inputs, **options) -> None:
    options["of_h"] = cell.name == "slstm"
    out, peers = (results(flashrnn, inputs, function=cell, backend=b, **options) for b in ("cuda_fused", "vanilla"))
    assert_close(out, reference_results(inputs, cell, **options), inputs.Wx.dtype, peers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_every_cell_and_its_gradients(cell, dtype):
    check(cell, on_gpu(cell, 5, 20, 3, 64, dtype))


@pytest.mark.parametrize("D", [16, 20, 22, 32, 48, 64, 72, 96, 100, 128, 144, 160, 192, 256, 320, 512, 768, 1024, 2048])
def test_head_sizes(D):
    check(LSTM, on_gpu(LSTM, 11, 9, 2 if D <= 256 else 1, D, torch.bfloat16))


@pytest.mark.parametrize("B", [1, 3, 16, 65])
@pytest.mark.parametrize("T", [1, 2, 63, 257, 1024])
def test_batch_sizes_and_lengths(B, T):
    check(LSTM, on_gpu(LSTM, B, T, 1, 32, torch.bfloat16))


@pytest.mark.parametrize("N", [1, 7, 48])
def test_numbers_of_heads(N):
    check(LSTM, on_gpu(LSTM, 9, 6, N, 16, torch.bfloat16))


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
@pytest.mark.parametrize("D", [32, 256])
def test_resets(cell, D):
    check(cell, on_gpu(cell, 9, 33, 2, D, torch.bfloat16), reset=random_reset(9, 33).cuda())


def test_time_major_inputs():
    inputs = on_gpu(LSTM, 9, 33, 2, 32, torch.bfloat16)
    swapped = inputs.Wx.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    check(LSTM, inputs._replace(Wx=swapped))


@pytest.mark.parametrize("D", [64, 768])
def test_reruns_are_bitwise_equal(D):
    inputs = on_gpu(LSTM, 16, 100, 1, D, torch.bfloat16)
    first = results(flashrnn, inputs, function=LSTM, backend="cuda_fused")
    second = results(flashrnn, inputs, function=LSTM, backend="cuda_fused")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_compiled_layer_gives_the_same_results_under_autocast():
    torch.manual_seed(0)
    layer = FlashRNN(64, 128, num_heads=2, function="slstm", batch_first=True, device="cuda", backend="cuda_fused")
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(4, 33, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out, expected = compiled(x)[0], layer(x)[0]
        assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(y.float().square().sum(), layer.parameters()) for y in (out, expected)]
    assert_close(*({str(k): g for k, g in enumerate(gs)} for gs in gradients), torch.bfloat16)
    assert {g.dtype for g in gradients[0]} == {torch.float32}


def test_two_streams_at_once_for_a_long_time():
    small, wide = on_gpu(LSTM, 8, 16, 2, 64, torch.bfloat16), on_gpu(LSTM, 8, 16, 1, 512, torch.bfloat16)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = [flashrnn(*inputs, backend="cuda_fused")[0].detach() for inputs in (small, wide)]
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(5000):
            for stream, inputs in zip(streams, (small, wide), strict=True):
                with torch.cuda.stream(stream):
                    last = flashrnn(*inputs, backend="cuda_fused")[0]
                    if inputs is small:
                        first = last
    torch.cuda.synchronize()
    assert torch.equal(first, expected[0])
    assert torch.equal(last, expected[1])


def test_a_cuda_graph_captures_forward_and_backward():
    inputs = on_gpu(LSTM, 8, 50, 2, 64, torch.bfloat16)

    def run():
        return results(flashrnn, inputs, function=LSTM, backend="cuda_fused")["gradient of Wx"]

    expected = run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        every, _ = flashrnn(*inputs, function=LSTM, backend="cuda_fused")
        d_every = torch.randn_like(every)
        torch.autograd.grad(every, inputs, d_every)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashrnn(*inputs, function=LSTM, backend="cuda_fused")[0]
        d_Wx = torch.autograd.grad(captured, inputs, d_every)[0]
    d_Wx.zero_()
    graph.replay()
    again = torch.autograd.grad(flashrnn(*inputs, function=LSTM, backend="cuda_fused")[0], inputs, d_every)[0]
    assert torch.equal(d_Wx, again)
    assert expected.isfinite().all()
