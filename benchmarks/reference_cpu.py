"""The reference on one CPU core, compared with autograd through the time loop."""

import time
from collections.abc import Callable

import torch

from benchmarks.cases import Case
from benchmarks.time_loop import time_loop
from benchmarks.timing import ms_in_turns, quantiles, random_inputs
from flashrnn import flashrnn, get_cell

_SIZES = [(64, 40, 1, 64), (64, 40, 4, 64), (4, 256, 4, 64)]  # B, T, N, D


def rows() -> list[dict]:
    """Forward and backward of the reference on one CPU core in float32, compared with autograd through the time loop:
    processor time, and the memory saved for the backward pass."""
    torch.set_num_threads(1)
    return [_reference_row(cell, *size) for cell in ("lstm", "slstm") for size in _SIZES]


def _reference_row(name: str, B: int, T: int, N: int, D: int) -> dict:
    inputs = random_inputs(Case(name, N, D, B, T).shapes(), torch.float32, "cpu")
    d_h = torch.randn(B, T, N, D)
    forward = {
        "autograd": lambda: time_loop(get_cell(name), *inputs),
        "reference": lambda: flashrnn(*inputs, function=name, backend="vanilla")[0],
    }
    train = {k: lambda run=run: torch.autograd.grad(run(), inputs, d_h) for k, run in forward.items()}
    for ours, theirs in zip(train["reference"](), train["autograd"](), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    ms = processor_time(train)
    speedup = round(ms["autograd"]["p50"] / ms["reference"]["p50"], 2)
    kept_mb = {k: round(_saved_bytes(run) / 1e6, 1) for k, run in forward.items()}
    return {"cell": name, "B": B, "T": T, "N": N, "D": D, "speedup": speedup, "ms": ms, "kept_mb": kept_mb}


def _saved_bytes(forward: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that autograd saves for the backward of `forward`."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()  # kept until everything is counted, so that no address is used twice
    del out
    return sum(kept.values())


def processor_time(
    functions: dict[str, Callable], rounds: int = 50, warmup: int = 5, clock: Callable[[], float] = time.process_time
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of functions that are called in turns: processor time, or that of another clock."""
    times = ms_in_turns(functions, warmup + rounds, clock)
    return {name: quantiles(ms[warmup:], digits=2) for name, ms in times.items()}
