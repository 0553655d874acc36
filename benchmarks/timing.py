"""Random inputs, the setting of TF32, and measurements of time and memory.

It imports nothing else of this project, so that the process with another package named `flashrnn` can use it.
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
    """Milliseconds for which a function is called before it is timed (warmup) and while it is timed (rep)."""

    warmup: int
    rep: int


FULL, QUICK = Effort(100, 400), Effort(25, 50)


def random_inputs(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Return Wx, R and b with these shapes and with magnitudes as in a trained network; they require gradients."""
    torch.manual_seed(0)
    scale = {"R": shapes["R"][-1] ** -0.5}
    inputs = (scale.get(name, 1.0) * torch.randn(*shape, device=device) for name, shape in shapes.items())
    return [x.to(dtype).requires_grad_() for x in inputs]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """A context in which PyTorch's products and cuDNN's recurrent layers use TF32 for float32, or not."""
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
    """Measure time, and memory in addition to the inputs, of `forward` without gradients or with those of `inputs`."""
    run = call_of(forward, inputs, training)
    _call_ms(run, effort.warmup)
    call_ms = _call_ms(run, effort.rep / 4)
    repetitions = max(_FEWEST, int(effort.rep / call_ms))
    return {"ms": quantiles(device_ms(run, repetitions)), "call_ms": round(call_ms, 4), "peak_mib": _peak_mib(run)}


def measure_in_a_row(forward: Callable[[], Outputs], inputs: Sequence[Tensor], training: bool) -> dict:
    """Measure only the time, of the last of a few consecutive calls with warm caches. This is many times cheaper."""
    run = call_of(forward, inputs, training)
    run()  # compiles, and allocates memory from the driver
    return {"ms": quantiles(_consecutive_ms(run, _IN_A_ROW)[_IN_A_ROW // 2 :])}


_IN_A_ROW = 10
_FEWEST = 5  # smallest number of repetitions, however long a call takes
_CYCLES = 2e9  # upper bound for the clock cycles of a GPU per second


def _call_ms(run: Callable, ms: float) -> float:
    """Return the mean milliseconds of consecutive calls, which are repeated for about `ms`."""
    calls = max(_FEWEST, int(ms / 1000 / seconds(run, 1)))
    return 1000 * seconds(run, calls) / calls


def seconds(run: Callable, calls: int) -> float:
    """Return the seconds that this number of consecutive calls takes on host and device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def ms_in_turns(
    functions: Mapping[str, Callable], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the milliseconds of `rounds` calls of each function, in turns, so that other load affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(1000 * (clock() - start))
    return times


def device_ms(run: Callable, repetitions: int) -> list[float]:
    """Return the milliseconds between events on the device around each call.

    Before each call, the L2 cache is emptied, and the device waits until the host has launched the whole call.
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
    """Return the milliseconds of each of several calls; the device starts when the host has launched all of them."""
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
    """Return the smallest host time of a few calls; the device will wait for a multiple of it."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def quantiles(times: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return the quantiles p20, p50 and p80, rounded."""
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
