"""FlashRNN compared with PyTorch's networks on a GPU, on every path through a layer."""

from copy import deepcopy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from flashrnn import FlashRNN, concurrent_layers, cuda_layer, cudnn, directions, documents, eager_layer, flat_weights
from flashrnn.cuda.resident import layers
from tests.flashrnn.networks import results
from tests.tolerances import assert_close

LAYERS = {
    "eager_layer": (eager_layer, "run"),
    "cuda_layer": (cuda_layer, "run"),
    "cudnn": (cudnn, "run"),
    "directions": (directions, "at_once"),
}


@pytest.fixture
def taken(monkeypatch):
    """Return a list of the names of the paths that calls take."""
    names = []

    def recorded(name: str, run):
        def record(*args):
            done = run(*args)
            names.extend([] if done is None else [name])
            return done

        return record

    for name, (module, function) in LAYERS.items():
        monkeypatch.setattr(module, function, recorded(name, getattr(module, function)))
    return names


def agree(kind, dtype: torch.dtype, x, states=None, **options) -> None:
    """Compare FlashRNN in `dtype` on the GPU with PyTorch's network in float64 on the CPU."""
    torch.manual_seed(0)
    theirs = kind(64, 128, **options, dtype=torch.float64)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(weight.to(dtype))
    ours = FlashRNN.from_torch(theirs).to(device="cuda", dtype=dtype)
    rounded = x.to(dtype).double()
    given = None if states is None else tuple(s.to(dtype).double() for s in states)
    expected = results(theirs, rounded, given)
    on_gpu = None if given is None else tuple(s.to(dtype).cuda() for s in given)
    found = results(ours, rounded.to(dtype).cuda(), on_gpu)
    assert_close({name: value.cpu() for name, value in found.items()}, expected, dtype)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layer_as_one_function(kind, dtype, taken):
    options = {} if kind is nn.LSTM else {"num_layers": 2, "batch_first": True, "bias": False}
    agree(kind, dtype, randn(17, 5, 64), **options)
    assert taken == ["cuda_layer"]


@DTYPES
@pytest.mark.parametrize(("kind", "packed"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, False)], ids=str)
def test_both_directions_at_once(kind, packed, dtype, taken):
    x = randn(17, 5, 64)
    x = pack_sequence([x[:T, b] for b, T in enumerate((3, 17, 9, 1, 12))], enforce_sorted=False) if packed else x
    agree(kind, dtype, x, num_layers=2, bidirectional=True)
    assert taken == (["directions"] * 2 if packed else ["cuda_layer"])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("kind", "size"), [*product(["lstm", "gru"], [64, 320, 512, 1024]), ("layernorm_lstm", 64)])
