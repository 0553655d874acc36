"""The largest head whose recurrent matrix stays on the chip, by the solver that chooses the kernels' tilings."""

from pathlib import Path

import torch
from tqdm import tqdm

from flashrnn import registered_cells
from flashrnn.gpu import NAMED
from flashrnn.limits import limit
from reproduction.result import Options, Reproduction, Table, known, paper, save


def _measure(options: Options) -> list[Path]:
    asked = [(gpu, cell) for gpu in NAMED.values() for cell in registered_cells()]
    rows = [
        {"gpu": gpu.name, "cell": cell, "head_dim": limit(cell, torch.bfloat16, gpu).training}
        for gpu, cell in tqdm(asked, unit="limit")
    ]
    return [save("head_size_limits", options, {"rows": rows}, place="cpu")]


def _table(contents: list[dict]) -> Table:
    table = [["GPU", "cell", "largest head", "paper"]]
    for row in contents[0]["rows"]:
        published = paper("head_size_limits").get(row["gpu"], {}).get(row["cell"])
        table.append([row["gpu"], row["cell"], str(row["head_dim"]), known(published, "d")])
    return table


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    rows = contents[0]["rows"]
    gpus, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("gpu", "cell"))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [row["head_dim"] for row in rows if row["cell"] == name]
        bars = axes.bar(
            [k + width * (index - (len(names) - 1) / 2) for k in range(len(gpus))], heights, width, label=name
        )
        axes.bar_label(bars, fontsize=7)
    for gpu, limits in paper("head_size_limits").items():
        for name, size in limits.items():
            place = gpus.index(gpu) + 0.2 * (names.index(name) - (len(names) - 1) / 2)
            axes.plot(place, size, "k_", markersize=16, label=f"paper, {gpu}, {name}")
    axes.set_xticks(range(len(gpus)), labels=gpus)
    axes.set(ylabel="largest head", title="16 bit, weights on the chip for all steps, forward and backward")
    axes.legend(loc="upper left")
    figure.savefig(file, dpi=150)


HEAD_SIZE_LIMITS = Reproduction(
    source="head_size_limits",
    what="The largest head, forward and backward, whose recurrent matrix stays in registers and shared memory over all "
    "time steps (`cuda_fused`), by the integer constraint solver; no GPU is asked.",
    measure=_measure,
    table=_table,
    draw=_draw,
)
