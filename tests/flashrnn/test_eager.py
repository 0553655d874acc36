"""The autograd graph of an eager call: several backward passes, and gradients of some of the results."""

from itertools import combinations

import pytest
import torch

from flashrnn import dispatch, flashrnn, get_cell
from flashrnn.problem import Gradients
from flashrnn.reference import Reference
from tests.problems import Inputs, all_states, cell_name, plain_loop, random_inputs, random_reset
from tests.tolerances import assert_close


class Overwriting(Reference):
    """The reference, but its backward pass overwrites donated gates, like `cuda_fused`."""

    name = "overwriting"

    def backward(self, cell, residual, grads) -> Gradients:
        self.donated = residual.donated
        gradients = super().backward(cell, residual, grads)
        if residual.donated:
            residual.gates.fill_(torch.nan)
        return gradients


def named(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip(Inputs._fields, gradients, strict=True))


@pytest.mark.parametrize("run", [flashrnn, all_states], ids=["h", "all states"])
def test_retained_graph_gives_the_same_gradients_again(monkeypatch, run):
    backend = Overwriting()
    monkeypatch.setattr(dispatch, "BACKENDS", (backend,))
    inputs = random_inputs(get_cell("lstm"), 3, 4, 2, 5)
    loss = run(*inputs)[0].square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert not backend.donated
    second = torch.autograd.grad(loss, inputs, retain_graph=True)
    last = torch.autograd.grad(loss, inputs)
    assert backend.donated
    for gradients in (second, last):
        assert all(torch.equal(x, y) for x, y in zip(gradients, first, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("backend", ["vanilla", "cpu_fused"])
def test_gradients_accumulate_over_losses_of_one_call(backend):
    """Two backward passes through one graph give the gradients of the sum of both losses."""
    inputs = random_inputs(get_cell("slstm"), 3, 4, 2, 5)
    h, last = flashrnn(*inputs, function="slstm", backend=backend)
    one, other = h.square().sum(), last[1].sin().sum()
    expected = torch.autograd.grad(one + other, inputs, retain_graph=True)
    one.backward(retain_graph=True)
    other.backward()
    assert_close(named(tuple(x.grad for x in inputs)), named(expected), torch.float64)


CALLS = {
    "eager": lambda run: run,
    "compiled": lambda run: torch.compile(run, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["vanilla", "cpu_fused"])
@pytest.mark.parametrize("cell", [get_cell("lstm"), get_cell("slstm")], ids=cell_name)
def test_gradients_of_each_returned_state(cell, backend, call):
    torch.compiler.reset()
    inputs, reset = random_inputs(cell, 2, 3, 2, 2), random_reset(2, 3)
    options = {"function": cell, "reset": reset}
    _, last, states = CALLS[call](all_states)(*inputs, backend=backend, **options)
    _, expected_last, expected_states = plain_loop(*inputs, **options)
    out, ref = (*states, last), (*expected_states, expected_last)
    for used in (chosen for size in (1, 2) for chosen in combinations(range(len(out)), size)):
        gradients, expected = (
            torch.autograd.grad(sum(x[i].square().sum() for i in used), inputs, retain_graph=True) for x in (out, ref)
        )
        assert_close(named(gradients), named(expected), torch.float64)
