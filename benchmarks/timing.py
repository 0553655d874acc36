"""Random inputs, whether their products are TF32, and the time and memory of what runs on them.

Imports nothing of this project's, so that the process of another package of the name `flashrnn` can use it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Effort(NamedTuple):
    """Milliseconds for which a function is called before and while it is timed."""

    warmup: int
    rep: int


FULL, QUICK = Effort(100, 400), Effort(25, 50)


def random_inputs(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Return Wx, R and b of these shapes and of the sizes of a trained network; they ask for gradients."""
    torch.manual_seed(0)
    scale = {"R": shapes["R"][-1] ** -0.5}
    inputs = (scale.get(name, 1.0) * torch.randn(*shape, device=device) for name, shape in shapes.items())
    return [x.to(dtype).requires_grad_() for x in inputs]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let PyTorch's products and cuDNN's recurrent layers round float32 to TF32, or not, within this context."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


Outputs = Tensor | tuple[Tensor, ...]


def call_of(forward: Callable[[], Outputs], inputs: Sequence[Tensor], training: bool) -> Callable[[], object]:
    """Return a call of `forward` without gradients, or with those of `inputs`."""
    if not training:
        return torch.no_grad()(forward)
    outputs = forward()
    d_outputs = [torch.randn_like(x.detach()) for x in ([outputs] if isinstance(outputs, Tensor) else outputs)]
    return lambda: torch.autograd.grad(forward(), inputs, d_outputs)


def measure(forward: Callable[[], Outputs], inputs: Sequence[Tensor], training: bool, effort: Effort) -> dict:
    """Measure `forward` without gradients, or with those of `inputs`: its time, and its memory beside the inputs."""
    run = call_of(forward, inputs, training)
    _call_ms(run, effort.warmup)
    call_ms = _call_ms(run, effort.rep / 4)
    repetitions = max(_FEWEST, int(effort.rep / call_ms))
    return {"ms": quantiles(device_ms(run, repetitions)), "call_ms": round(call_ms, 4), "peak_mib": _peak_mib(run)}


def measure_in_a_row(forward: Callable[[], Outputs], inputs: Sequence[Tensor], training: bool) -> dict:
    """Measure time alone, of the last of a few calls in a row, which find the caches warm: many times cheaper."""
    run = call_of(forward, inputs, training)
    run()  # compiles, and takes memory from the driver
    return {"ms": quantiles(_consecutive_ms(run, _IN_A_ROW)[_IN_A_ROW // 2 :])}


_IN_A_ROW = 10
_FEWEST = 5  # repetitions of a call, however long it takes
_CYCLES = 2e9  # of a GPU in a second, at most


def _call_ms(run: Callable, ms: float) -> float:
    """Return the milliseconds of one of many calls, one after the other, for about `ms`."""
    calls = max(_FEWEST, int(ms / 1000 / seconds(run, 1)))
    return 1000 * seconds(run, calls) / calls


def seconds(run: Callable, calls: int) -> float:
    """Return the seconds that so many calls one after the other take, on host and device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def ms_in_turns(
    functions: Mapping[str, Callable], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the milliseconds of `rounds` calls of each function, in turns, so that other load meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(1000 * (clock() - start))
    return times


def device_ms(run: Callable, repetitions: int) -> list[float]:
    """Return the milliseconds between events on the device around each call.

    Before it the L2 cache is emptied, and the device waits for as long as the host takes to ask for the whole call.
    """
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    torch.cuda.synchronize()
    ahead = int(2 * _host_seconds(run, min(repetitions, _FEWEST)) * _CYCLES)
    for start, end in events:
        cache.zero_()
        torch.cuda._sleep(ahead)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _consecutive_ms(run: Callable, calls: int) -> list[float]:
    """Return the milliseconds of each of the calls, for which the device waits until the host has asked for all of
    them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2 * calls * _host_seconds(run) * _CYCLES))
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def _host_seconds(run: Callable, calls: int = _FEWEST) -> float:
    """Return how long the host is busy with a call: the least of a few, because the device will wait as long before
    each."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def quantiles(times: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return the median and what bounds the middle three fifths, rounded."""
    p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
    found = {"p20": p20, "p50": statistics.median(times), "p80": p80}
    return {name: round(ms, digits) for name, ms in found.items()}


def _peak_mib(run: Callable) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
