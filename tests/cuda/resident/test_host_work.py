"""The number of PyTorch operators in a call of few steps; each takes at least as much host time as a launch."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flashrnn import FlashRNN, cuda_layer
from flashrnn.cuda import short_gradients
from flashrnn.cuda.build import Binary
from flashrnn.cuda.resident import backend, calls, single_step, solver
from flashrnn.gpu import named_gpu

B, T = 16, 4


@pytest.fixture
def launches(monkeypatch) -> Iterator[list[str]]:
    """Return a list of the launched kernels, which do nothing."""
    found = []

    def load(binary: Binary, *_, **__) -> SimpleNamespace:
        def launch(*_) -> None:
            found.append(binary.entry)

        one_wave = SimpleNamespace(at_once=132, waves=lambda groups: [(0, groups)], bind=lambda **_: launch)
        return SimpleNamespace(**vars(one_wave), launch=launch)

    def binary(source: str, header: str, entry: str, *_) -> Binary:
        return Binary(b"", entry, 32, 0, Path())

    def choose(spec):
        return binary("", "", spec.direction), solver.likely_tiling(spec)

    for module in (backend, short_gradients, single_step):
        monkeypatch.setattr(module, "load", load)
    for module in (short_gradients, single_step):
        monkeypatch.setattr(module, "build", binary)
    monkeypatch.setattr(backend, "device_gpu", lambda index: named_gpu("H200"))
    nothing = torch.zeros(2**20, dtype=torch.uint8)
    monkeypatch.setattr(calls, "zeros", lambda device, size: nothing)
    monkeypatch.setattr(backend, "meanwhile", lambda *_: nullcontext())
    monkeypatch.setattr(cuda_layer, "choose", lambda *_: backend.CudaFused(choose))
    monkeypatch.setattr(cuda_layer, "on_gpu", lambda x: True)
    kernels = short_gradients._kernel, single_step._kernel
    cached = cuda_layer._forward, backend._forward, backend._backward, backend._plan, *kernels
    for function in cached:
        function.cache_clear()
    yield found
    for function in cached:
        function.cache_clear()


def operators(call: Callable[[], None]) -> list[str]:
    """Return the PyTorch operators that a call runs directly."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    found = [event for event in profiler.events() if event.name.startswith("aten::")]
    return [event.name for event in found if not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))]


@pytest.mark.parametrize(("heads", "most"), [(12, 15), (1, 17)])
def test_layer_runs_few_operators(launches, heads, most):
    network = FlashRNN(768, 768, num_heads=heads, dtype=torch.float16)
    x = torch.randn(T, B, 768, dtype=torch.float16, requires_grad=True)
    leaves, d_out = [x, *network.parameters()], torch.randn_like(x)

    def call() -> None:
        out, _ = cuda_layer.run(network, x, None, None)
        torch.autograd.grad(out, leaves, d_out)

    call()
    launches.clear()
    found = operators(call)
    assert len(found) <= most


@pytest.mark.parametrize(("function", "most", "most_with_gradients"), [("lstm", 3, 20), ("gru", 2, 18)])
def test_step_runs_few_operators(launches, function, most, most_with_gradients):
    """In float32, without gradients and with those of all parameters."""
    network, x = FlashRNN(64, 64, function=function), torch.randn(2, 64)
    leaves, d_out = [*network.parameters()], torch.ones_like(x)
    with torch.no_grad():
        _, states = cuda_layer.run(network, x, None, None)

    def step() -> None:
        with torch.no_grad():
            cuda_layer.run(network, x, states, None)

    def train() -> None:
        torch.autograd.grad(cuda_layer.run(network, x, states, None)[0], leaves, d_out)

    train()
    launches.clear()
    assert len(operators(step)) <= most
    assert launches == ["flashrnn_single_step"]
    launches.clear()
    assert len(operators(train)) <= most_with_gradients
    assert launches == ["flashrnn_single_step", "backward", "flashrnn_short_gradients"]
