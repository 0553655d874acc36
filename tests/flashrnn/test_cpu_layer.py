"""Single time steps on the CPU, compared with whole sequences."""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from flashrnn import FlashRNN, cpu_layer
from tests.problems import CELLS, cell_name, random_reset
from tests.tolerances import BOUNDS


def as_tuple(states) -> tuple[torch.Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)


def network(cell="lstm", **options) -> FlashRNN:
    torch.manual_seed(0)
    return FlashRNN(5, 6, function=cell, **{"num_heads": 2, "dtype": torch.float64} | options)


def run_of_steps(rnn: FlashRNN, x: torch.Tensor, reset: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return outputs, last states, and the gradients of the input and all weights."""
    x, states, outputs = x.clone().requires_grad_(), None, []
    for t in range(len(x)):
        out, states = rnn.step(x[t], states, None if reset is None else reset[:, t])
        outputs.append(out)
    results = [torch.stack(outputs), *as_tuple(states)]
    loss = sum((result * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum() for result in results)
    return results + list(torch.autograd.grad(loss, (x, *rnn.parameters())))


def run_of_sequence(rnn: FlashRNN, x: torch.Tensor, reset: torch.Tensor | None = None) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out, last = rnn(x, reset=reset)
    results = [out, *as_tuple(last)]
    loss = sum((result * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum() for result in results)
    return results + list(torch.autograd.grad(loss, (x, *rnn.parameters())))


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
@pytest.mark.parametrize("options", [{}, {"num_heads": 1, "num_layers": 2, "bias": False}], ids=str)
def test_steps_and_their_gradients_equal_the_sequence(cell, options):
    rnn, x, reset = network(cell, **options), torch.randn(7, 3, 5, dtype=torch.float64), random_reset(3, 7)
    assert_close(run_of_steps(rnn, x, reset), run_of_sequence(rnn, x, reset))


def test_steps_in_bfloat16(monkeypatch):
    monkeypatch.setattr(cpu_layer, "onednn_computes", lambda dtype: False)
    rnn, x = network(dtype=torch.bfloat16, num_heads=1), torch.randn(7, 3, 5, dtype=torch.bfloat16)
    found, expected = run_of_steps(rnn, x), run_of_sequence(copy.deepcopy(rnn).double(), x.double())
    assert [result.dtype for result in found] == [torch.bfloat16, *[torch.float32] * 2, *[torch.bfloat16] * 4]
    for result, exact in zip(found, expected, strict=True):
        assert (result - exact).norm() < BOUNDS[torch.bfloat16] * exact.norm()


@pytest.mark.parametrize("hidden_size", [6, 400])
def test_fast_step_equals_the_general_path(hidden_size, monkeypatch):
    rnn = FlashRNN(5, hidden_size, function="gru", dtype=torch.float64)
    x, steps, step = torch.randn(3, 2, 5, dtype=torch.float64), [], cpu_layer.step
    monkeypatch.setattr(cpu_layer, "step", lambda *given: steps.append(given) or step(*given))
    short = run_of_steps(rnn, x)
    assert len(steps) == 3
    monkeypatch.setattr(cpu_layer, "layers", lambda *_: None)
    assert_close(short, run_of_steps(rnn, x))
    assert len(steps) == 3


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_sequence_of_one_step_equals_a_step(cell, batch_first):
    rnn, x = network(cell, batch_first=batch_first), torch.randn(3, 5, dtype=torch.float64)
    out, last = rnn(x[:, None] if batch_first else x[None])
    expected, new = rnn.step(x)
    assert_close(out, expected[:, None] if batch_first else expected[None])
    assert_close(last, new)


def test_outputs_without_gradients_are_not_views():
    rnn, x = network(), torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        out, (h, c) = rnn.step(x)
        assert not out.requires_grad
        before = h.clone()
        out.zero_()
    assert_close(h, before)
    assert len({t.untyped_storage().data_ptr() for t in (out, h, c)}) == 3


def test_step_uses_weights_changed_in_place():
    rnn, x = network(), torch.randn(3, 5, dtype=torch.float64)
    rnn.step(x)
    for parameter in rnn.parameters():
        parameter.data.mul_(0.5)
    assert_close(rnn.step(x)[0], rnn(x.expand(2, 3, 5))[0][0])


@pytest.mark.parametrize("change", ["hook", "weight_norm", "autocast"])
def test_hooks_and_changed_modules_are_respected(change):
    rnn, x, seen = network(dtype=torch.float32), torch.randn(3, 5), []
    if change == "hook":
        rnn.recurrent_l0.register_forward_hook(lambda *_: seen.append(1))
    if change == "weight_norm":
        parametrizations.weight_norm(rnn.input_l0)
    with torch.autocast("cpu", enabled=change == "autocast"):
        expected = rnn(x.expand(2, 3, 5))[0][0]
        seen.clear()
        assert_close(rnn.step(x)[0], expected)
    assert len(seen) == (change == "hook")


@pytest.mark.parametrize("name", ["b", "R"])
def test_parameter_may_be_replaced_by_a_tensor(name):
    rnn, x = network(), torch.randn(3, 5, dtype=torch.float64)
    weight = getattr(rnn.recurrent_l0, name).detach() + 1
    delattr(rnn.recurrent_l0, name)
    setattr(rnn.recurrent_l0, name, weight)
    assert_close(rnn.step(x)[0], rnn(x.expand(2, 3, 5))[0][0])


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["R", "b", "W"])
def test_weights_of_wrong_size_are_an_error(name, heads):
    """Kernels would read beyond the end of the tensor."""
    rnn = network(dtype=torch.float32, num_heads=heads)
    module, name = (rnn.input_l0, "weight") if name == "W" else (rnn.recurrent_l0, name)
    setattr(module, name, torch.nn.Parameter(getattr(module, name).detach()[:1]))
    for steps in (1, 4):
        with pytest.raises((ValueError, RuntimeError), match=r"must|invalid|unflatten"):
            rnn(torch.randn(steps, 3, 5))
    with pytest.raises((ValueError, RuntimeError), match=r"must|invalid|unflatten"):
        rnn.step(torch.randn(3, 5))


def test_batched_gradients_work_and_second_derivatives_are_an_error():
    rnn, x = network(), torch.randn(3, 5, dtype=torch.float64)
    out = rnn.step(x)[0]
    weights = tuple(rnn.parameters())
    directions = torch.randn(4, *out.shape, dtype=torch.float64)
    batched = torch.func.vmap(lambda d: torch.autograd.grad(out, weights, d, retain_graph=True))(directions)
    for k, direction in enumerate(directions):
        one = torch.autograd.grad(out, weights, direction, retain_graph=True)
        assert_close([g[k] for g in batched], list(one))
    graph = torch.autograd.grad(out.sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        graph[1].sum().backward()


def test_compiled_and_exported_steps_are_equal():
    rnn, x = network(), torch.randn(3, 5, dtype=torch.float64)
    expected = rnn.step(x)
    assert_close(torch.compile(rnn.step, backend="eager", fullgraph=True)(x), expected)
    module = torch.nn.Module()
    module.rnn, module.forward = rnn, rnn.step
    assert_close(torch.export.export(module, (x,)).module()(x), expected)


@pytest.mark.parametrize("reset", [torch.zeros(3), torch.zeros(2, dtype=torch.bool), [True] * 3])
def test_wrong_reset_is_an_error(reset):
    with pytest.raises((TypeError, ValueError), match="reset"):
        network().step(torch.randn(3, 5, dtype=torch.float64), None, reset)
