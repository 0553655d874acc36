"""Layers by `cuda_layer` on the CPU, where the reference backend takes the place of kernel launches."""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from flashrnn import FlashRNN, cuda_layer
from flashrnn.cuda.resident.calls import Forward, joined_states
from flashrnn.dispatch import VANILLA, by_one_way
from flashrnn.problem import Gradients, Inputs, StateGradients
from flashrnn.residual import Residual, turned

B, T, F, H = 3, 4, 5, 6
OPTIONS = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bias": False, "num_heads": 2, "function": "gru"},
    {"function": "slstm", "num_layers": 2},
]
BIDIRECTIONAL = [
    {"bidirectional": True},
    {"bidirectional": True, "num_layers": 2, "batch_first": True, "bias": False, "function": "gru", "num_heads": 2},
]


class OnHost:
    """A forward pass in float64 by the reference, with the interface of a kernel launch."""

    def __init__(
        self, cell, heads: int, head_dim: int, sizes: tuple[int, int, bool], training: bool, bidirectional: bool
    ) -> None:
        self.cell, self.heads, self.head_dim, self.training, self.bidirectional = (
            cell,
            heads,
            head_dim,
            training,
            bidirectional,
        )
        (self.batch, self.steps, self.time_major), self.states = sizes, len(cell.states)
        self.size = heads * head_dim
        self.gate_format = VANILLA.gate_format(cell, heads, head_dim, torch.float64)

    of_layer = Forward.of_layer

    def _rows(self, x: torch.Tensor, *inner: int) -> torch.Tensor:
        """Return x, in the layout of a launch, as [B, T, ...]."""
        if self.time_major:
            return x.view(self.steps, self.batch, *inner).transpose(0, 1)
        return x.view(self.batch, self.steps, *inner)

    def _run(self, Wx, R, b, initial, reset) -> tuple:
        b = torch.zeros(len(self.cell.gates), *R.shape[1:3], dtype=R.dtype) if b is None else b
        Wx = turned(Wx, 3) if self.bidirectional else Wx
        (h, aux, last), gates = VANILLA.forward(self.cell, Inputs(Wx, R, b, initial, reset), False, self.training)
        if self.bidirectional:
            h, aux, gates = turned(h, 2), turned(aux.movedim(0, -1), 2).movedim(-1, 0), turned(gates, 3)
        return (h, aux, last), gates

    def empty_residual(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        N, D = self.heads, self.head_dim
        Wx = torch.zeros(self.batch, self.steps, len(self.cell.input_gates), N, D, dtype=torch.float64)
        R = torch.zeros(len(self.cell.recurrent_gates), N, D, D, dtype=torch.float64)
        (_, aux, _), gates = self._run(Wx, R, None, None, None)
        return aux, gates

    def launch(self, Wx, R, b, initial, reset, h, aux, last, gates) -> None:
        N, D = self.heads, self.head_dim
        if isinstance(initial, int):
            numbers = (ctypes.c_double * last.numel()).from_address(initial)
            initial = torch.frombuffer(numbers, dtype=torch.float64).clone()
        initial = None if initial is None else initial.view(-1, self.batch, N, D)
        reset = None if reset is None else reset.view(self.batch, self.steps)
        (of_h, of_aux, of_last), of_gates = self._run(self._rows(Wx, -1, N, D), R, b, initial, reset)
        self._rows(h, N, D).copy_(of_h)
        last.view(of_last.shape).copy_(of_last)
        if aux is not None:
            aux.copy_(of_aux)
            gates.copy_(of_gates)

    @property
    def backward(self) -> "OnHost":
        return self

    def gradients(self, residual: Residual, grads: StateGradients, x: torch.Tensor | None) -> tuple[Gradients, None]:
        inner = self.heads, self.head_dim
        h, d_h = self._rows(residual.h, *inner), None if grads.h is None else self._rows(grads.h, *inner)
        residual, grads = residual._replace(h=h), StateGradients(d_h, (None,) * (self.states - 1), grads.last)
        if self.bidirectional:
            return by_one_way(VANILLA.backward, self.cell, residual, grads), None
        return VANILLA.backward(self.cell, residual, grads), None


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[tuple]]:
    """Return a list of (batch, steps, time-major, training) for each layer that `cuda_layer` runs."""
    found = []

    def forward(cell, backend, heads, head_dim, sizes, dtype, device, reset, half_bias, training, tf32, bidirectional):
        found.append((*sizes, training))
        return VANILLA, OnHost(cell, heads * (1 + bidirectional), head_dim, sizes, training, bidirectional)

    monkeypatch.setattr(cuda_layer, "_forward", forward)
    monkeypatch.setattr(cuda_layer, "on_gpu", lambda x: True)
    return found


def results(network: FlashRNN, call, x: torch.Tensor, states, reset) -> list[torch.Tensor]:
    """Return output, last states and all gradients, given states without gradients."""
    x = x.clone().requires_grad_()
    out, last = call(x, states, reset)
    last = last if isinstance(last, tuple) else (last,)
    loss = out.sin().sum() + sum((i + 2) * state.square().sum() for i, state in enumerate(last))
    return [out, *last, *torch.autograd.grad(loss, [x, *network.parameters()])]


