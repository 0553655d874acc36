"""Small cases of the kernels under compute-sanitizer, which comes with CUDA's toolkit: `python -m tests.gpu.sanitize`.

A line for each case that fails, with the file of what the tool said. Every case has a process of its own, because the
first error ends what a process can do on its GPU.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flashrnn import get_cell
from tests.suite import Case, check

TOOLS = ("memcheck", "racecheck", "synccheck")
BACKENDS = ("cuda_fused", "cuda")
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (  # one block, clusters, grids
    Case(get_cell("lstm"), B=5, T=4, N=3, D=64),
    Case(get_cell("slstm"), B=9, T=4, N=1, D=128, reset=True),
    Case(get_cell("gru"), B=9, T=4, N=1, D=256),
    Case(get_cell("lstm"), B=9, T=4, N=1, D=256),
    Case(get_cell("lstm"), B=20, T=4, N=1, D=768),
    Case(get_cell("slstm"), B=9, T=4, N=1, D=768),
    Case(get_cell("lstm"), B=5, T=3, N=1, D=1024),
)
CASES = tuple(itertools.product(BACKENDS, SIZES, DTYPES))


def sanitize(tool: str, number: int, folder: Path) -> str | None:
    """What went wrong, if anything."""
    name = "-".join(map(str, CASES[number]))
    options = ["--tool", tool, "--kernel-name", "kns=flashrnn", "--report-api-errors", "no", "--error-exitcode", "1"]
    log = folder / f"{tool}-{name}.txt"
    with log.open("w") as file:
        command = ["compute-sanitizer", *options, sys.executable, "-m", "tests.gpu.sanitize", "--number", str(number)]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    return f"{tool} {name}: {log}" if code else None


def run(number: int) -> None:
    backend, case, dtype = CASES[number]
    try:
        check(backend, case, dtype, "cuda:0")
    except pytest.skip.Exception as reason:
        print(f"not served: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS, help="(default: all)")
    parser.add_argument("--out", type=Path, default=Path("outputs/sanitize"), help="(default: outputs/sanitize)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="cases at a time")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.number is not None:
        return run(options.number)
    if shutil.which("compute-sanitizer") is None:
        sys.exit("error: there is no compute-sanitizer on the PATH; it comes with CUDA's toolkit")
    options.out.mkdir(parents=True, exist_ok=True)
    asked = [(tool, number) for tool in options.tools for number in range(len(CASES))]
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [found for found in pool.map(lambda job: sanitize(*job, options.out), asked) if found]
    print(*failed, f"{len(failed)} of {len(asked)} failed", sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
