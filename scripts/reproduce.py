"""Results of the paper, regenerated: data, a table beside the paper's values, and a figure.

    python -m scripts.reproduce NAME [--quick] [KEY=VALUE ...]
    python -m scripts.reproduce --list

NAME.json, .md and .png go to docs/results, into the folder of the device. Training runs are kept in outputs/reproduce:
the same command again repeats what is missing alone. KEY=VALUE goes to every training run, as in scripts.train.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from reproduction import ENTRIES
from training.command_line import one_line_errors

if TYPE_CHECKING:
    from reproduction.result import Reproduction


def load(name: str) -> "Reproduction":
    return getattr(import_module(f"reproduction.{ENTRIES[name].module}"), name.upper())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=ENTRIES, metavar="NAME", help="what to reproduce, see --list")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every training run")
    parser.add_argument("--list", action="store_true", help="names and what they are")
    parser.add_argument("--quick", action="store_true", help="scaled down: for a CPU, or for minutes on a GPU")
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs at a time, spread over the GPUs (default: 1)"
    )
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="collect the runs below it, instead of training")
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="data of earlier runs, which those of --runs join")
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="table and figure of these files alone")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the results (default: docs/results, with --quick outputs/reproduce/quick)",
    )
    return parser


def _check(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """End with an error where something is asked for that nothing would heed."""
    of_training = {
        "KEY=VALUE": asked.overrides,
        "--runs": asked.runs,
        "--add-to": asked.add_to,
        "--jobs": asked.jobs != 1,
    }
    given = ", ".join(name for name, value in of_training.items() if value)
    if asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs}: expected at least 1")
    if asked.runs and (asked.overrides or asked.jobs != 1):
        parser.error("--runs collects what is there, and heeds no KEY=VALUE and no --jobs")
    if asked.add_to and not asked.runs:
        parser.error("--add-to says what the runs of --runs join, and there is no --runs")
    for option, files in (("--data", asked.data or ()), ("--add-to", [asked.add_to] if asked.add_to else ())):
        if missing := [str(file) for file in files if not file.is_file()]:
            parser.error(f"{option} {missing[0]}: there is no such file")
    if asked.data and (given or asked.quick):
        parser.error(f"--data draws what its files hold, and heeds no {given or '--quick'}")
    if given and not ENTRIES[asked.name].trains:
        trained = ", ".join(name for name, entry in ENTRIES.items() if entry.trains)
        parser.error(f"{asked.name} trains nothing that {given} could be for; what does: {trained}")


def main() -> None:
    parser = _parser()
    asked = parser.parse_intermixed_args()
    if asked.list:
        for name, entry in ENTRIES.items():
            print(f"{name:<26}{entry.title}")
        return
    if asked.name is None:
        parser.error("which NAME? --list shows them")
    _check(parser, asked)
    from benchmarks.results import checkout
    from reproduction.result import Options, write
    from reproduction.runs import OUTPUTS

    reproduction, out = load(asked.name), asked.out or (OUTPUTS / "quick" if asked.quick else Options.out)
    with one_line_errors():
        if not asked.data:
            checkout()  # an error now, not after the measurements
        options = Options(asked.quick, asked.jobs, asked.runs, asked.add_to, tuple(asked.overrides), out)
        files = asked.data or reproduction.measure(options)
        for path in (*files, *write(asked.name, reproduction, files, out)):
            print(path)


if __name__ == "__main__":
    main()
