"""Implementations by others for the same sizes: cuDNN's recurrent networks and flashrnn from PyPI."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import torch
from torch import nn

from benchmarks import ROOT
from benchmarks.cases import TRAINING, Case, Job
from benchmarks.timing import Effort, measure, tf32
from benchmarks.worker import Worker
from flashrnn import get_cell

CUDNN = {"lstm": nn.LSTM, "gru": nn.GRU, "elman": nn.RNN}


def cudnn_supports(case: Case) -> bool:
    return case.N == 1 and case.function in CUDNN


def cudnn(job: Job, effort: Effort, dtype: torch.dtype) -> dict:
    """Measure PyTorch's layer in `dtype`, time-major as in cuDNN."""
    rounded = torch.backends.cudnn.rnn.fp32_precision == "tf32"
    with tf32(rounded):  # applies to the separate input product too
        return layer(job, effort, CUDNN[job.case.function], dtype)


def layer(job: Job, effort: Effort, kind: Callable[[int, int], nn.Module], dtype: torch.dtype) -> dict:
    """Measure a layer of this kind with one head, and the input product that its time includes."""
    case, training = job.case, job.mode == TRAINING
    gates = len(get_cell(case.function).input_gates)
    x = torch.randn(case.T, case.B, case.D, device="cuda", dtype=dtype, requires_grad=True)
    # In training mode, a layer stores residuals even if no backward pass follows.
    rnn = kind(case.D, case.D).to("cuda", dtype).train(training)
    linear = nn.Linear(case.D, gates * case.D, device="cuda", dtype=dtype)
    whole = measure(lambda: rnn(x)[0], [x, *rnn.parameters()], training, effort)
    product = measure(lambda: linear(x), [x, *linear.parameters()], training, effort)
    return whole | {"input_ms": product["ms"]}


FLASHRNN = {"flashrnn_1.0.8": "cuda_fused", "flashrnn_1.0.8_cuda": "cuda"}
"""The implementations by flashrnn from PyPI, each with its backend."""


@dataclass(frozen=True)
class PyPIFlashRNN:
    """A backend of flashrnn 1.0.8.

    It compiles for every cell, batch size and head size, which takes minutes and need not reproduce the binary in its
    cache. Therefore each process builds, waits until all others are ready, and then measures what it has loaded.
    """

    wheel: Path
    name: str = "flashrnn_1.0.8"
    parallel: int = max(1, (os.cpu_count() or 1) * 3 // 4)  # number of simultaneous builds
    build_seconds: float = 300
    measure_seconds: float = 120
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.pypi_flashrnn")
    folder: Path = Path(tempfile.gettempdir()) / "flashrnn_1.0.8"  # later runs reuse what is built there

    def supports(self, case: Case) -> bool:
        return case.function in ("lstm", "slstm")

    def measure(self, jobs: Iterable[Job], effort: Effort) -> Iterator[tuple[Job, dict]]:
        builds: dict[Case, list[Job]] = {}
        for job in jobs:
            builds.setdefault(replace(job.case, T=0), []).append(job)
        package, environment = self._unpack(), self._environment(min(self.parallel, len(builds)))
        start = partial(Worker, [*self.command, str(package)], cwd=ROOT, env=environment)
        groups = [list(builds.values())[k : k + self.parallel] for k in range(0, len(builds), self.parallel)]
        for group in groups:
            with ThreadPoolExecutor(self.parallel) as pool, ExitStack() as stack:
                workers = [stack.enter_context(start()) for _ in group]
                built = list(pool.map(self._build, workers, group))
                for worker, result, same in zip(workers, built, group, strict=True):
                    with worker:  # its memory is needed for the next
                        for job in same:
                            yield job, result if "error" in result else result | self._measure(worker, job, effort)

    def _build(self, worker: Worker, jobs: list[Job]) -> dict:
        return worker.ask(self.build_seconds, do="build", **self._sizes(jobs[0].case))

    def _measure(self, worker: Worker, job: Job, effort: Effort) -> dict:
        options = {"training": job.mode == TRAINING, "effort": effort}
        return worker.ask(self.measure_seconds, do="measure", **self._sizes(job.case), **options)

    def _unpack(self) -> Path:
        """Unpack once, because the build depends on the modification times of the sources."""
        package = self.folder / self.wheel.stem
        if not package.exists():
            self.folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as unpacked, ZipFile(self.wheel) as wheel:
                wheel.extractall(Path(unpacked) / "package")
                os.rename(Path(unpacked) / "package", package)
        return package

    def _environment(self, builds: int) -> dict[str, str]:
        """Return the environment for this number of simultaneous builds."""
        extensions = self.folder / "extensions"
        for lock in extensions.glob("*/lock"):
            lock.unlink()  # left by a killed run; this one would wait for it forever
        return os.environ | {
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "MAX_JOBS": str(max(1, (os.cpu_count() or 1) // max(1, builds))),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja is next to Python
        }

    def _sizes(self, case: Case) -> dict:
        sizes = {"function": case.function, "shapes": case.shapes(), "dtype": case.dtype}
        return {"backend": FLASHRNN[self.name], **sizes}
