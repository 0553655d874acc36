"""With nn.LSTM's, nn.GRU's and nn.RNN's weights FlashRNN gives their results: outputs, last states, all gradients."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from flashrnn import FlashRNN
from tests.tolerances import assert_close

MODULES = [nn.LSTM, nn.GRU, nn.RNN]
T, B, F, H = 7, 4, 5, 6


def converted(module_type: type[nn.Module], **options) -> tuple[nn.Module, FlashRNN]:
    torch.manual_seed(0)
    module = module_type(F, H, **options, dtype=torch.float64)
    return module, FlashRNN.from_torch(module)


def initial_states(module: nn.Module, batch: tuple[int, ...] = (B,)):
    shape = (module.num_layers * (2 if module.bidirectional else 1), *batch, H)
    states = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return tuple(states) if isinstance(module, nn.LSTM) else states[0]


def run(module: nn.Module, x: torch.Tensor, states, pack=lambda x: x) -> dict[str, torch.Tensor]:
    """Outputs and gradients; x and states are copied first."""
    x = x.clone().requires_grad_()
    states = [s.clone().requires_grad_() for s in ((states,) if isinstance(states, torch.Tensor) else states)]
    out, last = module(pack(x), tuple(states) if len(states) > 1 else states[0])
    last = last if isinstance(last, tuple) else (last,)
    out = out.data if isinstance(out, PackedSequence) else out
    module.zero_grad()
    (out.sin().sum() + sum((2 * s).sin().sum() for s in last)).backward()
    named = {f"last {k}": s.detach() for k, s in enumerate(last)} | {
        f"d_state {k}": s.grad for k, s in enumerate(states)
    }
    return {"out": out.detach(), "d_x": x.grad} | named


def our_weight_gradients(rnn: FlashRNN, module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a FlashRNN under the names and in the layout of the PyTorch module it was made from."""
    gradients = {}
    for k in range(rnn.num_layers):
        for suffix in (f"l{k}", f"l{k}_reverse") if rnn.bidirectional else (f"l{k}",):
            recurrent = rnn.get_submodule(f"recurrent_{suffix}")
            gradients[f"weight_ih_{suffix}"] = rnn.get_submodule(f"input_{suffix}").weight.grad
            R = recurrent.R.grad[:, 0]
            if isinstance(module, nn.GRU):  # ours: g (torch's n), r, z
                R = torch.stack([R[1], R[2], R[0]])
            gradients[f"weight_hh_{suffix}"] = R.flatten(0, 1)
            if module.bias:
                b = recurrent.b.grad[:, 0]  # the gradient of a sum is that of both its terms
                of_input, of_recurrent = (b[[1, 2, 3]], b[[1, 2, 0]]) if isinstance(module, nn.GRU) else (b, b)
                gradients[f"bias_ih_{suffix}"] = of_input.flatten()
                gradients[f"bias_hh_{suffix}"] = of_recurrent.flatten()
    return gradients


def check(module: nn.Module, rnn: FlashRNN, x: torch.Tensor, states, **options) -> None:
    ref = run(module, x, states, **options) | {name: p.grad for name, p in module.named_parameters()}
    out = run(rnn, x, states, **options) | our_weight_gradients(rnn, module)
    assert_close(out, ref, torch.float64)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
@pytest.mark.parametrize("bias", [True, False], ids=["", "no_bias"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("module_type", MODULES)
def test_equals_the_module(module_type, num_layers, bidirectional, bias, batch_first):
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "bias": bias, "batch_first": batch_first}
    module, rnn = converted(module_type, **options, dropout=0.0)
    check(module, rnn, randn(B, T, F) if batch_first else randn(T, B, F), initial_states(module))


@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
@pytest.mark.parametrize("module_type", MODULES)
def test_equals_the_module_without_a_batch(module_type, batch_first):
    module, rnn = converted(module_type, num_layers=2, bidirectional=True, batch_first=batch_first)
    check(module, rnn, randn(T, F), initial_states(module, batch=()))


@pytest.mark.parametrize("lengths", [[3, 7, 1, 3], [7, 3, 3, 1]], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
@pytest.mark.parametrize("module_type", MODULES)
def test_equals_the_module_on_packed_sequences(module_type, batch_first, lengths):
    module, rnn = converted(module_type, num_layers=2, bidirectional=True, batch_first=batch_first)
    is_sorted = lengths == sorted(lengths, reverse=True)

    def pack(x):
        return pack_padded_sequence(x, torch.tensor(lengths), batch_first=batch_first, enforce_sorted=is_sorted)

    x = randn(B, T, F) if batch_first else randn(T, B, F)
    check(module, rnn, x, initial_states(module), pack=pack)


def test_copies_dropout_and_mode():
    module, rnn = converted(nn.LSTM, num_layers=2, dropout=0.3)
    assert rnn.dropout == 0.3
    assert rnn.training
    assert not FlashRNN.from_torch(module.eval()).training


def test_copies_dtype_and_does_not_share_weights():
    module = nn.GRU(3, 4, dtype=torch.bfloat16)
    rnn = FlashRNN.from_torch(module, backend="vanilla")
    assert rnn.recurrent_l0.R.dtype == torch.bfloat16
    assert rnn.recurrent_l0.backend == "vanilla"
    before = rnn.input_l0.weight.clone()
    with torch.no_grad():
        module.weight_ih_l0.zero_()
    assert torch.equal(rnn.input_l0.weight, before)


def test_frozen_weights_stay_frozen():
    module = nn.LSTM(3, 4)
    for name in ("weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        getattr(module, name).requires_grad_(False)
    rnn = FlashRNN.from_torch(module)
    trained = {name: parameter.requires_grad for name, parameter in rnn.named_parameters()}
    assert trained == {"input_l0.weight": True, "recurrent_l0.R": False, "recurrent_l0.b": False}


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.LSTM(3, 4, proj_size=2), ValueError, "no counterpart of proj_size=2; only proj_size=0 is possible"),
        (nn.RNN(3, 4, nonlinearity="relu"), ValueError, "takes nn.RNN with nonlinearity='tanh', got 'relu'"),
        (nn.LSTMCell(3, 4), TypeError, "from_torch takes an nn.LSTM, nn.GRU or nn.RNN, got LSTMCell"),
    ],
    ids=["proj_size", "relu", "LSTMCell"],
)
def test_modules_without_a_counterpart(module, error, message):
    with pytest.raises(error, match=message):
        FlashRNN.from_torch(module)
