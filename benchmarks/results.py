"""Files of results, with everything that is needed to judge and to repeat them."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

import torch

from benchmarks.cases import Case, Job
from benchmarks.ours import is_ours
from data.atomic_file import replacing
from training import provenance


def checkout() -> str:
    """Return the commit of this checkout, with "-dirty" if it has changes. Call it before anything is measured."""
    found = provenance.commit()
    if found is None:
        raise ValueError(
            "there is no git history, so the measured commit is unknown: work in a clone, or give it by commit=SHA"
        )
    return found


def head(commit: str | None = None) -> dict:
    """Return command, commit (of this checkout, if None), versions and machine."""
    gpu = torch.cuda.is_available()
    libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} | _packages() if gpu else {}
    return {
        "command": shlex.join(["python", "-m", "scripts.benchmark", *sys.argv[1:]]),
        "commit": commit or checkout(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__} | libraries,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if gpu else None,
        },
    }


class Unfinished:
    """The results of an unfinished run in <name>.partial.json, which remains if the run is interrupted."""

    def __init__(self, path: Path) -> None:
        self.path, self._partial = path, path.with_suffix(".partial.json")

    def read(self) -> dict | None:
        """Return the results of an interrupted run; None if there was none."""
        return json.loads(self._partial.read_text()) if self._partial.exists() else None

    def save(self, described: dict, rows: Iterable[dict]) -> None:
        """Write the description and the rows so far, one per line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(described | {"rows": []}, indent=1).removesuffix("]\n}")
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        with replacing(self._partial) as file:
            file.write(f"{text}\n{lines}\n ]\n}}\n".encode())

    def finish(self) -> None:
        """Replace the results of earlier runs by these, if there are any."""
        if self._partial.exists():
            self._partial.replace(self.path)


def write(path: Path, what: str, commit: str, rows: Iterable[dict]) -> None:
    """Measure `rows`, printing each one, and write them to `path` with a description of what they are."""
    unfinished, found = Unfinished(path), []
    described = {"what": " ".join(what.split())} | head(commit)
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
        unfinished.save(described, found)
    unfinished.finish()
    print(path)


def rows_before(path: Path, commit: str | None) -> list[dict]:
    """Return the rows of an interrupted `write` of the same commit on the same machine."""
    content, now = Unfinished(path).read(), head(commit)
    same = content and all(content[key] == now[key] for key in ("commit", "versions", "machine"))
    return content["rows"] if same else []


def _packages() -> dict[str, str]:
    """Return the versions of the installed packages that compile kernels."""
    found = {name: list(distributions(name=name)) for name in ("triton", "cuda-core", "nvidia-cuda-nvrtc")}
    return {name: installed[0].version for name, installed in found.items() if installed}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return models[0] if models else platform.processor()


def gpu_folder(gpu: str | None = None) -> str:
    """Return the name of the folder for results of a GPU (None: this machine's): h100 for NVIDIA H100 80GB HBM3."""
    if gpu is None:
        if not torch.cuda.is_available():
            raise ValueError("this measurement needs an NVIDIA GPU, and PyTorch finds none")
        gpu = torch.cuda.get_device_name()
    model = re.search(r"RTX \w+|[A-Z]+\d+[A-Z]*", gpu)
    return re.sub(r"[^a-z0-9]+", "_", (model[0] if model else gpu).lower())


def device_folder() -> str:
    """Return the name of the folder for results of this machine: that of its GPU, or cpu."""
    return gpu_folder() if torch.cuda.is_available() else "cpu"


def milliseconds(row: dict) -> float:
    """Return the median time of the recurrence, without that of the input product if the row includes it."""
    return row["ms"]["p50"] - row.get("input_ms", {"p50": 0.0})["p50"]


class KernelResults:
    """The rows of `kernels`, to which runs add theirs.

    A row names the run that measured it. Rows of ours that come from another commit are measured again.
    """

    def __init__(self, path: Path, described: dict, run: dict) -> None:
        self.path, self._unfinished = path, Unfinished(path)
        before = self._unfinished.read() or (json.loads(path.read_text()) if path.exists() else {})
        self._described = described | {"runs": [*before.get("runs", []), run]}
        self._rows = {split(row): row for row in before.get("rows", [])}

    @property
    def rows(self) -> list[dict]:
        return list(self._rows.values())

    def missing(self, job: Job, implementation: str) -> bool:
        row = self._rows.get((job, implementation))
        if row is None:
            return True
        runs = self._described["runs"]
        return is_ours(implementation) and runs[row["run"]]["commit"] != runs[-1]["commit"]

    def add(self, job: Job, implementation: str, measured: dict) -> dict:
        """Add a row, and write it to the disk."""
        run = {"run": len(self._described["runs"]) - 1}
        row = vars(job.case) | {"mode": job.mode, "implementation": implementation} | measured | run
        self._rows[job, implementation] = row
        self._unfinished.save(self._described, self.rows)
        return row

    def finish(self) -> None:
        """Replace the rows of the file by these."""
        self._unfinished.finish()


def split(row: dict) -> tuple[Job, str]:
    """Return the job and the implementation of a row."""
    return Job(case_of(row), row["mode"]), row["implementation"]


def case_of(row: dict) -> Case:
    return Case(*(row[field] for field in Case.__dataclass_fields__))


def by_job(rows: list[dict]) -> dict[Job, dict[str, dict]]:
    """Return the rows by job and implementation."""
    jobs: dict[Job, dict[str, dict]] = {}
    for row in rows:
        job, implementation = split(row)
        jobs.setdefault(job, {})[implementation] = row
    return jobs
