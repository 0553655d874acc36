"""Time until the first result of a new process, with an empty and with a filled cache of kernels."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

from benchmarks import ROOT
from benchmarks.cases import Case, select


def rows(case: Sequence[str], rounds: int) -> Iterator[dict]:
    """Seconds of the first forward pass, and of the first forward and backward pass, with empty and filled cache."""
    for chosen in select("main", case):
        for _ in range(rounds):
            with TemporaryDirectory() as cache:
                for state in ("empty", "filled"):
                    yield vars(chosen) | {"cache": state} | _in_new_process(chosen, cache)


def _in_new_process(case: Case, cache: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.first_call", json.dumps(vars(case))]
    environment = os.environ | {"FLASHRNN_CACHE": cache}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.name} failed in its process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def seconds(case: Case) -> dict:
    """Time the call in a program that has imported everything and used the GPU, so that its libraries are loaded."""
    import torch
    from cuda import pathfinder  # noqa: F401
    from cuda.bindings import driver, nvrtc  # noqa: F401
    from cuda.core import Program  # noqa: F401

    from benchmarks.ours import BACKEND
    from benchmarks.timing import random_inputs
    from flashrnn import flashrnn

    dtype = getattr(torch, case.dtype)
    linear = torch.nn.Linear(case.D, case.D, device="cuda", dtype=dtype)
    linear(torch.ones(8, case.D, device="cuda", dtype=dtype)).sum().backward()
    inputs = random_inputs(case.shapes(), dtype)
    torch.cuda.synchronize()
    start = time.perf_counter()
    h, _ = flashrnn(*inputs, function=case.function, backend=BACKEND)
    torch.cuda.synchronize()
    forward = time.perf_counter()
    torch.autograd.grad(h.sum(), inputs)
    torch.cuda.synchronize()
    end = time.perf_counter()
    return {"forward_s": round(forward - start, 3), "forward+backward_s": round(end - start, 3)}


if __name__ == "__main__":
    print(json.dumps(seconds(Case(**json.loads(sys.argv[1])))))
