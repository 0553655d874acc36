"""A layer as one autograd function: same results as its modules, and used only if nothing else observes them."""

import pytest
import torch
from torch import nn

from flashrnn import FlashRNN, eager_layer
from tests.tolerances import assert_close

OPTIONS = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bias": False, "num_heads": 2, "function": "gru"},
    {"function": "slstm", "num_layers": 2},
]


@pytest.fixture
def taken(monkeypatch):
    """Return a list of whether each call ran as one autograd function."""
    results, run = [], eager_layer.run

    def record(*args):
        done = run(*args)
        results.append(done is not None)
        return done

    monkeypatch.setattr(eager_layer, "run", record)
    return results


def results(network: FlashRNN, x: torch.Tensor, states, reset) -> dict[str, torch.Tensor]:
    """Return output, last states and all gradients by name."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    states = None if states is None else tuple(s.clone().requires_grad_() for s in states)
    given = states[0] if states and len(states) == 1 else states
    out, last = network(x, given, reset)
    last = last if isinstance(last, tuple) else (last,)
    leaves = {"x": x, **dict(network.named_parameters()), **{f"s{i}": s for i, s in enumerate(states or ())}}
    loss = out.sin().sum() + sum((i + 2) * s.square().sum() for i, s in enumerate(last))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"out": out, **{f"last {i}": s for i, s in enumerate(last)}}
    return found | {f"d_{name}": d for name, d in zip(leaves, gradients, strict=True)}


@pytest.mark.parametrize("units", [0, 2], ids=["", "padded"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_and_gradients_equal_the_modules(options, with_states, transposed, units, taken, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(eager_layer, "padding", lambda *_: units)  # as for odd head sizes on a GPU
    network = FlashRNN(5, 6, dtype=torch.float64, **options)
    B, T = 3, 4
    x = torch.randn(B, T, 5, dtype=torch.float64)
    x = x if network.batch_first != transposed else x.transpose(0, 1).contiguous()
    x = x if network.batch_first == (x.shape[0] == B) else x.transpose(0, 1)
    states = tuple(torch.rand(network.num_layers, B, 6, dtype=torch.float64) + 1 for _ in network.cell.states)
    arguments = x, states if with_states else None, torch.rand(B, T) < 0.3
    found = results(network, *arguments)
    assert taken == [True]
    monkeypatch.setattr(eager_layer, "run", lambda *_: None)
    assert_close(found, results(network, *arguments), torch.float64)


def test_outputs_are_not_views():
    """They can be changed in place, gradients that need them detect this, and each state can be saved separately."""
    network = FlashRNN(5, 6, function="gru")
    out, last = network(torch.randn(4, 3, 5))
    assert not out._is_view()
    assert last.untyped_storage().nbytes() == last.nbytes
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_equals_the_modules(dtype, taken, monkeypatch):
    network, x = FlashRNN(5, 6, function="gru"), torch.randn(4, 3, 5)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            out, last = network(x)
        found.append((out, last, *torch.autograd.grad(out.float().sum(), network.parameters())))
        monkeypatch.setattr(eager_layer, "run", lambda *_: None)
    assert taken == [True]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


CHANGES = {
    "hook": lambda network: network.recurrent_l0.register_forward_hook(lambda *_: None),
    "backward hook": lambda network: network.input_l0.register_full_backward_hook(lambda *_: None),
    "hook before a backward": lambda network: network.recurrent_l0.register_full_backward_pre_hook(lambda *_: None),
    "second bias": lambda network: network.input_l0.register_parameter("bias", nn.Parameter(torch.zeros(18))),
    "parametrization": lambda network: nn.utils.parametrizations.weight_norm(network.recurrent_l0, "R"),
    "backend": lambda network: setattr(network.recurrent_l0, "backend", "vanilla"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_and_changed_modules_are_respected(change, taken):
    network, x = FlashRNN(5, 6, function="gru"), torch.randn(4, 3, 5)
    expected = network(x)[0]
    CHANGES[change](network)
    torch.testing.assert_close(network(x)[0], expected)
    assert taken == [True, False]


def test_batched_gradients_work_and_second_derivatives_are_an_error():
    network, x = FlashRNN(5, 6, function="gru", dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    weights, out = tuple(network.parameters()), network(x)[0]
    directions = torch.randn(2, *out.shape, dtype=torch.float64)
    batched = torch.func.vmap(lambda d: torch.autograd.grad(out, weights, d, retain_graph=True))(directions)
    for k, d in enumerate(directions):
        one = torch.autograd.grad(out, weights, d, retain_graph=True)
        torch.testing.assert_close([g[k] for g in batched], list(one))
    for gradient in torch.autograd.grad(out.sum(), weights, create_graph=True):
        with pytest.raises(RuntimeError, match="second derivative"):
            gradient.sum().backward(retain_graph=True)
