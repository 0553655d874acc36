"""When layers run by cuDNN, and their results.

PyTorch's kernel for the CPU takes the place of cuDNN, to check the arguments and the results.
"""

import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flashrnn import FlashRNN, cudnn, get_cell
from flashrnn._torch_private import CudnnRnn
from flashrnn.cells import GRU, LSTM
from flashrnn.gpu import named_gpu


class StandIn(CudnnRnn):
    """PyTorch's kernel for the CPU. It reads `flat` and returns the gradients of PyTorch's weights, like cuDNN."""

    graphs: ClassVar[list] = []  # inputs, weights and results of each forward pass
    precisions: ClassVar[list] = []  # precision of each forward and backward pass

    def forward(self, x, weights, flat, h, c, training):
        assert training == torch.is_grad_enabled() or training  # an autograd function disables gradients
        self.precisions.append(torch.backends.cudnn.rnn.fp32_precision)
        inputs = [t.detach().clone().requires_grad_() for t in (x, h, c) if t is not None]
        read = [value.clone().requires_grad_() for value in self._values(flat.detach(), x.shape[-1])]
        run = torch.gru if c is None else torch.lstm
        options = self.num_layers, 0.0, training, self.bidirectional, self.batch_first
        with torch.enable_grad():
            results = run(inputs[0], inputs[1] if c is None else inputs[1:], read, True, *options)
        self.graphs.append((inputs, read, results))
        reserve = torch.tensor(len(self.graphs) - 1)
        return *(t.detach().clone() for t in results), *([torch.empty(0)] if c is None else []), reserve

    def _values(self, flat, features):
        """Return PyTorch's weights in PyTorch's order."""
        gates, ways = {2: 4, 3: 3}[self.mode], 1 + self.bidirectional
        layers = [features] * ways + [self.hidden_size * ways] * (self.num_layers - 1) * ways
        matrices = [(gates * self.hidden_size, size) for of_input in layers for size in (of_input, self.hidden_size)]
        shapes = matrices + [(gates * self.hidden_size,)] * len(matrices)
        values = [part.view(s) for part, s in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]
        count = len(matrices)
        of_each = [values[i : i + 2] + values[count + i : count + i + 2] for i in range(0, count, 2)]
        return [w for of_direction in of_each for w in of_direction]

    def backward(self, of_forward, weights, flat, gradients, wanted):
        self.precisions.append(torch.backends.cudnn.rnn.fp32_precision)
        inputs, read, results = self.graphs[int(of_forward[-1])]
        given = [(out, d) for out, d in zip(results, gradients, strict=False) if d is not None]
        outputs, d_outputs = zip(*given, strict=True)
        d_inputs = torch.autograd.grad(outputs, inputs + read, d_outputs, retain_graph=True)
        found = list(d_inputs[len(inputs) :])
        if len(weights) < len(read):  # no biases
            found = [d for i, d in enumerate(found) if i % 4 < 2]
        assert [w.shape for w in weights] == [d.shape for d in found]
        return *d_inputs[: len(inputs)], *([None] if len(inputs) == 2 else []), found


@pytest.fixture
def taken(monkeypatch):
    """Let cuDNN run every call that it supports; return a list of whether it ran each call."""
    results, run = [], cudnn.run

    def record(*args):
        done = run(*args)
        results.append(done is not None)
        return done

    monkeypatch.setattr(cudnn, "run", record)
    monkeypatch.setattr(cudnn, "_may_run", lambda: True)
    monkeypatch.setattr(cudnn, "fewest_steps", lambda *_: 1)
    monkeypatch.setattr(cudnn, "nvidia_gpu", lambda device: named_gpu("H100"))
    monkeypatch.setattr(cudnn, "CudnnRnn", StandIn)
    return results


