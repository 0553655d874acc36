"""When layers on the CPU run by oneDNN, and their results."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flashrnn import Cell, FlashRNN, onednn
from flashrnn._torch_private import onednn_computes
from tests.tolerances import BOUNDS

NETWORKS = [{}, {"num_layers": 2, "bidirectional": True, "bias": False}, {"batch_first": True}]


@pytest.fixture
def taken(monkeypatch):
    """Return a list of the results of all calls, with None for calls that did not run by oneDNN."""
    monkeypatch.setattr(onednn, "_has_avx512", lambda: True)
    results, run = [], onednn.run

    def record(*args):
        results.append(run(*args))
        return results[-1]

    monkeypatch.setattr(onednn, "run", record)
    return results


def gradients(network: nn.Module, x: torch.Tensor, states) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    out, (h, c) = network(x, states)
    weights = [w for name, w in network.named_parameters() if "bias_hh" not in name]
    return out, h, c, *(g.flatten() for g in torch.autograd.grad(out.sum() + c.sum(), (x, *weights)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", NETWORKS, ids=str)
def test_results_and_gradients_equal_nn_lstm(options, dtype, taken):
    torch.manual_seed(0)
    theirs = nn.LSTM(5, 6, **options).to(dtype)
    ours, x = FlashRNN.from_torch(theirs), torch.randn(4, 4, 5, dtype=dtype)
    sizes = ours.num_layers * len(ours._directions), 4, 6
    states = tuple(torch.randn(sizes, dtype=dtype) for _ in range(2))
    found, expected = gradients(ours, x, states), gradients(theirs, x, states)
    assert (taken[0] is not None) is onednn_computes(dtype)
    assert found[2].dtype == torch.float32
    # parameters have another order, because input product and recurrence are separate modules
    assert_close([f.to(dtype) for f in found[:4]], list(expected[:4]), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    norms = [sorted(float(g.norm()) for g in results[4:]) for results in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * BOUNDS[dtype])


def test_dropout_between_layers_equals_nn_lstm():
    theirs = nn.LSTM(5, 6, 2, dropout=0.5)
    ours, x = FlashRNN.from_torch(theirs), torch.randn(4, 3, 5)
    outputs = []
    for network in (ours, theirs):
        torch.manual_seed(3)
        outputs.append(network(x)[0])
    assert_close(*outputs)
    assert not torch.equal(ours(x)[0], outputs[0])
    assert torch.equal(ours.eval()(x)[0], ours(x)[0])


def _named_alike(i, f, z, o, h, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * z
    return torch.sigmoid(o) * torch.tanh(c), c


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "vanilla"},
        {"function": "gru"},  # in float32
        {"function": Cell("lstm", _named_alike, ("h", "c"))},
        {"num_heads": 2},
        {"proj_size": 3},
        {"dtype": torch.float64},
    ],
    ids=["backend", "cell", "cell's name", "heads", "projection", "dtype"],
)
def test_unsupported_networks_do_not_run_by_onednn(options, taken):
    network = FlashRNN(5, 6, **options)
    network(torch.randn(4, 3, 5, dtype=network.recurrent_l0.R.dtype))
    assert taken == [None]


def test_resets_hooks_and_compilers_prevent_onednn(taken):
    network, x = FlashRNN(5, 6), torch.randn(4, 3, 5)
    expected = network(x)[0]
    assert_close(network(x, reset=torch.zeros(3, 4, dtype=torch.bool))[0], expected)
    assert_close(torch.compile(network, backend="eager")(x)[0], expected)
    torch.func.grad(lambda x: network(x)[0].sum())(x)
    seen = []
    network.recurrent_l0.register_forward_hook(lambda *_: seen.append(1))
    assert_close(network(x)[0], expected)
    assert seen
    assert sum(result is not None for result in taken) == 1


@pytest.mark.parametrize(
    ("B", "H", "options", "by_pytorch"),
    [(2, 512, {}, False), (4, 512, {}, True), (1, 200, {}, False), (1, 8, {"bidirectional": True}, True)],
)
def test_few_sequences_run_by_cpu_fused(B, H, options, by_pytorch, taken):
    theirs, x = nn.LSTM(5, H, **options), torch.randn(3, B, 5)
    found, expected = (gradients(network, x, None) for network in (FlashRNN.from_torch(theirs), theirs))
    assert (taken[0] is not None) is by_pytorch
    assert_close(found[:4], expected[:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("T", "B", "H", "by_pytorch"), [(1, 1, 6, True), (2, 2048, 32, True), (2, 8, 32, False)])
def test_gru_in_bfloat16_runs_by_nn_gru_if_faster(T, B, H, by_pytorch, taken):
    theirs = nn.GRU(5, H, dtype=torch.bfloat16)
    ours, x = FlashRNN.from_torch(theirs), torch.randn(T, B, 5, dtype=torch.bfloat16)
    found, expected = ours(x)[0], theirs(x)[0]
    assert any(result is not None for result in taken) is (by_pytorch and onednn_computes(torch.bfloat16))
    assert_close(found, expected, rtol=BOUNDS[torch.bfloat16], atol=BOUNDS[torch.bfloat16])


def test_wrong_states_are_an_error():
    with pytest.raises(ValueError, match=r"\('h', 'c'\) .*\[1, 3, 6\]"):
        FlashRNN(5, 6)(torch.randn(4, 3, 5), (torch.zeros(1, 3, 6),))
