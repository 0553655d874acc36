"""The list of all results in docs/results for a GPU, with the commands that measure them, in order."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import ROOT
from benchmarks.ours import is_ours


class Entry(NamedTuple):
    file: str  # name without folder and suffix
    command: str  # a module in scripts, with its arguments


# The most informative minutes first; training runs last, because they take hours and can be resumed.
RECORD = (
    Entry("kernels_main", "benchmark kernels suite=main quick=true"),
    Entry("language_model", "benchmark language_model"),
    Entry("kernels_heads", "benchmark kernels suite=heads quick=true"),
    Entry("kernels_short", "benchmark kernels suite=short quick=true"),
    Entry("options", "benchmark options"),
    Entry("calls", "benchmark calls"),
    Entry("normalised", "benchmark normalised"),
    Entry("nn_lstm", "benchmark nn_lstm"),
    Entry("generation", "benchmark generation"),
    Entry("first_call", "benchmark first_call"),
    Entry("layers", "benchmark layers"),
    Entry("kernels_length", "benchmark kernels suite=length quick=true"),
    Entry("kernels_batch", "benchmark kernels suite=batch quick=true"),
    Entry("kernels_backends", "benchmark kernels suite=backends quick=true"),
    Entry("sweep", "benchmark sweep"),
    Entry("numerical_error", "benchmark numerical_error"),
    Entry("loss_curves", "reproduce loss_curves"),
    Entry("context", "reproduce context"),
    Entry("parity", "reproduce parity"),
    Entry("recall", "reproduce recall"),
    Entry("state_tracking", "reproduce state_tracking"),
)


def commits(content: dict) -> set[str]:
    """Return the commits of this project with which a file of results was measured; for kernels, those of its own rows.

    Peers of kernels may be of an earlier run: pages say so, and `benchmark kernels` does not repeat them.
    """
    if "suite" in content:
        return {content["runs"][row["run"]]["commit"] for row in content["rows"] if is_ours(row["implementation"])}
    if "runs" in content:
        return {run["environment"]["commit"] for run in content["runs"] if "environment" in run}
    return {content["commit"]}


def missing(folder: Path, commit: str) -> list[Entry]:
    """Return the entries that a device's folder lacks, or has from another commit."""

    def there(entry: Entry) -> bool:
        file = folder / f"{entry.file}.json"
        return file.exists() and commits(json.loads(file.read_text())) == {commit}

    return [entry for entry in RECORD if not there(entry)]


def measure(entries: list[Entry], seconds: float) -> Iterator[Entry]:
    """Run the commands one after the other until the time is up; yield those that succeeded."""
    end = time.monotonic() + seconds
    for entry in entries:
        if time.monotonic() >= end:
            return
        module, *arguments = entry.command.split()
        process = subprocess.Popen([sys.executable, "-m", f"scripts.{module}", *arguments], cwd=ROOT)
        try:
            code = process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # makes a training run save its step
            process.wait()
            return
        if code == 0:
            yield entry
