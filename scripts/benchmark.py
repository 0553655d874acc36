"""Run a benchmark and write its results to docs/results.

    python -m scripts.benchmark NAME [KEY=VALUE ...]
    python -m scripts.benchmark [NAME] --help

NAME is a module in benchmarks/; the file of the same name in configs/benchmark/ lists its keys.
"""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from benchmarks.cases import SUITES
from training.arguments import literal, named
from training.command_line import hydra_command
from training.configuration import titles, values

ON_CPU = ("reference_cpu", "cpu_fused", "data")  # run on the CPU, even if there is a GPU
ON_ANY = ("layers", "generation")  # run on the GPU if there is one, otherwise on the CPU
WRITERS = {
    "layers": "layers_page",
    "generation": "generation_page",
    "sweep": "sweep_page",
    "numerical_error": "numerical_error",
    **dict.fromkeys(SUITES, "figures"),
}
"""For each benchmark or suite of kernels with a page or figure: the module that writes them."""


def arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: a leading word is the benchmark, and a commit is a string, not a number."""
    return literal(named(words, "benchmark"), texts=["commit"], paths=["out", "flashrnn_wheel", "haste_sources"])


@hydra_command("benchmark", arguments)
def main(config: DictConfig) -> None:
    """Run the benchmark, or draw the figures of earlier results."""
    name = HydraConfig.get().runtime.choices.benchmark
    if name not in titles("benchmark"):
        raise ValueError(f"which benchmark? python -m scripts.benchmark NAME, one of {', '.join(titles('benchmark'))}")
    options = values(config, f"benchmark/{name}")
    if name == "figures":
        if not options["files"]:
            raise ValueError("which files? python -m scripts.benchmark figures files=[FILE,FILE]")
        for file in options["files"]:
            print(*write_page(Path(file)), sep="\n")
        return
    from benchmarks.results import checkout

    options |= {"out": Path(config.out), "commit": config.commit or checkout()}  # raises errors before measuring
    module = import_module(f"benchmarks.{name}")
    if hasattr(module, "run"):
        module.run(**options)
    else:
        measure(name, **options)


def measure(name: str, out: Path, commit: str, **options: Any) -> None:
    """Write the rows of a benchmark to <out>/<device>/<name>.json, and its page and figure next to it, if any.

    With several processes under torchrun, the first one writes to <name>_x<processes>.json.
    """
    from benchmarks.results import device_folder, gpu_folder, rows_before, write

    rows = import_module(f"benchmarks.{name}").rows
    processes, rank = (int(os.environ.get(key, default)) for key, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    device = "cpu" if name in ON_CPU else device_folder() if name in ON_ANY else gpu_folder()
    path = out / device / f"{name}{f'_x{processes}' if processes > 1 else ''}.json"
    if "known" in signature(rows).parameters:  # the benchmark can continue an interrupted run
        options["known"] = rows_before(path, commit)
    if rank > 0:
        list(rows(**options))
        return
    write(path, rows.__doc__, commit, rows(**options))
    if name in WRITERS:
        print(*write_page(path), sep="\n")


def write_page(path: Path) -> list[Path]:
    """Write the page and the figure of a file of results next to it; return their paths."""
    kind = json.loads(path.read_text()).get("suite", path.stem)
    if kind not in WRITERS:
        raise ValueError(f"{path} has neither a page nor a figure; the following have: {', '.join(WRITERS)}")
    return import_module(f"benchmarks.{WRITERS[kind]}").write(path)


if __name__ == "__main__":
    main()
