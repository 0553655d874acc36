"""Measure what docs/results lacks for this machine's GPU, or has from another commit.

    python -m scripts.results [--minutes MINUTES] [--list]

What is broken off is kept and goes on with the next call, where the command can do that: times of kernels by row,
training runs by step. At the end it says what is missing.
"""

import argparse

from training.command_line import one_line_errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many (default: never)")
    parser.add_argument("--list", action="store_true", help="say what is missing, and measure nothing")
    return parser


def main() -> None:
    asked = _parser().parse_args()
    from benchmarks import RESULTS
    from benchmarks.results import checkout, gpu_folder
    from reproduction.record import RECORD, measure, missing

    with one_line_errors():
        folder, commit = RESULTS / gpu_folder(), checkout()
        if not asked.list:
            for entry in measure(missing(folder, commit), 60 * asked.minutes):
                print(f"measured: {entry.file}", flush=True)
        left = missing(folder, commit)
    print(f"{len(RECORD) - len(left)} of {len(RECORD)} results in {folder} are of commit {commit[:12]}")
    for entry in left:
        print(f"missing: {entry.file:<18} python -m scripts.{entry.command}")


if __name__ == "__main__":
    main()