@pytest.mark.parametrize(
    ("options", "steps"),
    [*product(OPTIONS, [None, 1, T]), *product(BIDIRECTIONAL, [1, T])],
    ids=lambda value: "step" if value is None else str(value),
)
def test_results_and_gradients_equal_the_general_path(calls, options, steps, monkeypatch):
    torch.manual_seed(0)
    network = FlashRNN(F, H, dtype=torch.float64, **options)
    shape = (B,) if steps is None else (B, steps) if network.batch_first else (steps, B)
    x, reset = torch.randn(*shape, F, dtype=torch.float64), torch.rand(B, steps or 1) < 0.4
    reset = reset[:, 0] if steps is None else reset

    def short(*arguments) -> tuple:
        done = cuda_layer.run(network, *arguments)
        assert done is not None
        return done

    with torch.no_grad():
        _, states = short(x, None, None)
    given = [(None, None), (states, None if network.bidirectional else reset)]
    found = [results(network, short, x, *arguments) for arguments in given]
    with torch.no_grad():
        alone = [short(x, *arguments) for arguments in given]
    time_major = steps is not None and not network.batch_first
    assert set(calls) == {(B, steps or 1, time_major, training) for training in (False, True)}
    monkeypatch.setattr(cuda_layer, "run", lambda *_: None)
    general = network.step if steps is None else network
    for arguments, with_gradients, (out, last) in zip(given, found, alone, strict=True):
        expected = results(network, general, x, *arguments)
        torch.testing.assert_close(with_gradients, expected)
        torch.testing.assert_close(
            [out, *(last if isinstance(last, tuple) else (last,))], expected[: 1 + len(network.cell.states)]
        )


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "function": "gru"}], ids=str)
def test_gradients_propagate_through_states(calls, options):
    torch.manual_seed(0)
    network, xs = FlashRNN(F, H, dtype=torch.float64, **options), torch.randn(3, B, F, dtype=torch.float64)
    given = torch.randn(len(network.cell.states), network.num_layers, B, H, dtype=torch.float64, requires_grad=True)

    def gradients(step) -> tuple[torch.Tensor, ...]:
        states, loss = given.unbind(), 0
        for x in xs:
            out, states = step(x, states)
            loss = loss + out.sin().sum()
        return torch.autograd.grad(loss, [given, *network.parameters()])

    found = gradients(lambda x, states: cuda_layer.run(network, x, states, None))
    torch.testing.assert_close(found, gradients(network.step))


@pytest.mark.parametrize("shape", [(B, F), (T, B, F)], ids=["step", "sequence"])
def test_unused_graph_is_freed_immediately(calls, shape):
    """With a reference cycle, a program that does not disable gradients would keep the graphs of all steps."""
    network = FlashRNN(F, H, dtype=torch.float64)
    gc.disable()
    try:
        out, _ = cuda_layer.run(network, torch.randn(shape, dtype=torch.float64), None, None)
        left = weakref.ref(out)
        del out, _
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("changed", [0, 1], ids=["h", "c"])
def test_states_changed_before_the_backward_pass_are_an_error(calls, changed):
    network, x = FlashRNN(F, H, dtype=torch.float64), torch.randn(B, F, dtype=torch.float64)
    with torch.no_grad():
        _, states = cuda_layer.run(network, x, None, None)
    out, _ = cuda_layer.run(network, x, states, None)
    states[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_create_graph_gives_the_same_gradients(calls):
    network, x = FlashRNN(F, H, bidirectional=True, dtype=torch.float64), torch.randn(T, B, F, dtype=torch.float64)
    weights = list(network.parameters())
    once, with_graph = (
        torch.autograd.grad(cuda_layer.run(network, x, None, None)[0].sin().sum(), weights, create_graph=create_graph)
        for create_graph in (False, True)
    )
    assert all(d.requires_grad for d in with_graph)
    torch.testing.assert_close(with_graph, once)


def test_contiguous_states_are_not_copied():
    states = torch.randn(2, 1, B, H, dtype=torch.float64)
    assert joined_states(states.unbind()) == states.data_ptr()
    apart = [torch.randn(1, B, H) for _ in range(2)]
    assert torch.equal(joined_states(apart), torch.stack([state[0] for state in apart]))


WRONG = {
    "features": (torch.randn(T, B, F + 1), None, None),
    "states": (torch.randn(T, B, F), (torch.randn(1, B, H),), None),
    "size of states": (torch.randn(T, B, F), (torch.randn(1, B + 1, H),) * 2, None),
    "reset": (torch.randn(T, B, F), None, torch.zeros(T, B).bool()),
    "no sequences": (torch.randn(T, 0, F), None, None),
    "not dense": (torch.randn(B, T, F).transpose(0, 1), None, None),
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_unsupported_calls_take_the_general_path(calls, arguments):
    assert cuda_layer.run(FlashRNN(F, H), *arguments) is None
