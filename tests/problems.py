"""Random problems, cells as users define them, and a plain time loop, to compare backends with."""

from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn import Cell, flashrnn, get_cell, layer_norm, max, mean, registered_cells, rms_norm, sum


def _minimal_gated(u, r, f, h):
    """Gate f has both parts, r only a recurrent part, u only an input part."""
    f = torch.sigmoid(f)
    return f * h + (1 - f) * torch.tanh(u + torch.relu(r))


def _peephole_lstm(i, f, z, o, p_i, p_f, p_o, h, c):
    """The peepholes p_* are gates with only a bias, used as weights of the cell state."""
    new_c = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(z)
    return torch.sigmoid(o + p_o * new_c) * torch.tanh(new_c), new_c


def _leaky_elman(g, a, h):
    """Each unit has its own leak rate a."""
    a = torch.sigmoid(a)
    return (1 - a) * h + a * torch.tanh(g)


MINIMAL_GATED = Cell("minimal_gated", _minimal_gated, states=("h",), input_gates=("u", "f"), recurrent_gates=("u", "r"))
PEEPHOLE_LSTM = Cell(
    "peephole_lstm",
    _peephole_lstm,
    states=("h", "c"),
    input_gates=("i", "f", "z", "o"),
    recurrent_gates=("i", "f", "z", "o"),
)
LEAKY_ELMAN = Cell("leaky_elman", _leaky_elman, states=("h",), input_gates=("g",), recurrent_gates=("g",))


def _normalised_elman(g, weight, h):
    return torch.tanh((1 + weight) * layer_norm(g) + 0.1 * h)


def _normalised_lstm(i, f, z, o, h, c):
    """One norm over all gates, then one over the new c."""
    i, f, z, o = layer_norm(i, f, z, o)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(layer_norm(c)), c


def _normalised_state(u, r, h, c):
    """The state is normalised together with a recurrent-only gate."""
    c = rms_norm(0.9 * c + torch.tanh(u), eps=1e-3)
    return c * torch.sigmoid(r) + 0.1 * mean(h), c


def _competing(g, a, h):
    """A softmax over units: a sum that depends on a maximum, with equal gradients in both branches."""
    shares = torch.exp(g - max(g))
    return (1 - torch.sigmoid(a)) * h + torch.tanh(shares / sum(shares) * 4)


def _normalised_inputs(x, m, r, u, gain, bias, h):
    """Two input-only gates, one of which is also used without the norm, and a bias added to a sum with a state."""
    x = (1 + gain) * rms_norm(x, eps=1e-3)
    m = torch.sigmoid(m)
    return (h + bias) * m + x * torch.tanh(layer_norm(r) + x) - 0.1 * mean(u)


NORMALISED_ELMAN = Cell(
    "normalised_elman", _normalised_elman, states=("h",), input_gates=("g",), recurrent_gates=("g",)
)
NORMALISED_LSTM = Cell("normalised_lstm", _normalised_lstm, states=("h", "c"))
NORMALISED_STATE = Cell(
    "normalised_state", _normalised_state, states=("h", "c"), input_gates=("u",), recurrent_gates=("r",)
)
COMPETING = Cell("competing", _competing, states=("h",))
NORMALISED_INPUTS = Cell(
    "normalised_inputs", _normalised_inputs, states=("h",), input_gates=("x", "m"), recurrent_gates=("r", "u")
)
LAYERNORM = (get_cell("layernorm_lstm"), get_cell("layernorm_gru"))
NORMALISED = (*LAYERNORM, NORMALISED_ELMAN, NORMALISED_LSTM, NORMALISED_STATE, COMPETING)
"""Cells with reductions over the units of a head."""
HOISTED = (get_cell("layernorm_lstm"), NORMALISED_INPUTS)
"""Cells that normalise only inputs, which is hoisted out of the time loop."""

# Without elman_relu: rounding may change a sign, where relu's gradient jumps. It is compared with nn.RNN instead.
BUILT_IN = tuple(
    get_cell(name) for name in registered_cells() if name != "elman_relu" and get_cell(name) not in LAYERNORM
)
CELLS = (*BUILT_IN, MINIMAL_GATED, PEEPHOLE_LSTM, LEAKY_ELMAN)


