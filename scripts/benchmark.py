"""Measurements whose numbers stand in docs/results: `python -m scripts.benchmark NAME` writes its JSON there."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from scripts.benchmarks import (
    cpu_fused,
    data,
    figures,
    first_call,
    generation,
    kernels,
    language_model,
    numerical_error,
    reference_cpu,
    step,
)  # fmt: skip
from scripts.benchmarks.cases import SUITES, select
from scripts.benchmarks.peers import FLASHRNN
from scripts.benchmarks.results import RESULTS, device_slug, gpu_slug, provenance
from scripts.benchmarks.table import print_table
from scripts.benchmarks.timing import FULL, QUICK

ON_CPU = {"reference_cpu": reference_cpu, "cpu_fused": cpu_fused, "data_cpu": data}  # by the names of their files


def _on_cpu(file: str, options: argparse.Namespace) -> None:
    _write(options.out / f"{file}.json", ON_CPU[file].rows.__doc__, options.commit, ON_CPU[file].rows())


def _kernels(options: argparse.Namespace) -> None:
    wheel, peers, effort = options.flashrnn_wheel, options.peers, QUICK if options.quick else FULL
    if peers is None:
        peers = [name for name in kernels.PEERS if (name in FLASHRNN) <= bool(wheel)]
    kernels.run(options.suite, options.case, peers, wheel, effort, options.out, options.commit)


def _first_call(options: argparse.Namespace) -> None:
    rows = first_call.rows(select("main", options.case), options.rounds)
    _write(options.out / f"first_call_{gpu_slug()}.json", first_call.rows.__doc__, options.commit, rows)


def _numerical_error(options: argparse.Namespace) -> None:
    path = options.out / f"numerical_error_{gpu_slug()}.json"
    _write(path, numerical_error.rows.__doc__, options.commit, numerical_error.rows())
    print(numerical_error.draw(json.loads(path.read_text()), path.with_suffix(".png")))


def _generation(options: argparse.Namespace) -> None:
    path = options.out / f"generation_{device_slug()}.json"
    _write(path, generation.rows.__doc__, options.commit, generation.rows(options.contexts))
    print(generation.draw(json.loads(path.read_text()), path.with_suffix(".png")))


def _language_model(options: argparse.Namespace) -> None:
    rows = list(language_model.rows(options.models, options.batch_sizes))
    devices, rank = rows[0]["devices"], int(os.environ.get("RANK", 0))
    name = f"language_model_{gpu_slug()}{f'_x{devices}' if devices > 1 else ''}.json"
    if rank == 0:
        _write(options.out / name, language_model.rows.__doc__, options.commit, rows)


def _step(options: argparse.Namespace) -> None:
    _write(options.out / f"step_{gpu_slug()}.json", step.rows.__doc__, options.commit, step.rows())


def _figures(options: argparse.Namespace) -> None:
    for file in options.files:
        content = figures.read(file)
        print_table(content["rows"])
        print(figures.draw(content, file.with_suffix(".png")))


def _write(path: Path, what: str, commit: str | None, rows: Iterable[dict]) -> None:
    found = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"what": " ".join(what.split())} | provenance(commit) | {"rows": found}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: docs/results)")
    output.add_argument("--commit", help="what is measured (default: this checkout's, from git)")

    for file, module in ON_CPU.items():
        command = names.add_parser(module.__name__.rpartition(".")[2], parents=[output], help=module.__doc__)
        command.set_defaults(run=partial(_on_cpu, file))

    command = names.add_parser("kernels", parents=[output], help=kernels.__doc__, description=f"""{kernels.__doc__}
        Rows go into the file as they are measured. A run measures what the file lacks, and anew what is ours and comes
        from another commit; delete the file, or rows of it, to measure more again.""")  # fmt: skip
    command.add_argument("--suite", choices=SUITES, default="main", help="(default: main)")
    command.add_argument("--case", nargs="*", default=[], metavar="PATTERN", help="shell patterns of the cases' names, "
                         "as in lstm-12x64-B16-T1024-bfloat16 (default: all of the suite)")  # fmt: skip
    command.add_argument("--peers", nargs="*", choices=kernels.PEERS, help="(default: all that can be measured)")
    command.add_argument("--flashrnn-wheel", type=Path, metavar="PATH", help="pip download flashrnn==1.0.8 --no-deps")
    command.add_argument("--quick", action="store_true", help="fewer repetitions")
    command.set_defaults(run=_kernels)

    command = names.add_parser("first_call", parents=[output], help=first_call.__doc__)
    command.add_argument("--case", nargs="*", default=["lstm-12x64-B16-*"], metavar="PATTERN",
                         help="of suite main (default: lstm-12x64-B16-*)")  # fmt: skip
    command.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    command.set_defaults(run=_first_call)

    command = names.add_parser("numerical_error", parents=[output], help=numerical_error.__doc__)
    command.set_defaults(run=_numerical_error)

    command = names.add_parser("generation", parents=[output], help=generation.__doc__)
    command.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS", help="(default: four lengths)")
    command.set_defaults(run=_generation)

    command = names.add_parser("language_model", parents=[output], help=language_model.__doc__)
    command.add_argument("--models", nargs="+", default=language_model.MODELS, metavar="OVERRIDES",
                         help="of experiment=slimpajama_160m, in quotes (default: the paper's)")  # fmt: skip
    command.add_argument("--batch-sizes", nargs="+", type=int, default=[32, 64], help="(default: 32 64)")
    command.set_defaults(run=_language_model)

    command = names.add_parser("step", parents=[output], help=step.__doc__)
    command.set_defaults(run=_step)

    command = names.add_parser("figures", help="draw FILE.png beside each FILE.json of kernels, and print its table")
    command.add_argument("files", nargs="+", type=Path, metavar="FILE")
    command.set_defaults(run=_figures)
    return parser


def main() -> None:
    options = _parser().parse_args()
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
