"""Speed and memory of the recurrent kernels on a GPU, beside their peers in the same run."""

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
from benchmarks.timing import Effort
from benchmarks.worker import error_text

WHAT = """Milliseconds of h without gradients (forward), or with those of Wx, R and b (forward+backward). ms: by events
on the device around each call, for which the host is ahead. call_ms: of calls one after the other, with the host's
part. peak_mib: what a call takes beside its inputs. input_ms: the product with the inputs, which a layer includes.
errors: relative, against float64, over the first steps."""


class Implementation(Protocol):
    """One way to compute what a job asks for."""

    name: str

    def supports(self, case: Case) -> bool: ...

    def measure(self, jobs: Iterable[Job], effort: Effort) -> Iterator[tuple[Job, dict]]:
        """Return every job with its measurements, or with {"error": why there are none}."""


@dataclass(frozen=True)
class InProcess:
    """What can run in this process."""

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
                torch.cuda.synchronize()  # raises if the error took the GPU's context with it: nothing more can run


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


def implementations(names: Sequence[str], wheel: Path | None, haste_sources: Path | None) -> list[Implementation]:
    """Return ours and the peers of these names; those that are not installed come from a wheel and from sources."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"unknown peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    from_wheel = [name for name in names if name in peers.FLASHRNN]
    if from_wheel and wheel is None:
        raise ValueError(
            f"the peer {from_wheel[0]} needs its wheel: "
            "pip download flashrnn==1.0.8 --no-deps, then --flashrnn-wheel PATH"
        )
    if wheel is not None and not is_zipfile(wheel):
        raise ValueError(f"--flashrnn-wheel {wheel} is no wheel")
    if haste.NAME in names and haste_sources is None:
        raise ValueError(
            f"the peer {haste.NAME} needs its sources: unpack haste_pytorch-0.5.0rc0.tar.gz, which PyPI has, "
            "then --haste-sources FOLDER"
        )
    known = IN_PROCESS | {name: peers.PyPIFlashRNN(wheel, name) for name in from_wheel}
    if haste_sources is not None:
        package = haste.load(haste_sources)
        known[haste.NAME] = InProcess(haste.NAME, partial(haste.run, package=package), haste.supports)
    return [InProcess(ours.NAME, ours.run), *(known[name] for name in names)]


def measure(
    cases: Sequence[Case], implementations: Sequence[Implementation], results: KernelResults, effort: Effort
) -> None:
    """Add what is missing in the results."""
    for implementation in implementations:
        jobs = [Job(case, mode) for case in cases if implementation.supports(case) for mode in MODES]
        missing = [job for job in jobs if results.missing(job, implementation.name)]
        for job, measured in implementation.measure(missing, effort):
            row = results.add(job, implementation.name, measured)
            outcome = row["error"].splitlines()[0] if "error" in row else f"{milliseconds(row):.3f} ms"
            print(f"{job.case.name} {job.mode} {implementation.name}: {outcome}", flush=True)


def run(
    suite: str,
    patterns: list[str],
    peer_names: list[str],
    wheel: Path | None,
    haste_sources: Path | None,
    effort: Effort,
    folder: Path,
    commit: str,
) -> None:
    """Measure cases of a suite, and print a table of all that the suite's file then holds."""
    cases, chosen = select(suite, patterns), implementations(peer_names, wheel, haste_sources)
    path = folder / gpu_folder() / f"kernels_{suite}.json"
    results = KernelResults(path, {"what": " ".join(WHAT.split()), "suite": suite}, head(commit))
    measure(cases, chosen, results, effort)
    print_table(results.rows)
    print(path)
