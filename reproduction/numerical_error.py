"""Error of the kernels over long sequences, from a file of scripts.benchmark."""

from pathlib import Path

from benchmarks import numerical_error
from benchmarks.results import device_folder
from reproduction.result import Options, Reproduction, Table, benchmark, paper


def _measure(options: Options) -> list[Path]:
    benchmark(options, "numerical_error")
    return [options.out / device_folder() / "numerical_error.json"]


def _table(contents: list[dict]) -> Table:
    table = [["cell", "dtype", "backend", "first steps", "largest", "last steps", "paper, bfloat16"]]
    for row in contents[0]["rows"]:
        error = row["error"]
        published = f"near {paper('numerical_error')}" if row["dtype"] == "bfloat16" else "not known"
        numbers = [f"{value:.5f}" for value in (error[0], max(error), error[-1])]
        table.append([row["cell"], row["dtype"], row["backend"], *numbers, published])
    return table


NUMERICAL_ERROR = Reproduction(
    source="numerical_error",
    what="Relative error of h against float64, averaged over 128 steps. In the paper, the error is bounded for any "
    "length.",
    measure=_measure,
    table=_table,
    draw=lambda contents, file: numerical_error.draw(contents[0], file),
)
