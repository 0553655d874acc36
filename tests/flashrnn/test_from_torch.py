"""FlashRNN with the weights of nn.LSTM, nn.GRU and nn.RNN: same outputs, last states and gradients."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from flashrnn import FlashRNN
from tests.flashrnn.networks import results
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


def check(module: nn.Module, rnn: FlashRNN, x: torch.Tensor, states, **options) -> None:
    assert_close(results(rnn, x, states, **options), results(module, x, states, **options), torch.float64)


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


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
def test_step_equals_the_cell(kind):
    torch.manual_seed(0)
    cell = kind(F, H, dtype=torch.float64)
    cell.weight_hh.requires_grad_(False)
    rnn = FlashRNN.from_torch(cell)
    assert not rnn.recurrent_l0.R.requires_grad
    assert rnn.input_l0.weight.requires_grad
    states, of_cell = None, None
    for _ in range(3):
        x = torch.randn(B, F, dtype=torch.float64)
        out, states = rnn.step(x, states)
        of_cell = cell(x, of_cell)
    h = of_cell[0] if isinstance(of_cell, tuple) else of_cell
    torch.testing.assert_close(out, h, rtol=0, atol=1e-12)


def test_networks_without_a_pytorch_counterpart_are_an_error():
    with pytest.raises(TypeError, match=r"got Linear$"):
        FlashRNN.from_torch(nn.Linear(3, 4))
    normed = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    with pytest.raises(TypeError, match=r"got ParametrizedLSTM, a subclass.* remove its parametrizations"):
        FlashRNN.from_torch(normed)
    for options in ({"function": "slstm"}, {"num_heads": 2}):
        with pytest.raises(ValueError, match=r"function='\w+' and num_heads=\d"):
            FlashRNN(3, 4, **options).to_torch()


OPTIONS = {"num_layers": 2, "bidirectional": True, "batch_first": True}
KINDS = [nn.LSTM, partial(nn.LSTM, proj_size=3), nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")]


@pytest.mark.parametrize("kind", KINDS)
def test_to_torch_and_back(kind):
    module = kind(F, H, **OPTIONS, dtype=torch.float64).eval()
    back = FlashRNN.from_torch(module).to_torch()
    assert repr(back) == repr(module)
    assert not back.training
    torch.testing.assert_close(back(randn(B, T, F)), module(randn(B, T, F)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_state_dicts_can_be_loaded_into_models(kind):
    def model(rnn):
        return nn.ModuleDict({"encoder": rnn, "head": nn.Linear(2, 2, dtype=torch.float64)})

    module = kind(F, H, **OPTIONS, dtype=torch.float64)
    ours = FlashRNN.from_torch(module)
    ours.reset_parameters()
    theirs = model(module).state_dict()
    assert str(model(ours).load_state_dict(theirs)) == "<All keys matched successfully>"
    assert "encoder.weight_ih_l0" in theirs
    torch.testing.assert_close(ours(randn(B, T, F)), module(randn(B, T, F)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.GRU(F, H), r"size mismatch for weight_hh_l0: \[18, 6\] given, \[24, 6\] in this lstm"),
        (nn.LSTM(F, H + 1), r"size mismatch for weight_hh_l0: \[28, 7\] given, \[24, 6\]"),
        (nn.LSTM(F + 1, H), r"size mismatch for input_l0\.weight"),
        (nn.LSTM(F, H, bias=False), r"Missing.*recurrent_l0\.b"),
        (nn.LSTM(F, H, 2), r"Unexpected.*weight_ih_l1"),
    ],
)
def test_state_dict_of_another_network_is_an_error(other, message):
    with pytest.raises(RuntimeError, match=message):
        FlashRNN(F, H).load_state_dict(other.state_dict())


@pytest.mark.parametrize("options", [{"num_heads": 2}, {"function": "slstm"}])
def test_weights_of_pytorch_do_not_fit_other_cells_and_heads(options):
    rnn = FlashRNN(F, H, **options)
    weights = nn.LSTM(F, H).state_dict()
    with pytest.warns(UserWarning, match=r"not loaded: .*this one has function='\w+' and num_heads=\d"):
        assert "weight_hh_l0" in rnn.load_state_dict(weights, strict=False).unexpected_keys


def test_error_for_a_parameter_name_of_pytorch_contains_ours():
    rnn = FlashRNN(F, H, **OPTIONS, proj_size=3)
    ours, theirs = dict(rnn.named_parameters()), dict(rnn.to_torch().named_parameters())
    told = set()
    for name in theirs:
        assert not hasattr(rnn, name)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*to_torch\(\)\.{name} ") as error:
            getattr(rnn, name)
        told.add(re.search(r"it has ([\w.]+),", str(error.value))[1])
    assert told == ours.keys()
    with pytest.raises(AttributeError, match=r"named_parameters\(\)"):
        _ = rnn.all_weights
    with pytest.raises(AttributeError, match=r"no attribute 'weights'$"):
        _ = rnn.weights
