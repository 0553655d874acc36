"""Both directions of a layer in one recurrence, as on a GPU, compared with one direction after the other."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from flashrnn import FlashRNN, directions, get_cell
from flashrnn.gpu import named_gpu
from flashrnn.problem import Problem
from tests.tolerances import assert_close

OPTIONS = [{}, {"function": "gru", "num_layers": 2, "num_heads": 2}, {"batch_first": True, "bias": False}]


@pytest.fixture
def faster(monkeypatch):
    """Pretend that running both directions at once is faster; return a list of the number of heads of each call."""
    heads, run = [], directions.flashrnn

    def record(Wx, *args, **options):
        heads.append(Wx.shape[3])
        return run(Wx, *args, **options)

    monkeypatch.setattr(directions, "is_faster", lambda *_: True)
    monkeypatch.setattr(directions, "flashrnn", record)
    return heads


def results(network: FlashRNN, *args, **options) -> dict[str, torch.Tensor]:
    out, last = network(*args, **options)
    out, last = getattr(out, "data", out), last if isinstance(last, tuple) else (last,)
    loss = out.sin().sum() + sum((i + 2) * s.square().sum() for i, s in enumerate(last))
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    names = [f"d_{name}" for name, _ in network.named_parameters()]
    return {"out": out, **{f"last {i}": s for i, s in enumerate(last)}, **dict(zip(names, gradients, strict=True))}


def pair(**options) -> FlashRNN:
    torch.manual_seed(0)
    return FlashRNN(5, 6, bidirectional=True, dtype=torch.float64, backend="cpu_fused", **options)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_equal_one_direction_after_the_other(options, given, faster, monkeypatch):
    network = pair(**options)
    x = torch.randn((3, 4, 5) if network.batch_first else (4, 3, 5), dtype=torch.float64)
    states = tuple(torch.randn(2 * network.num_layers, 3, 6, dtype=torch.float64) for _ in network.cell.states)
    states = (states if len(states) > 1 else states[0]) if given else None
    found = results(network, x, states)
    assert faster == [2 * network.num_heads] * network.num_layers
    monkeypatch.setattr(directions, "is_faster", lambda *_: False)
    assert_close(found, results(network, x, states), torch.float64)


PACKED = {
    "packed": lambda x: {"input": pack_sequence([x[:3, 0], x[:, 1], x[:1, 2]], enforce_sorted=False)},
    "documents": lambda x: {"input": x[:, :1], "cu_seqlens": torch.tensor([0, 2, 4])},
}


@pytest.mark.parametrize("layout", PACKED)
def test_packed_sequences_run_both_directions_at_once(layout, faster, monkeypatch):
    network, given = pair(), PACKED[layout](torch.randn(4, 3, 5, dtype=torch.float64))
    found = results(network, **given)
    assert faster == [2]
    monkeypatch.setattr(directions, "is_faster", lambda *_: False)
    assert_close(found, results(network, **given), torch.float64)


def test_resets_backends_and_hooks_can_prevent_joint_calls(faster):
    network, x = pair(), torch.randn(4, 3, 5, dtype=torch.float64)
    network(x, reset=torch.zeros(3, 4, dtype=torch.bool))
    network(x[:, :1], cu_seqlens=torch.tensor([0, 1, 2, 4]))
    network.recurrent_l0.backend = "vanilla"
    network(x)
    network.recurrent_l0.backend = "cpu_fused"
    network.recurrent_l0_reverse.register_forward_hook(lambda *_: None)
    network(x)
    assert faster == []


@pytest.mark.parametrize(("batch", "at_once"), [(16, True), (2048, False)])
def test_joint_calls_are_faster_only_for_small_batches(batch, at_once):
    gpu, device = named_gpu("H100"), torch.device("cuda")
    problem = Problem(get_cell("lstm"), 1, 512, torch.bfloat16, device, True, False, gpu)
    assert directions.is_faster(problem, batch, "auto") is at_once
    assert not directions.is_faster(problem, batch, "triton_fused")
    assert not directions.is_faster(problem._replace(device=torch.device("cpu"), assumed_gpu=None), batch, "auto")


def test_explain_mentions_joint_directions(faster):
    assert "both directions" in pair().explain(16)
    assert "both directions" not in FlashRNN(5, 6).explain(16)
    assert "both directions" not in pair().explain(16, reset=True)
