"""Speed and memory of the recurrent kernels on a GPU, compared with other implementations in the same run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol
from zipfile import is_zipfile

import torch

from benchmarks import attention, haste, ours, peers, time_loop
from benchmarks.cases import MODES, Case, Job, select
from benchmarks.results import KernelResults, gpu_folder, head, milliseconds
from benchmarks.table import print_table
from benchmarks.timing import FULL, QUICK, Effort
from benchmarks.worker import error_text

WHAT = """Milliseconds to compute h without gradients (forward), or with those of Wx, R and b (forward+backward). ms:
measured by events on the device around each call, with the host ahead. call_ms: consecutive calls, including the host.
peak_mib: memory in addition to the inputs. input_ms: the input product, which the time of a layer includes. errors:
relative errors against float64 over the first steps."""


class Implementation(Protocol):
    """An implementation to measure."""

    name: str

    def supports(self, case: Case) -> bool: ...

    def measure(self, jobs: Iterable[Job], effort: Effort) -> Iterator[tuple[Job, dict]]:
        """Yield every job with its measurements, or with {"error": the reason why there are none}."""


@dataclass(frozen=True)
class InProcess:
    """An implementation that runs in this process."""

    name: str
    run: Callable[[Job, Effort], dict]
    supports: Callable[[Case], bool] = lambda case: True

    def measure(self, jobs: Iterable[Job], effort: Effort) -> Iterator[tuple[Job, dict]]:
        for job in jobs:
            try:
                measured = self.run(job, effort)
            except Exception as error:
                measured = {"error": error_text(error)}
            yield job, measured
            if "error" in measured:
                torch.cuda.synchronize()  # raises if the error destroyed the CUDA context, after which nothing can run


IN_PROCESS = {
    peer.name: peer
    for peer in (
        InProcess("cudnn_fp16", partial(peers.cudnn, dtype=torch.float16), peers.cudnn_supports),
        InProcess("cudnn_bf16", partial(peers.cudnn, dtype=torch.bfloat16), peers.cudnn_supports),
        InProcess("cudnn_fp32", partial(peers.cudnn, dtype=torch.float32), peers.cudnn_supports),
        InProcess("attention", attention.run, attention.supports),
        InProcess("pytorch_loop", time_loop.run, time_loop.supports),
        InProcess("compiled_loop", partial(time_loop.run, prepare=time_loop.compiled), time_loop.supports_unrolled),
        InProcess("graphed_loop", partial(time_loop.run, prepare=time_loop.graphed), time_loop.supports_unrolled),
        *(InProcess(name, partial(ours.run, backend=backend)) for name, backend in ours.OTHERS.items()),
    )
}
PEERS = (*IN_PROCESS, *peers.FLASHRNN, haste.NAME)


def implementations(
    names: Sequence[str], flashrnn_wheel: str | None, haste_sources: str | None
) -> list[Implementation]:
    """Return our implementation and the named peers, or all peers that can be measured for [all]; some need files."""
    files = {**dict.fromkeys(peers.FLASHRNN, flashrnn_wheel), haste.NAME: haste_sources}
    if names == ["all"]:
        names = [name for name in PEERS if files.get(name, "none needed")]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer {name}: expected some of {', '.join(PEERS)}, or all")
        if name in peers.FLASHRNN and flashrnn_wheel is None:
            raise ValueError(f"{name} needs flashrnn_wheel=PATH, as `pip download flashrnn==1.0.8 --no-deps` leaves it")
        if name == haste.NAME and haste_sources is None:
            raise ValueError(f"{name} needs haste_sources=FOLDER, PyPI's haste_pytorch-0.5.0rc0.tar.gz unpacked")
    known = dict(IN_PROCESS)
    if flashrnn_wheel is not None:
        if not is_zipfile(flashrnn_wheel):
            raise ValueError(f"flashrnn_wheel={flashrnn_wheel} is not a wheel")
        known |= {name: peers.PyPIFlashRNN(Path(flashrnn_wheel), name) for name in peers.FLASHRNN}
    if haste_sources is not None:
        package = haste.load(Path(haste_sources))
        known[haste.NAME] = InProcess(haste.NAME, partial(haste.run, package=package), haste.supports)
    return [InProcess(ours.NAME, ours.run), *(known[name] for name in names)]


def measure(
    cases: Sequence[Case], implementations: Sequence[Implementation], results: KernelResults, effort: Effort
) -> None:
    """Measure the jobs that the results lack, add them, and finish the results."""
    for implementation in implementations:
        jobs = [Job(case, mode) for case in cases if implementation.supports(case) for mode in MODES]
        missing = [job for job in jobs if results.missing(job, implementation.name)]
        for job, measured in implementation.measure(missing, effort):
            row = results.add(job, implementation.name, measured)
            outcome = row["error"].splitlines()[0] if "error" in row else f"{milliseconds(row):.3f} ms"
            print(f"{job.case.name} {job.mode} {implementation.name}: {outcome}", flush=True)
    results.finish()


def run(
    suite: str,
    case: Sequence[str],
    peers: Sequence[str],
    flashrnn_wheel: str | None,
    haste_sources: str | None,
    quick: bool,
    out: Path,
    commit: str,
) -> None:
    """Measure cases of a suite, and print a table of all results in the file of the suite."""
    cases, chosen = select(suite, case), implementations(peers, flashrnn_wheel, haste_sources)
    path = out / gpu_folder() / f"kernels_{suite}.json"
    described = {"what": " ".join(WHAT.split()), "suite": suite}
    results = KernelResults(path, described, head(commit) | {"quick": quick})
    measure(cases, chosen, results, QUICK if quick else FULL)
    print_table(results.rows)
    print(path)
