"""Error of h against the float64 reference over 8192 time steps, by cell, dtype and backend."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch

from flashrnn import flashrnn, get_cell, registered_cells

STEPS, SPAN = 8192, 128
_ENDS = 8  # number of spans at the beginning and at the end that are compared


def rows() -> Iterator[dict]:
    """Relative error ‖h - ref‖ / ‖ref‖ of h over batch and units, as means over 128 steps each, for 8192 steps, one
    head of 64 units, 4 sequences, and random inputs rounded to the dtype."""
    for name in registered_cells():
        if name == "elman_relu":
            continue  # its state grows without bound on random matrices
        for dtype in ("bfloat16", "float16"):
            yield from _rows(name, dtype)


def _rows(name: str, dtype: str) -> Iterator[dict]:
    cell, generator = get_cell(name), torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda().to(getattr(torch, dtype))

    Wx, R = randn(4, STEPS, len(cell.input_gates), 1, 64), randn(len(cell.recurrent_gates), 1, 64, 64) / 8
    b = randn(len(cell.gates), 1, 64)
    reference, _ = flashrnn(Wx.double(), R.double(), b.double(), function=cell, backend="vanilla")
    for backend in ("cuda_fused", "vanilla"):
        h, _ = flashrnn(Wx, R, b.float(), function=cell, backend=backend)
        error = (h.double() - reference).square().sum((0, 2, 3)) / reference.square().sum((0, 2, 3))
        by_span = error.sqrt().unflatten(0, (-1, SPAN)).mean(1).tolist()
        yield {"cell": name, "dtype": dtype, "backend": backend, "error": by_span}


def write(path: Path) -> list[Path]:
    """Draw the figure of a file of results next to it; return its path."""
    figure = path.with_suffix(".png")
    draw(json.loads(path.read_text()), figure)
    return [figure]


def draw(content: dict, file: Path) -> None:
    """Draw the error over time, with a panel per dtype."""
    from matplotlib.figure import Figure

    from benchmarks.figures import name_curves

    rows = content["rows"]
    dtypes, cells = (list(dict.fromkeys(row[key] for row in rows)) for key in ("dtype", "cell"))
    figure = Figure(figsize=(6 * len(dtypes), 4), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        ends = {}
        for row in (row for row in rows if row["dtype"] == dtype):
            steps = [SPAN * (k + 0.5) for k in range(len(row["error"]))]
            ours, color = row["backend"] == "cuda_fused", f"C{cells.index(row['cell'])}"
            axes.plot(steps, row["error"], "-" if ours else ":", color=color)
            if ours:
                ends[row["cell"]] = row["error"][-1], color
        axes.set(title=dtype, xlabel="time step", ylabel="relative error of h", xlim=(0, None), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        name_curves(axes, ends)
    figure.suptitle(f"{_finding(rows)} ({content['machine']['gpu']}; dotted: PyTorch loop)")
    figure.savefig(file, dpi=150)


def _finding(rows: Sequence[dict]) -> str:
    """Return the title: how the error of h grows over time."""
    steps = SPAN * len(rows[0]["error"])
    growth = max(mean(row["error"][-_ENDS:]) / mean(row["error"][:_ENDS]) for row in rows)
    if growth < 1.1:
        return f"Over {steps:,} steps the error does not grow"
    return f"Over {steps:,} steps the error grows to {growth:.1f} times that of the first"
