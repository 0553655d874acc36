"""FlashRNN compared with nn.LSTM and nn.GRU, including the input product, for shapes of real programs."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from torch import Tensor, nn

from benchmarks.cases import MODES, TRAINING, matching
from benchmarks.layer_cases import LayerCase, cases
from benchmarks.timing import call_of, device_ms, ms_in_turns, quantiles, seconds, tf32
from flashrnn import FlashRNN, warmup

OURS, THEIRS = "FlashRNN", "PyTorch"
_FARTHEST = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}  # largest relative error of outputs
_ROUNDS, _SECONDS = range(7, 201), 1.0  # number of rounds on a CPU, and the seconds that they should take
_CALLS, _CALLS_SECONDS = range(3, 21), 0.05  # the same for calls on a GPU, where a peer's call may take 0.1 s

Network = Callable[[Tensor], Tensor]


def rows(case: Sequence[str], known: Iterable[dict] = ()) -> Iterator[dict]:
    """FlashRNN with backend "auto" compared with nn.LSTM and nn.GRU with the same weights and inputs, time-major and
    including the input product: milliseconds of the forward pass without gradients, and of forward and backward with
    gradients of the input and all weights. With resets, PyTorch's network is called step by step, and its states are
    set to zero in between. Times are measured by events on a GPU; on a CPU, calls take turns, and the times are
    processor time for one thread (less sensitive to the load by other programs) and wall time for several. ratio:
    PyTorch's median relative to ours."""
    gpu = torch.cuda.is_available()
    found = {(case_of(row), row["mode"]): row for row in known}
    chosen = matching(list(cases(gpu)), case, "layers")
    if gpu:
        compile_kernels([network for network in chosen if any((network, mode) not in found for mode in MODES)])
    for network in chosen:
        for mode in MODES:
            row = found.get((network, mode))
            yield row or vars(network) | {"mode": mode} | measured(network, mode, "cuda" if gpu else "cpu")


def case_of(row: dict) -> LayerCase:
    return LayerCase(**{name: row[name] for name in LayerCase.__dataclass_fields__})


def compile_kernels(cases: list[LayerCase]) -> None:
    """Compile the kernels of the networks with one process per processor, because the solver holds Python's lock."""
    distinct = list({replace(case, family="", T=1, num_layers=1): None for case in cases})
    count = min(os.cpu_count() or 1, len(distinct))
    if count > 1:
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile, distinct))


def _compile(case: LayerCase) -> None:
    sizes = {"head_dim": case.H, "batch": case.B, "dtype": case.dtype, "reset": case.reset}
    with tf32(case.precision == "tf32"):
        for training in (False, True):
            warmup(case.cell, training=training, bidirectional=case.bidirectional, **sizes)


def measured(case: LayerCase, mode: str, device: str) -> dict:
    """Return the times of both networks and their ratio, or the reason why there are none."""
    with tf32(case.precision == "tf32"):
        try:
            networks, x = network_pair(case, case.dtype, device, mode == TRAINING)
            check(case, networks, x)
            calls = {
                name: call(network, list(weights), x, mode == TRAINING) for name, (network, weights) in networks.items()
            }
            ms = _on_gpu(calls) if device == "cuda" else _in_turns(calls)
        except torch.OutOfMemoryError as error:
            return {"error": str(error).partition(".")[0]}
    return {"ms": ms, "ratio": round(ms[THEIRS]["p50"] / ms[OURS]["p50"], 3)}


def network_pair(
    case: LayerCase, dtype: torch.dtype, device: str, training: bool = True
) -> tuple[dict[str, tuple[Network, Iterator[Tensor]]], Tensor]:
    """Return both networks, each with its weights, and an input [T, B, H].

    Without `training`, they are in evaluation mode; otherwise nn.LSTM and nn.GRU would save residuals for a backward
    pass.
    """
    torch.manual_seed(0)
    options = {"num_layers": case.num_layers, "bidirectional": case.bidirectional, "dtype": dtype, "device": device}
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[case.cell](case.H, case.H, **options).train(training)
    ours = FlashRNN.from_torch(theirs).train(training)
    x = torch.randn(case.T, case.B, case.H, dtype=dtype, device=device)
    reset = torch.rand(case.B, case.T, device=device) < 1 / 32 if case.reset else None
    stepped = (lambda x: steps(theirs, x, reset)) if case.reset else (lambda x: theirs(x)[0])
    return {OURS: (lambda x: ours(x, reset=reset)[0], ours.parameters()), THEIRS: (stepped, theirs.parameters())}, x


def steps(network: nn.LSTM | nn.GRU, x: Tensor, reset: Tensor) -> Tensor:
    """Return the outputs of PyTorch's network with resets, as programs without support for masks compute them."""
    outputs, states = [], None
    keep = (~reset).t()[:, None, :, None].to(x.dtype)  # [T, 1, B, 1]
    for x_t, keep_t in zip(x.split(1), keep, strict=True):
        if states is not None:
            states = tuple(s * keep_t for s in states) if isinstance(states, tuple) else states * keep_t
        out, states = network(x_t, states)
        outputs.append(out)
    return torch.cat(outputs)


@torch.no_grad()
def check(case: LayerCase, networks: dict, x: Tensor) -> None:
    """Raise RuntimeError if the outputs differ by more than rounding errors, so that times would not be comparable."""
    ours, theirs = (networks[name][0](x).double() for name in (OURS, THEIRS))
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error <= _FARTHEST[case.precision]:
        raise RuntimeError(f"{case.name}: outputs differ by {error:.1e} of their norm")


def call(network: Network, weights: list[Tensor], x: Tensor, training: bool) -> tuple[Callable, list[Tensor], bool]:
    """Return the arguments of `timing.call_of`."""
    x = x.clone().requires_grad_()
    return lambda: network(x), [x, *weights], training


def _on_gpu(calls: dict[str, tuple]) -> dict[str, dict]:
    """Return the milliseconds of a few calls; few, so that all networks are measured within minutes."""
    found = {}
    for name, given in calls.items():
        run = call_of(*given)
        run()  # allocates memory from the driver
        found[name] = quantiles(device_ms(run, _within(_CALLS, _CALLS_SECONDS / seconds(run, 1))))
    return found


def _in_turns(calls: dict[str, tuple]) -> dict[str, dict]:
    """Return the milliseconds of calls that take turns: processor time, or wall time for several threads."""
    functions = {name: call_of(*given) for name, given in calls.items()}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ms_in_turns(functions, 1)  # allocates memory from the system
    one = sum(ms for (ms,) in ms_in_turns(functions, 1, clock).values())
    times = ms_in_turns(functions, _within(_ROUNDS, 1000 * _SECONDS / one), clock)
    return {name: quantiles(ms) for name, ms in times.items()}


def _within(numbers: range, wanted: float) -> int:
    return int(min(max(wanted, numbers.start), numbers.stop - 1))
