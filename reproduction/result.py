"""The parts of every reproduction: measured data, a table and a figure, and the paper's values."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import RESULTS, ROOT
from benchmarks.markdown import Table, markdown
from benchmarks.results import device_folder, head
from data.atomic_file import replacing
from reproduction import ENTRIES
from training.arguments import quoted
from training.provenance import short


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    quick: bool = False  # scale down to a few CPU cores, or to minutes on a GPU
    jobs: int = 1  # number of simultaneous training runs
    runs: Path | None = None  # folder of finished runs to collect instead of training
    add_to: Path | None = None  # file with data of earlier runs to which these are added
    overrides: tuple[str, ...] = ()  # overrides of every training run
    out: Path = RESULTS


@dataclass(frozen=True)
class Reproduction:
    """One result of the paper.

    `measure(options)` writes JSON files and returns their paths; after an interruption it measures what is missing.
    `table` and `draw` use only the contents of such files.
    """

    source: str  # beginning of the name of its first data file
    what: str  # description of the table and the figure
    measure: Callable[[Options], list[Path]]
    table: Callable[[list[dict]], Table]
    draw: Callable[[list[dict], Path], object]  # to a .png
    notes: Callable[[list[dict]], list[str]] = lambda contents: []  # paragraphs below the figure


@cache
def paper(name: str) -> Any:
    """Return the published values of a result; None for unknown values."""
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())[name]


def quick_note(contents: list[dict]) -> list[str]:
    """Return a paragraph that marks the data as those of a quick run, if they are."""
    return ["This is the quick run (`quick=true`): it shows that all of it works."] if contents[0].get("quick") else []


def known(value: float | None, form: str = ".2f") -> str:
    return "not known" if value is None else format(value, form)


def save(name: str, options: Options, content: dict, place: str | None = None) -> Path:
    """Write <place>/<name>.json with everything needed to repeat it. A quick result does not replace a full one.

    `place` is a folder; None means that of this device. Training runs have their own commits and devices, independent
    of the machine that collects them.
    """
    path = options.out / (place or device_folder()) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.quick and path.exists() and not json.loads(path.read_text()).get("quick", True):
        raise ValueError(f"{path} contains a full result; write the quick one to another folder with out=FOLDER")
    if missing := _called(json.loads(path.read_text())) - _called(content) if path.exists() else ():
        raise ValueError(
            f"{path} contains {len(missing)} runs that are not among these, such as "
            f"`{' '.join(sorted(next(iter(missing))))}`: add these to the file with add_to={path}, or write another "
            "file with out=FOLDER"
        )
    command = shlex.join(["python", "-m", "scripts.reproduce", *sys.argv[1:]])
    described = ({} if "runs" in content else head()) | {"command": command, "quick": options.quick}
    with replacing(path) as file:
        file.write(f"{json.dumps(described | content, indent=1)}\n".encode())
    return path


def _called(content: dict) -> set[frozenset[str]]:
    """Return the overrides of each training run with a result."""
    return {frozenset(run["overrides"]) for run in content.get("runs", ()) if "environment" in run}


def benchmark(options: Options, name: str, *arguments: str) -> None:
    """Run a measurement of scripts.benchmark, which needs a GPU, in a process of its own."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"scripts.benchmark {name} needs an NVIDIA GPU, and PyTorch finds none; "
            "files=[FILE] makes the table and the figure from earlier results, such as those in docs/results"
        )
    command = [sys.executable, "-m", "scripts.benchmark", name, f"out={quoted(options.out.resolve())}", *arguments]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise ValueError(f"scripts.benchmark {name} failed with the error above; the results until then are stored")


def kernels(options: Options, *suites: str) -> list[Path]:
    """Measure the speed of the kernels in these suites; return the file of scripts.benchmark for each."""
    for suite in suites:
        benchmark(options, "kernels", f"suite={suite}", f"quick={str(options.quick).lower()}")
    return [options.out / device_folder() / f"kernels_{suite}.json" for suite in suites]


OF_OPTIONS = (
    "The commands are those of their commits. Today, `--add-to VALUE` is written `add_to=VALUE`, `--quick` is "
    "`quick=true`, and several values are `[A,B]`."
)
"""A paragraph for pages with results of earlier commits, whose commands had options."""


def origin(content: dict) -> str:
    """Return command, commit and machine of the runs that measured the data."""
    if "suite" not in content:
        return _origin(content)
    kept = sorted({row["run"] for row in content["rows"]})  # all rows of other runs have been replaced
    return "\n\n".join(_origin(content["runs"][run]) for run in kept)


def _origin(run: dict) -> str:
    if "commit" not in run:  # training runs; notes contain their commits
        return f"    {run['command']}"
    machine, versions = run["machine"], run["versions"]
    where = machine["gpu"] or f"{machine['cores']} cores of {machine['processor']}"
    return f"    {run['command']}\n\nCommit {short(run['commit'])}, {where}, torch {versions['torch']}."


def _gpus_of_kernels(contents: list[dict]) -> set[str]:
    swept = [content for content in contents if "suite" in content]
    return {content["runs"][row["run"]]["machine"]["gpu"] for content in swept for row in content["rows"]}


def write(name: str, reproduction: Reproduction, files: Sequence[Path], out: Path) -> list[Path]:
    """Write the page <device>/<name>.md of the data in `files` and its figure; return their paths."""
    first = files[0].stem
    if not first.startswith(reproduction.source):
        raise ValueError(f"{files[0]} does not contain data of {name}, which are in {reproduction.source}*.json")
    contents = [json.loads(file.read_text()) for file in files]
    if len(gpus := _gpus_of_kernels(contents)) > 1:
        raise ValueError(f"the files contain kernel times of {' and '.join(sorted(gpus))}: give files of one GPU")
    stem = name + first.removeprefix(reproduction.source)
    out = out / files[0].resolve().parent.name
    out.mkdir(parents=True, exist_ok=True)
    page, figure = out / f"{stem}.md", out / f"{stem}.png"
    title, table = ENTRIES[name].title, markdown(reproduction.table(contents))
    reproduction.draw(contents, figure)
    sources = ", ".join(f"[{file.name}]({os.path.relpath(file, out)})" for file in files)
    origins = list(dict.fromkeys(map(origin, contents)))
    paragraphs = [
        f"# {title}",
        reproduction.what,
        f"![{title}]({figure.name})",
        table,
        *reproduction.notes(contents),
        *origins,
        *([OF_OPTIONS] if any(" --" in text for text in origins) else []),
        f"Data: {sources}. `python -m scripts.reproduce {name} files=[FILE]` regenerates the page and the figure.",
    ]
    page.write_text("\n\n".join(paragraphs) + "\n")
    return [page, figure]
