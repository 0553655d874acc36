"""Bytes moved by the kernels, from the GPU's performance counters, which Nsight Compute (ncu) reads."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import ROOT
from benchmarks.cases import MODES, Case, select

COUNTERS = {"dram__bytes.sum": "memory_bytes", "lts__t_bytes.sum": "l2_bytes"}


def rows(suite: str, case: Sequence[str]) -> Iterator[dict]:
    """Bytes read from and written to memory, and through the L2 cache, by each kernel of a forward pass without
    gradients and of a forward and backward pass. The caches are emptied before each kernel."""
    for chosen in select(suite, case):
        for mode in MODES:
            yield vars(chosen) | {"mode": mode, "kernels": _count(chosen, mode)}


def _count(case: Case, mode: str) -> list[dict]:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ValueError("ncu (NVIDIA Nsight Compute), which reads the counters, is not on the PATH")
    options = ["--csv", "--page=raw", "--print-units=base", "--clock-control=none", "--kernel-name=regex:^flashrnn_"]
    program = [sys.executable, "-m", "benchmarks.counters", json.dumps(vars(case)), mode]
    command = [ncu, *options, f"--metrics={','.join(COUNTERS)}", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ncu failed for {case.name}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return list(parse(done.stdout.splitlines()))


def parse(lines: Iterable[str]) -> Iterator[dict]:
    """Yield kernels and their counters from ncu's output, a table of quoted values with units in its first row."""
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["ID"]:
            counted = {name: int(float(row[metric].replace(",", ""))) for metric, name in COUNTERS.items()}
            yield {"kernel": row["Kernel Name"]} | counted


def main() -> None:
    import torch

    from benchmarks.ours import BACKEND, results
    from benchmarks.timing import random_inputs

    case, mode = Case(**json.loads(sys.argv[1])), sys.argv[2]
    inputs = random_inputs(case.shapes(), getattr(torch, case.dtype))
    d_h = torch.randn(case.B, case.T, case.N, case.D, device="cuda")
    results(case, mode, inputs, d_h, BACKEND)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
