"""FlashRNN as a drop-in replacement for nn.LSTM: arguments, wrappers, compilers, hooks, empty batches."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from flashrnn import FlashRNN
from tests.flashrnn.networks import results
from tests.tolerances import assert_close


@pytest.fixture
def pair():
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 6, 2, bidirectional=True, dtype=torch.float64)
    return lstm, FlashRNN.from_torch(lstm)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_positional_arguments_equal_nn_lstm():
    theirs = list(inspect.signature(nn.RNNBase.__init__).parameters.values())[2:]  # after self and mode
    ours = list(inspect.signature(FlashRNN).parameters.values())
    positional = [(p.name, p.default) for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [(p.name, p.default) for p in theirs]


def test_attributes_equal_nn_lstm(pair):
    lstm, rnn = pair
    names = (*nn.LSTM.__constants__, "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout")
    for name in (*names, "bidirectional", "proj_size", "training"):
        if name not in ("mode", "jit_unused_properties"):
            assert getattr(rnn, name) == getattr(lstm, name), name
    assert rnn.flatten_parameters() is None


@pytest.mark.parametrize("states", [None, (randn(4, 0, 6), randn(4, 0, 6))], ids=["", "states"])
def test_empty_batch_gives_the_same_results(pair, states):
    lstm, rnn = pair
    ours, theirs = results(rnn, randn(7, 0, 5), states), results(lstm, randn(7, 0, 5), states)
    assert_close(ours, theirs, torch.float64)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)  # zeros, not None


def test_empty_batch_can_be_stepped():
    out, (h, c) = FlashRNN(5, 6).step(torch.zeros(0, 5))
    assert out.shape == (0, 6)
    assert h.shape == c.shape == (1, 0, 6)


@pytest.mark.parametrize("network", [0, 1], ids=["theirs", "ours"])
def test_sequences_without_steps_are_an_error(pair, network):
    with pytest.raises((RuntimeError, ValueError), match=r"\b0\b|\bone step\b"):
        pair[network](randn(0, 2, 5))


@pytest.mark.slow  # because of an import
def test_distributed_data_parallel(pair, tmp_path):
    lstm, rnn = pair
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(rnn)
        wrapped(randn(7, 3, 5))[0].sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    lstm(randn(7, 3, 5))[0].sum().backward()
    torch.testing.assert_close(rnn.input_l0.weight.grad, lstm.weight_ih_l0.grad, rtol=0, atol=1e-9)


def test_data_parallel(pair):
    lstm, rnn = pair
    torch.testing.assert_close(nn.DataParallel(rnn)(randn(7, 3, 5)), lstm(randn(7, 3, 5)), rtol=0, atol=1e-9)


def test_hooks_of_modules_and_parameters(pair):
    _, rnn = pair
    seen = []
    rnn.register_forward_hook(lambda module, given, result: seen.append(result[0].shape))
    rnn.recurrent_l0.register_forward_hook(lambda module, given, result: seen.append(result[0].shape))
    rnn.recurrent_l1.R.register_hook(lambda grad: seen.append(grad.shape))
    rnn(randn(7, 3, 5))[0].sum().backward()
    assert [list(shape) for shape in seen] == [[3, 7, 1, 6], [7, 3, 12], [4, 1, 6, 6]]


def test_weight_norm(pair):
    lstm, rnn = pair
    parametrizations.weight_norm(rnn.recurrent_l0, "R")
    x = randn(7, 3, 5)
    torch.testing.assert_close(rnn(x), lstm(x), rtol=0, atol=1e-9)
    with torch.no_grad():
        rnn.recurrent_l0.parametrizations.R.original0.mul_(2)
        lstm.weight_hh_l0.mul_(2)
    torch.testing.assert_close(rnn(x), lstm(x), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_torchscript_compiles_the_pytorch_network(pair):
    lstm, rnn = pair
    scripted = torch.jit.script(nn.Sequential(rnn))
    torch.testing.assert_close(scripted(randn(7, 3, 5)), lstm(randn(7, 3, 5)), rtol=0, atol=1e-9)
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.script(FlashRNN(5, 6, function="slstm"))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace. is deprecated")
def test_trace_has_outputs_and_gradients_for_other_shapes(pair):
    _, rnn = pair
    traced = torch.jit.trace(rnn, randn(7, 3, 5))
    x = randn(2, 4, 5)
    out, expected = traced(x)[0], rnn(x)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad(y.sum(), list(rnn.parameters())) for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_onnx_without_dynamo_is_an_error(pair, tmp_path):
    with pytest.raises(NotImplementedError, match="needs dynamo=True"):
        torch.onnx.export(pair[1], randn(7, 3, 5), tmp_path / "rnn.onnx", dynamo=False)


@pytest.mark.slow
def test_aot_inductor(pair, tmp_path):
    lstm, rnn = pair
    x = randn(7, 3, 5)
    with torch.no_grad():
        program = torch.export.export(rnn, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rnn.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), lstm(x), rtol=0, atol=1e-9)