def cell_name(cell: Cell) -> str:
    """Return the name of a cell, for `pytest.mark.parametrize(..., ids=cell_name)`."""
    return cell.name


class Inputs(NamedTuple):
    """The tensors that `flashrnn` takes and differentiates."""

    Wx: Tensor  # [B, T, Gi, N, D]
    R: Tensor  # [Gr, N, D, D]
    b: Tensor  # [G, N, D]
    states: Tensor  # [S, B, N, D]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Return copies that require gradients."""
        return Inputs(*(x.detach().to(dtype, copy=True).requires_grad_() for x in self))


def random_inputs(
    cell: Cell, B: int, T: int, N: int, D: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    """Return inputs with magnitudes as in a trained network. n starts above 1, because sLSTM is not smooth at n = 0."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    states = randn(len(cell.states), B, N, D)
    if "n" in cell.states:
        n = cell.states.index("n")
        states[n] = 1 + states[n].abs()
    R = randn(len(cell.recurrent_gates), N, D, D) / D**0.5
    return Inputs(randn(B, T, len(cell.input_gates), N, D), R, randn(len(cell.gates), N, D), states).to(dtype)


def random_reset(B: int, T: int, seed: int = 0) -> Tensor:
    """Return a mask [B, T] of document starts, at about every fourth step."""
    return torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.25


def plain_loop(
    Wx: Tensor, R: Tensor, b: Tensor, states: Tensor | None, function: Cell, reset: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the same as `all_states`, computed by equations 1 and 2 of arXiv 2412.07752 with autograd."""
    B, T, _, N, D = Wx.shape
    if states is None:
        states = Wx.new_zeros(len(function.states), B, N, D)
    state, history = list(states), []
    for t in range(T):
        if reset is not None:
            state = [torch.where(reset[:, t, None, None], 0.0, s) for s in state]
        gates = []
        for gate, bias in zip(function.gates, b, strict=True):
            total = bias.expand(B, N, D)
            if gate in function.input_gates:
                total = total + Wx[:, t, function.input_gates.index(gate)]
            if gate in function.recurrent_gates:
                total = total + torch.einsum("nij,bnj->bni", R[function.recurrent_gates.index(gate)], state[0])
            gates.append(total)
        state = list(function.update(gates, state))
        history.append(torch.stack(state))
    every = torch.stack(history, dim=2).unbind()
    return every[0], history[-1], every


def all_states(*inputs, **options) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the results of `flashrnn`, with every state of every step in one tensor."""
    return flashrnn(*inputs, return_states=True, **options)


def results(run, inputs: Inputs, seed: int = 0, of_h: bool = False, **options) -> dict[str, Tensor]:
    """Return the outputs of `run` (flashrnn, all_states, plain_loop), and the gradients of a random mix of them.

    With `of_h`, use only the first state. The other states of an sLSTM depend on its stabiliser m, whose gradient
    jumps where the branches of a max meet; h does not depend on m.
    """
    h, last, *every = run(*inputs, **options)
    others = every[0][1:] if every else ()
    outputs = {"h": h, "last states": last} | {f"state {i}": state for i, state in enumerate(others, 1)}
    generator = torch.Generator().manual_seed(seed)
    cotangents = {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for name, x in outputs.items()
    }
    if of_h:
        cotangents["last states"][1:] = 0
        cotangents = {name: cotangents[name] for name in ("h", "last states")}
    gradients = torch.autograd.grad([outputs[name] for name in cotangents], inputs, [*cotangents.values()])
    names = [f"gradient of {field}" for field in inputs._fields]
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(names, gradients, strict=True))


def reference_results(inputs: Inputs, function: Cell, **options) -> dict[str, Tensor]:
    """Return `results` of the inputs' values, converted to float64."""
    return results(all_states, inputs.to(torch.float64), function=function, backend="vanilla", **options)
