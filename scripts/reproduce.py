"""Results of the paper, regenerated: data, a table beside the paper's values, and a figure.

    python -m scripts.reproduce NAME [--quick] [KEY=VALUE ...]
    python -m scripts.reproduce --list

NAME.json, .md and .png go to docs/results, with the device in their name. Training runs are kept in outputs/reproduce:
the same command again repeats what is missing alone. KEY=VALUE goes to every training run, as in scripts.train.
"""

import argparse
from pathlib import Path

from scripts.config import one_line_errors
from scripts.reproduction.accuracy import PARITY, STATE_TRACKING
from scripts.reproduction.complexity import COMPLEXITY
from scripts.reproduction.kernels import KERNEL_SPEED, NUMERICAL_ERROR
from scripts.reproduction.language_model import LANGUAGE_MODEL
from scripts.reproduction.limits import HEAD_SIZE_LIMITS
from scripts.reproduction.loss_curves import LOSS_CURVES
from scripts.reproduction.result import Options, Reproduction, write
from scripts.reproduction.roofline import ROOFLINE
from scripts.reproduction.throughput import EXTRAPOLATION_THROUGHPUT

REPRODUCTIONS: dict[str, Reproduction] = {
    "kernel_speed": KERNEL_SPEED,
    "language_model": LANGUAGE_MODEL,
    "loss_curves": LOSS_CURVES,
    "parity": PARITY,
    "head_size_limits": HEAD_SIZE_LIMITS,
    "numerical_error": NUMERICAL_ERROR,
    "roofline": ROOFLINE,
    "complexity": COMPLEXITY,
    "state_tracking": STATE_TRACKING,
    "extrapolation_throughput": EXTRAPOLATION_THROUGHPUT,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=REPRODUCTIONS, metavar="NAME", help="what to reproduce, see --list")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every training run")
    parser.add_argument("--list", action="store_true", help="names and what they are")
    parser.add_argument("--quick", action="store_true", help="scaled down: for a CPU, or for minutes on a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="training runs at a time (default: 1)")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="collect the runs below it, instead of training")
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="table and figure of these files alone")
    parser.add_argument("--out", type=Path, default=Options.out, help="folder of the results (default: docs/results)")
    return parser


def main() -> None:
    parser = _parser()
    asked = parser.parse_intermixed_args()
    if asked.list:
        for name, reproduction in REPRODUCTIONS.items():
            print(f"{name:<26}{reproduction.title}")
        return
    if asked.name is None:
        parser.error("which NAME? --list shows them")
    reproduction = REPRODUCTIONS[asked.name]
    options = Options(asked.quick, asked.jobs, asked.runs, tuple(asked.overrides), asked.out)
    with one_line_errors():
        files = asked.data or reproduction.measure(options)
        for path in (*files, *write(asked.name, reproduction, files, asked.out)):
            print(path)


if __name__ == "__main__":
    main()
