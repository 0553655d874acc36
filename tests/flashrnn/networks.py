"""Outputs and gradients of PyTorch's networks and of ours, under the same names."""

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flashrnn import FlashRNN


def results(network: nn.Module, x: Tensor | PackedSequence, states=None, pack=lambda x: x) -> dict[str, Tensor]:
    """Return outputs, last states, and all gradients of a nonlinear function of both. x and states are copied."""
    packed = isinstance(x, PackedSequence)
    leaf = (x.data if packed else x).detach().clone().requires_grad_()
    given = () if states is None else states if isinstance(states, tuple) else (states,)
    given = [s.detach().clone().requires_grad_() for s in given]
    out, last = network(x._replace(data=leaf) if packed else pack(leaf), *_as_argument(given))
    out, last = out.data if isinstance(out, PackedSequence) else out, last if isinstance(last, tuple) else (last,)
    network.zero_grad()
    (out.sin().sum() + sum((2 * s).sin().sum() for s in last)).backward()
    named = {f"last {k}": s.detach() for k, s in enumerate(last)} | {
        f"d_state {k}": s.grad for k, s in enumerate(given)
    }
    of_weights = _our_weight_gradients if isinstance(network, FlashRNN) else _weight_gradients
    return {"out": out.detach(), "d_x": leaf.grad} | named | of_weights(network)


def _as_argument(states: list[Tensor]) -> list:
    return [tuple(states)] if len(states) > 1 else states


def _weight_gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def _our_weight_gradients(rnn: FlashRNN) -> dict[str, Tensor]:
    """Return the gradients with the names and layouts of the corresponding PyTorch network."""
    gradients, gru = {}, rnn.cell.name == "gru"
    for name in rnn.directions():
        recurrent = rnn.get_submodule(f"recurrent_{name}")
        gradients[f"weight_ih_{name}"] = rnn.get_submodule(f"input_{name}").weight.grad
        R = recurrent.R.grad[:, 0]
        gradients[f"weight_hh_{name}"] = (R[[1, 2, 0]] if gru else R).flatten(0, 1)  # our order: g (PyTorch's n), r, z
        if rnn.bias:
            b = recurrent.b.grad[:, 0]  # PyTorch's two biases have the same gradient
            gradients[f"bias_ih_{name}"] = (b[[1, 2, 3]] if gru else b).flatten()
            gradients[f"bias_hh_{name}"] = (b[[1, 2, 0]] if gru else b).flatten()
        if rnn.proj_size:
            gradients[f"weight_hr_{name}"] = recurrent.projection.weight.grad
    return gradients
