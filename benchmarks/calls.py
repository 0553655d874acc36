"""Host time of an eager call, compared with nn.LSTM in the same process."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.cases import HIDDEN, MODES, TRAINING, Case
from benchmarks.timing import call_of, quantiles, seconds
from flashrnn import FlashRNN, Recurrence, flashrnn

PEER = "nn.LSTM"
_ROUNDS, _CALLS = 20, 50


def rows() -> Iterator[dict]:
    """Microseconds per eager call of an LSTM in float16 on 16 sequences of 4 time steps, so few that the host takes
    longer than the GPU. Each value is the mean of 50 consecutive calls, in 20 rounds in which the implementations take
    turns. nn.LSTM and FlashRNN include the input product; nn.LSTM has one head. over_nn_lstm: time relative to that of
    nn.LSTM (medians)."""
    for N, D in ((12, 64), (1, HIDDEN)):
        case = Case("lstm", N, D, 16, T=4, dtype="float16")
        for mode in MODES:
            times = in_turns(eager_calls(case, mode == TRAINING, "cuda"))
            for name, us in times.items():
                share = round(us["p50"] / times[PEER]["p50"], 3)
                yield vars(case) | {"mode": mode, "call": name, "us": us, "over_nn_lstm": share}


def eager_calls(case: Case, training: bool, device: str) -> dict[str, Callable[[], object]]:
    """Return calls with the same sizes by name: without gradients, or with those of inputs and parameters."""
    options = {"device": device, "dtype": getattr(torch, case.dtype)}
    width = case.N * case.D
    x = torch.randn(case.T, case.B, width, requires_grad=True, **options)
    Wx = torch.randn(case.shapes()["Wx"], requires_grad=True, **options)
    networks = {
        PEER: (nn.LSTM(width, width, **options).train(training), x),  # in training mode, it saves residuals
        "flashrnn.FlashRNN": (FlashRNN(width, width, num_heads=case.N, **options), x),
        "flashrnn.Recurrence": (Recurrence(width, num_heads=case.N, **options), Wx),
    }
    calls = {
        name: call_of(lambda network=network, given=given: network(given)[0], [given, *network.parameters()], training)
        for name, (network, given) in networks.items()
    }
    R, b = networks["flashrnn.Recurrence"][0].parameters()

    def function() -> Tensor:
        return flashrnn(Wx, R, b)[0]

    return calls | {"flashrnn.flashrnn": call_of(function, [Wx, R, b], training)}


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Return the microseconds of each call, for rounds in which the calls take turns."""
    for call in calls.values():
        seconds(call, _CALLS)
    times = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            times[name].append(1e6 * seconds(call, _CALLS) / _CALLS)
    return {name: quantiles(us, digits=1) for name, us in times.items()}
