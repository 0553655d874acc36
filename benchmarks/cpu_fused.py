"""Backend cpu_fused on CPU cores, compared with the reference and nn.LSTM, and the time of its first calls."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.cases import Case
from benchmarks.reference_cpu import processor_time
from benchmarks.timing import random_inputs
from flashrnn import flashrnn

_SIZES = [
    *((cell, 64, 40, N, 64) for cell in ("lstm", "slstm") for N in (1, 2, 4)),
    *((cell, B, 1024, 4, 64) for cell in ("lstm", "slstm") for B in (1, 4)),
    *(("lstm", 16, 32, 1, D) for D in (128, 256, 384)),
]  # cell, B, T, N, D
_FIRST_CALL = """
import time
start = time.process_time()
import torch, flashrnn
imported = time.process_time()
x = [torch.randn(shape, requires_grad=True) for shape in ((4, 8, 4, 1, 64), (4, 1, 64, 64), (4, 1, 64))]
flashrnn.flashrnn(*x, function="slstm", backend=BACKEND)[0].sum().backward()
print(imported - start, time.process_time() - imported)
"""


def rows() -> Iterator[dict]:
    """Milliseconds of forward and backward in float32, with the backends taking turns (for one head also nn.LSTM,
    including its input product): processor time of one thread, and wall time of two threads, which needs an idle
    machine. Also the seconds of processor time of the first call in a process (sLSTM 1 x 64, forward and backward) with
    an empty and with a full cache."""
    for threads, clock in ((1, time.process_time), (2, time.perf_counter)):
        torch.set_num_threads(threads)
        for case in _SIZES:
            yield {"threads": threads} | _row(*case, clock)
    for backend in ("cpu_fused", "vanilla"):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                yield {"first_call": backend, "cache": cache, "seconds": _first_call(backend, folder)}


def _row(name: str, B: int, T: int, N: int, D: int, clock: Callable[[], float]) -> dict:
    inputs = random_inputs(Case(name, N, D, B, T).shapes(), torch.float32, "cpu")
    d_h = torch.randn(B, T, N, D)

    def train(backend: str) -> Callable[[], tuple]:
        return lambda: torch.autograd.grad(flashrnn(*inputs, function=name, backend=backend)[0], inputs, d_h)

    functions = {backend: train(backend) for backend in ("cpu_fused", "vanilla")}
    for ours, theirs in zip(functions["cpu_fused"](), functions["vanilla"](), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())
    if name == "lstm" and N == 1:
        peer, x = torch.nn.LSTM(D, D, batch_first=True), torch.randn(B, T, D, requires_grad=True)
        functions["nn.LSTM"] = lambda: torch.autograd.grad(peer(x)[0], (x, *peer.parameters()), d_h[:, :, 0])
    ms = processor_time(functions, rounds=20, warmup=2, clock=clock)
    speedup = {peer: round(ms[peer]["p50"] / ms["cpu_fused"]["p50"], 2) for peer in functions if peer != "cpu_fused"}
    return {"cell": name, "B": B, "T": T, "N": N, "D": D, "speedup": speedup, "ms": ms}


def _first_call(backend: str, folder: str) -> dict[str, float]:
    code = f"BACKEND = {backend!r}{_FIRST_CALL}"
    environment = os.environ | {"FLASHRNN_CACHE": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imports, call = map(float, done.stdout.split())
    return {"imports": round(imports, 2), "first_call": round(call, 2)}