NETWORKS = [
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "bias": False}),
    (nn.GRU, {"batch_first": True}),
    (nn.LSTM, {"num_layers": 2}),
    (nn.LSTM, {"bidirectional": True, "bias": False}),
]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
def test_results_and_gradients_equal_pytorch(kind, options, given, taken, monkeypatch):
    monkeypatch.setattr("flashrnn.onednn.run", lambda *_: None)
    torch.manual_seed(0)
    theirs = kind(5, 6, **options)
    ours, x = FlashRNN.from_torch(theirs), torch.randn(4, 4, 5)
    states = tuple(torch.randn(theirs.num_layers * (1 + theirs.bidirectional), 4, 6) for _ in ours.cell.states)
    states = (states if len(states) > 1 else states[0]) if given else None
    found, expected = ours(x, states), theirs(x, states)
    assert taken == [True]
    assert_close(found, expected)
    d_ours, d_theirs = (torch.autograd.grad(out.sum(), network.parameters())
                        for (out, _), network in ((found, ours), (expected, theirs)))  # fmt: skip
    named = dict(zip((name for name, _ in theirs.named_parameters()), d_theirs, strict=True))
    theirs.load_state_dict(named)
    as_ours = FlashRNN.from_torch(theirs).state_dict()
    for (name, _), d in zip(ours.named_parameters(), d_ours, strict=True):
        if not name.endswith("b"):  # PyTorch has two biases with the same gradient
            assert_close(d, as_ours[name])
    with torch.no_grad():
        assert_close(ours(x, states), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_last_states_of_half_types_are_float32(kind, taken):
    ours, x = FlashRNN.from_torch(kind(5, 6)).half(), torch.randn(4, 3, 5).half()
    with torch.no_grad():
        out, last = ours(x)
    trained, states = ours(x)
    assert taken == [True, True]
    assert_close((out, last), (trained, states), rtol=0, atol=0)
    assert {state.dtype for state in (last if kind is nn.LSTM else [last])} == {torch.float32}


CHANGES = {
    "backend": {"backend": "cpu_fused"},
    "cell": {"function": "elman"},
    "heads": {"num_heads": 2},
    "projection": {"proj_size": 3, "function": "lstm"},
    "dropout": {"num_layers": 2, "dropout": 0.5},
}


@pytest.mark.parametrize("change", CHANGES)
def test_unsupported_networks_do_not_run_by_cudnn(change, taken, monkeypatch):
    monkeypatch.setattr("flashrnn.onednn.run", lambda *_: None)
    FlashRNN(5, 6, **{"function": "gru", **CHANGES[change]})(torch.randn(4, 3, 5))
    assert taken == [False]


def test_resets_hooks_and_wrong_states_prevent_cudnn(taken):
    network, x = FlashRNN(5, 6, function="gru"), torch.randn(4, 3, 5)
    network(x, reset=torch.zeros(3, 4, dtype=torch.bool))
    assert taken == []
    with pytest.raises(ValueError, match=r"\(\'h\',\) .*\[1, 3, 6\].*\[1, 3, 7\]"):
        network(x, torch.zeros(1, 3, 7))
    network.recurrent_l0.register_forward_hook(lambda *_: None)
    network(x)
    assert taken == [False, False]


def test_weights_of_wrong_size_are_an_error(taken):
    network = FlashRNN(5, 6, function="gru")
    network.recurrent_l0.b = nn.Parameter(torch.zeros(1, 1, 6))
    with pytest.raises(ValueError, match="b must be"):
        network(torch.randn(4, 3, 5))
    assert taken == [False]


def faster(cell, size, batch, dtype=torch.float16, *, steps=500, tf32=False, training=False, gpu="H100") -> bool:
    fewest = cudnn.fewest_steps(cell, size, batch, dtype, tf32, training, named_gpu(gpu))
    return fewest is not None and steps >= fewest


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_cudnn_is_faster_for_large_products(cell, caplog):
    cudnn.fewest_steps.cache_clear()
    caplog.set_level("INFO", "flashrnn")
    assert faster(cell, 2048, 256, steps=1)
    assert faster(cell, 2048, 256)
    assert caplog.text.count("by cuDNN") == 1
    assert faster(cell, 512, 4096, torch.float32, tf32=True)
    assert faster(cell, 512, 4096, torch.float32)
    assert not faster(cell, 2048, 1)
    assert not faster(cell, 256, 8192)
    assert faster(cell, 256, 8192, torch.float32, tf32=True)
    assert not faster(cell, 256, 8192, torch.float32, tf32=True, training=True)
    assert not faster(cell, 256, 1024, torch.float32, tf32=True)
    assert faster(cell, 512, 4096) == (cell is LSTM)


@pytest.mark.parametrize("cell", [LSTM, GRU])
@pytest.mark.parametrize(("dtype", "tf32"), [(torch.float16, False), (torch.float32, True)], ids=["half", "tf32"])
def test_our_kernel_is_faster_for_few_sequences(cell, dtype, tf32):
    assert not faster(cell, 4096, 16, dtype, tf32=tf32)
    assert faster(cell, 4096, 64, dtype, tf32=tf32)


def test_cudnn_is_faster_for_narrow_layers_in_float32():
    assert faster(LSTM, 64, 1, torch.float32)
    assert faster(LSTM, 64, 16, torch.float32, tf32=True)
    assert not faster(LSTM, 64, 16, torch.float32, training=True)
    assert not faster(LSTM, 64, 256, torch.float32)
    assert not faster(LSTM, 256, 16, torch.float32)
    assert not faster(LSTM, 64, 16, torch.float32, steps=1)
    assert not faster(LSTM, 64, 16)
    assert not faster(GRU, 64, 16, torch.float32)


def test_cudnn_is_faster_for_an_lstm_of_1024_units_in_float16():
    assert faster(LSTM, 1024, 16)
    for other in ((GRU, 1024, 16), (LSTM, 1024, 8), (LSTM, 896, 16), (LSTM, 1024, 16, torch.bfloat16)):
        assert not faster(*other)
    assert not faster(LSTM, 1024, 16, training=True)
    assert not faster(LSTM, 1024, 16, steps=32)


def test_cudnn_is_not_selected_without_measurements():
    assert not faster(LSTM, 2048, 256, gpu="A100")
    assert not faster(LSTM, 2048, 256, torch.float64)
    assert not faster(get_cell("slstm"), 2048, 256)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("of_cudnn", ["tf32", "ieee"])
def test_cudnn_uses_the_tf32_setting_of_matrix_products(tf32, of_cudnn, taken, monkeypatch):
    """PyTorch has a separate setting for cuDNN, which allows TF32 by default."""
    monkeypatch.setattr("flashrnn.onednn.run", lambda *_: None)
    monkeypatch.setattr(StandIn, "precisions", [])
    monkeypatch.setattr(cudnn, "tf32_allowed", lambda *_: tf32)
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", of_cudnn)
    network, x = FlashRNN(5, 6), torch.randn(4, 3, 5)
    network(x)[0].sum().backward()
    assert StandIn.precisions == ["tf32" if tf32 else "ieee"] * 2
    assert torch.backends.cudnn.rnn.fp32_precision == of_cudnn


def test_graph_can_be_retained(taken, monkeypatch):
    monkeypatch.setattr("flashrnn.onednn.run", lambda *_: None)
    network, x = FlashRNN(5, 6, function="gru"), torch.randn(4, 3, 5)
    out = network(x)[0].sum()
    first, second = (torch.autograd.grad(out, [*network.parameters()], retain_graph=True) for _ in range(2))
    assert_close(first, second)


def test_pytorch_settings_can_disable_cudnn(monkeypatch):
    monkeypatch.setattr(CudnnRnn, "is_available", lambda: True)
    assert cudnn._may_run()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not cudnn._may_run()


def test_explain_mentions_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "nvidia_gpu", lambda device: named_gpu("H100"))
    network = FlashRNN(16, 2048)
    assert "cuDNN runs" in cudnn.explain(network, 1024, torch.float16, training=False)
    assert cudnn.explain(network, 1, torch.float16, training=False) == ""
    assert "at least 32 steps" in cudnn.explain(FlashRNN(16, 64), 1, torch.float32, training=False)
    network.recurrent_l0.backend = "cuda"
    assert cudnn.explain(network, 1024, torch.float16, training=False) == ""