def test_both_directions_at_once_equal_one_after_the_other(kind, size, batch_first, taken, monkeypatch):
    torch.manual_seed(0)
    options = {"function": kind, "batch_first": batch_first, "device": "cuda", "dtype": torch.bfloat16}
    network = FlashRNN(size, size, bidirectional=True, **options)
    x = randn(*((16, 200) if batch_first else (200, 16)), size).bfloat16().cuda()
    states = tuple(torch.randn(2, 16, size, device="cuda") for _ in network.cell.states)

    def found() -> dict[str, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out, last = network(leaf, states if len(states) > 1 else states[0])
        last = last if isinstance(last, tuple) else (last,)
        loss = out.float().sin().sum() + sum((2 * s).sin().sum() for s in last)
        gradients = torch.autograd.grad(loss, [leaf, *network.parameters()])
        return dict(enumerate([out.detach(), *(s.detach() for s in last), *gradients]))

    monkeypatch.setattr(cuda_layer, "is_faster", lambda *_: True)
    cuda_layer._forward.cache_clear()
    at_once = found()
    assert taken == ["cuda_layer"]
    cuda_layer._forward.cache_clear()
    monkeypatch.setattr(cuda_layer, "run", lambda *_: None)
    monkeypatch.setattr(directions, "at_once", lambda *_: None)
    assert_close(at_once, found(), torch.bfloat16)


@pytest.fixture
def at_once(monkeypatch):
    """Let layers run concurrently if they fit, unless `at_once.allowed` is False; count these calls."""

    def count(self, *arguments):
        found.calls += 1
        return run(self, *arguments)

    def overlapped(*arguments):
        return choose(*arguments) if found.allowed else None

    run, choose, found = (
        layers.OverlappedLayers.__call__,
        concurrent_layers._overlapped,
        SimpleNamespace(calls=0, allowed=True),
    )
    monkeypatch.setattr(layers, "_WORTH", 100)
    monkeypatch.setattr(layers.OverlappedLayers, "__call__", count)
    monkeypatch.setattr(concurrent_layers, "_overlapped", overlapped)
    choose.cache_clear()
    yield found
    choose.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no clusters")
class TestConcurrentLayers:
    @pytest.mark.parametrize(
        ("sizes", "options"),
        [
            ((16, 100, 512), {"num_layers": 4}),
            ((33, 64, 128), {"num_layers": 3, "function": "gru", "batch_first": True, "dtype": torch.float16}),
            ((1, 130, 72), {"num_layers": 2, "function": "elman", "bias": False}),
            ((5, 81, 256), {"num_layers": 2, "function": "slstm", "num_heads": 4}),
            ((7, 65, 64), {"num_layers": 6, "function": "gru", "batch_first": True}),
            # Not layernorm_lstm, whose layers amplify rounding errors tenfold each.
            ((7, 65, 64), {"num_layers": 3, "function": "layernorm_gru", "batch_first": True, "dtype": torch.float16}),
        ],
        ids=str,
    )
    def test_results_and_gradients_equal_layers_in_turn(self, sizes, options, at_once):
        torch.manual_seed(0)
        B, T, H = sizes
        network = FlashRNN(H, H, device="cuda", **{"dtype": torch.bfloat16, **options})
        x = randn(*((B, T) if network.batch_first else (T, B)), H).to(network.input_l0.weight.dtype).cuda()
        states = tuple(torch.randn(network.num_layers, B, H, device="cuda") for _ in network.cell.states)

        def found() -> dict[str, torch.Tensor]:
            leaf, given = x.clone().requires_grad_(), [s.clone().requires_grad_() for s in states]
            with torch.no_grad():
                alone, _ = network(x)
            out, last = network(leaf, tuple(given) if len(given) > 1 else given[0])
            last = last if isinstance(last, tuple) else (last,)
            loss = out.float().sin().sum() + sum((2 * s).sin().sum() for s in last)
            gradients = torch.autograd.grad(loss, [leaf, *given, *network.parameters()])
            return dict(enumerate([alone, out.detach(), *(s.detach() for s in last), *gradients]))

        first, again = found(), found()
        assert at_once.calls == 4
        assert all(torch.equal(first[i], again[i]) for i in first)
        at_once.allowed = False
        assert_close(first, found(), x.dtype)
        assert at_once.calls == 4

    def test_calls_on_several_streams_and_in_a_cuda_graph(self, at_once):
        torch.manual_seed(0)
        network = FlashRNN(512, 512, num_layers=4, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(128, 16, 512, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected, _ = network(x)
            torch.cuda.synchronize()
            streams, found = [torch.cuda.Stream() for _ in range(3)], []
            for stream in streams * 4:
                with torch.cuda.stream(stream):
                    found.append(network(x)[0])
            torch.cuda.synchronize()
            assert all(torch.equal(one, expected) for one in found)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, _ = network(x)
            graph.replay()
            assert at_once.calls == 13
            at_once.allowed = False
            assert torch.equal(out, network(x)[0])

    def test_create_graph_gives_the_same_gradients(self, at_once):
        """These gradients are computed layer by layer."""
        torch.manual_seed(0)
        network = FlashRNN(64, 64, num_layers=2, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(64, 4, 64, device="cuda", dtype=torch.bfloat16)
        weights = list(network.parameters())
        loss = network(x)[0].float().sin().sum()
        in_turn = torch.autograd.grad(loss, weights, create_graph=True)
        found = torch.autograd.grad(network(x)[0].float().sin().sum(), weights)
        assert at_once.calls == 2
        named = [dict(enumerate(t.detach() for t in of)) for of in (found, in_turn)]
        assert_close(*named, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}], ids=str)
def test_cudnn_equals_pytorch(kind, options, dtype, taken, monkeypatch):
    monkeypatch.setattr(cudnn, "fewest_steps", lambda *_: 1)
    monkeypatch.setattr(cudnn, "_may_be_faster", lambda *_: True)
    size = options.get("num_layers", 1) * (1 + options.get("bidirectional", False)), 5, 128
    states = (randn(*size),) * (2 if kind is nn.LSTM else 1) if options else None
    agree(kind, dtype, randn(17, 5, 64), states, **options)
    assert taken == ["cudnn"]


def test_cudnn_reads_weights_without_a_copy():
    network = FlashRNN(64, 64, num_layers=2, device="cuda")
    theirs, moved = network.to_torch(), FlashRNN(64, 64, num_layers=2).cuda()
    moved.load_state_dict(network.state_dict())
    before = torch.cuda.memory_allocated()
    for rnn in (network, moved):
        assert flat_weights.of(rnn).data_ptr() == rnn.input_l0.weight.data_ptr()
    assert torch.cuda.memory_allocated() == before
    flat = flat_weights.of(network)
    assert torch.equal(flat, theirs.weight_ih_l0.as_strided(flat.shape, (1,)))


def test_cudnn_is_selected_if_faster(taken):
    network, x = FlashRNN(1024, 1024, device="cuda", dtype=torch.float16), torch.randn(4, 2048, 1024).half().cuda()
    network(x)[0].sum().backward()
    network(x[:, :16].contiguous())
    assert taken == (["cudnn", "cuda_layer"] if torch.cuda.get_device_capability() == (9, 0) else ["cuda_layer"] * 2)


@pytest.mark.parametrize(("on_cpu", "bidirectional"), [(False, False), (False, True), (True, False)])
def test_documents_run_in_parallel(on_cpu, bidirectional, monkeypatch):
    steps, of_mask = [], documents.Whole
    monkeypatch.setattr(documents, "Whole", lambda *args: steps.append(1) or of_mask(*args))
    torch.manual_seed(0)
    network = FlashRNN(64, 64, function="gru", bidirectional=bidirectional, device="cuda")
    x, cu_seqlens = torch.randn(40, 1, 64, device="cuda"), torch.tensor([0, 7, 7, 20, 33, 40])
    out, last = network(x, cu_seqlens=cu_seqlens if on_cpu else cu_seqlens.cuda())
    assert not steps
    parts = [network(x[a:b])[0] for a, b in ((0, 7), (7, 20), (20, 33), (33, 40))]
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[0], network(x[33:])[1][0], rtol=1e-4, atol=1e-5)


def test_captured_documents_use_a_mask():
    """A CUDA graph may be replayed with other lengths."""
    network, x = FlashRNN(64, 64, function="gru", device="cuda"), torch.randn(40, 1, 64, device="cuda")
    cu_seqlens, others = (torch.tensor(ends, device="cuda") for ends in ([0, 10, 20, 40], [0, 5, 12, 40]))
    with torch.no_grad():
        expected = network(x, cu_seqlens=others)[0]
        for _ in range(2):
            network(x, cu_seqlens=cu_seqlens)
            network(x, reset=torch.zeros(1, 40, dtype=torch.bool, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = network(x, cu_seqlens=cu_seqlens)[0]
        cu_seqlens.copy_(others)
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_captured_and_compiled_layers_equal_eager_layers(options):
    torch.manual_seed(0)
    network = FlashRNN(64, 128, device="cuda", **options)
    x = torch.randn(33, 16, 64, device="cuda", requires_grad=True)
    weights = list(network.parameters())

    def step(run=network) -> tuple[torch.Tensor, ...]:
        out, (h, c) = run(x)
        return torch.autograd.grad(out.sin().sum() + h.sum() + c.sum(), [x, *weights])

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.mul_(-1)
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        x.mul_(-1)
    torch.testing.assert_close(step(torch.compile(network, backend="aot_eager")), expected, rtol=1e-4, atol=1e-4)


def test_steps_equal_the_sequence(taken):
    network = FlashRNN(64, 128, 2, device="cuda")
    x, states, outputs = torch.randn(5, 3, 64, device="cuda"), None, []
    for x_t in x:
        out, states = network.step(x_t, states)
        outputs.append(out)
    assert taken == ["cuda_layer"] * 5
    torch.testing.assert_close(torch.stack(outputs), network(x)[0], rtol=1e-4, atol=1e-5)


OPTIONS = [
    {},
    {"num_layers": 2, "batch_first": True, "bias": False},
    {"function": "gru", "num_heads": 2},
    {"function": "slstm", "num_layers": 2, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("T", [None, 1, 5], ids=["step", "T=1", "T=5"])
def test_cuda_layer_equals_the_general_path(options, T, taken, monkeypatch):
    """Results and gradients, with and without states and resets.

    Single steps have a kernel of their own, which does not round input products. They are compared with float64.
    """
    torch.manual_seed(0)
    network, batch = FlashRNN(64, 128, **options).cuda(), 3
    dtype = options.get("dtype", torch.float32)
    shape = (batch,) if T is None else (batch, T) if network.batch_first else (T, batch)
    x = torch.randn(*shape, 64, device="cuda", dtype=dtype)
    reset = torch.rand(batch, T or 1, device="cuda") < 0.5
    reset = reset[:, 0] if T is None else reset

    def called(network: FlashRNN, *arguments) -> tuple:
        return (network.step if T is None else network)(*arguments)

    def results(network: FlashRNN, x: torch.Tensor, *arguments) -> list[torch.Tensor]:
        out, last = called(network, x.requires_grad_(), *arguments)
        last = last if isinstance(last, tuple) else (last,)
        loss = out.to(last[0].dtype).sin().sum() + sum((i + 2) * state.square().sum() for i, state in enumerate(last))
        return [out, *last, *torch.autograd.grad(loss, [x, *network.parameters()])]

    with torch.no_grad():
        _, states = called(network, x)
        states = states if isinstance(states, tuple) else (states,)
        calls = [(), (states,), (states, reset)]
        untrained = [called(network, x, *arguments) for arguments in calls]
    found = [results(network, x, *arguments) for arguments in calls]
    assert taken == ["cuda_layer"] * 7
    for trained, (out, last) in zip(found, untrained, strict=True):
        last = last if isinstance(last, tuple) else (last,)
        torch.testing.assert_close(trained[: 1 + len(last)], [out, *last], rtol=0, atol=0)
    monkeypatch.setattr(cuda_layer, "run", lambda *_: None)
    exact = deepcopy(network).double()
    for short, arguments in zip(found, calls, strict=True):
        if T == 5:
            expected = results(network, x, *arguments)
            torch.testing.assert_close(short, expected, rtol=1e-2 if "dtype" in options else 1e-4, atol=1e-3)
        else:
            of_states = [tuple(state.double() for state in states)] if arguments else []
            expected = results(exact, x.detach().double(), *of_states, *arguments[1:])
            assert_close(dict(enumerate(short)), dict(enumerate(expected)), dtype)


@torch.no_grad()
def test_states_of_cuda_layer_can_be_changed_in_place():
    _, states = FlashRNN(64, 64, device="cuda")(torch.randn(5, 3, 64, device="cuda"))
    with torch.enable_grad():
        for state in states:
            state[:, 0] *= torch.ones(1, device="cuda", requires_grad=True)  # an error for a view
            assert state.requires_grad


@torch.no_grad()
def test_unsupported_calls_take_the_general_path(taken):
    x = torch.randn(5, 3, 64, device="cuda")
    FlashRNN(64, 65, device="cuda")(x)  # needs padding
    hooked = FlashRNN(64, 64, device="cuda")
    hooked.recurrent_l0.register_forward_hook(lambda *_: None)
    hooked(x)
    FlashRNN(64, 64, device="cuda")(x.transpose(0, 1))
    with torch.autocast("cuda", torch.bfloat16):
        FlashRNN(64, 64, device="cuda")(x)
    assert "cuda_layer" not in taken
