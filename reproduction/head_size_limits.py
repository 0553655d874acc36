"""The largest head whose recurrent matrix fits on the chip, from the solver that chooses the tilings of the kernels."""

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
    """Draw a field for each GPU and cell, with the size in the paper if there is one."""
    from matplotlib.figure import Figure

    sizes = {(row["gpu"], row["cell"]): row["head_dim"] for row in contents[0]["rows"]}
    gpus, cells = (list(dict.fromkeys(key[k] for key in sizes)) for k in range(2))
    figure = Figure(figsize=(1.25 * len(cells) + 2, 0.55 * len(gpus) + 1.4), layout="constrained")
    axes = figure.subplots()
    axes.imshow([[sizes[gpu, cell] for cell in cells] for gpu in gpus], cmap="Blues", vmin=0, aspect="auto")
    for (gpu, cell), size in sizes.items():
        published = paper("head_size_limits").get(gpu, {}).get(cell)
        text = str(size) + (f"\n(paper {published})" if published else "")
        color = "white" if size > 0.6 * max(sizes.values()) else "black"
        axes.text(cells.index(cell), gpus.index(gpu), text, ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(cells)), labels=cells)
    axes.set_yticks(range(len(gpus)), labels=gpus)
    axes.tick_params(length=0)
    least, most = min(sizes.values()), max(sizes.values())
    axes.set_title(f"Heads of up to {least} to {most} units stay on the chip (bfloat16, forward and backward)")
    figure.savefig(file, dpi=150)


HEAD_SIZE_LIMITS = Reproduction(
    source="head_size_limits",
    what="The largest head whose recurrent matrix stays in registers and shared memory over all time steps, forward "
    "and backward (`cuda_fused`, bfloat16). The integer constraint solver computes it without a GPU.",
    measure=_measure,
    table=_table,
    draw=_draw,
)
