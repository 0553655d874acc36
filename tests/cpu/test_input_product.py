"""Layers whose input product is computed by the kernel, in several chunks of steps."""

import pytest
import torch
from torch.testing import assert_close

from flashrnn import FlashRNN, cpu_layer
from tests.problems import random_reset

SIZES = [(7, 20, 9), (40, 33, 9), (16, 16, 9), (3, 150, 1)]  # features, units, sequences


def results(network: FlashRNN, x: torch.Tensor, reset: torch.Tensor | None, *, of_x: bool) -> list[torch.Tensor]:
    """Return the output, the last states, and gradients."""
    x = x.clone().requires_grad_(of_x)
    out, last = network(x, reset=reset)
    found = [out, *(last if isinstance(last, tuple) else (last,))]
    loss = sum((f * torch.linspace(-1, 1, f.numel(), dtype=f.dtype).view(f.shape)).sum() for f in found)
    return found + list(torch.autograd.grad(loss, [*([x] if of_x else []), *network.parameters()]))


@pytest.mark.parametrize(("size", "batch_first"), [*zip(SIZES, [False, True, True, False], strict=True)], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_results_and_gradients_equal_the_reference(cell, size, batch_first, monkeypatch):
    kernels, kernel = [], cpu_layer._kernel
    monkeypatch.setattr(cpu_layer, "_kernel", lambda *given: kernels.append(kernel(*given)) or kernels[-1])
    torch.manual_seed(0)
    options = {"function": cell, "batch_first": batch_first, "dtype": torch.float64}
    *of_network, B = size
    ours, reference = (FlashRNN(*of_network, backend=backend, **options) for backend in ("cpu_fused", "vanilla"))
    reference.load_state_dict(ours.state_dict())
    T = 40
    x = torch.randn(*((B, T) if batch_first else (T, B)), size[0], dtype=torch.float64)
    for reset, of_x in ((None, True), (random_reset(B, T), False)):
        found, expected = (results(network, x, reset, of_x=of_x) for network in (ours, reference))
        assert_close(found, expected)
    assert {one.sizes.features for one in kernels} == {size[0]}


def test_splitting_a_sequence_gives_identical_results():
    torch.manual_seed(0)
    network, x = FlashRNN(24, 40, function="gru", bias=False), torch.randn(201, 5, 24)
    with torch.no_grad():
        whole, last = network(x)
        first, states = network(x[:77])
        second, of_second = network(x[77:], states)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(of_second, last)


def test_gradients_are_reproducible():
    network, x = FlashRNN(24, 40, function="gru"), torch.randn(60, 33, 24)
    first, *others = (results(network, x, None, of_x=True) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
