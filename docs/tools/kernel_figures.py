"""Draw the figures of docs/kernels.md: where the solver's tilings store R, and the timeline of a step.

python -m docs.tools.kernel_figures
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).parents[1] / "figures"
HEADS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
HIDDEN, BATCH = 768, 16
_FRAGMENT = 512  # bytes of a 16 x 16 tile of R in bfloat16 or float16


class Part(NamedTuple):
    """A part of a step: its label, start and length in tenths of a step (not to scale), and colour."""

    text: str
    start: float
    length: float
    color: str


_MULTIPLY, _ADD, _CELL = "lightskyblue", "paleturquoise", "palegreen"
_SEND, _COPY, _WAIT = "sandybrown", "lightgray", "whitesmoke"
STEPS = {
    "One block": {
        "warps": (
            Part("R h", 0, 4, _MULTIPLY),
            Part("sums", 4, 1, _ADD),
            Part("cells", 5, 2, _CELL),
            Part("store h in the other buffer", 7, 2, _SEND),
            Part("barrier", 9, 1, _WAIT),
        ),
        "overlapped": (
            Part("store results of the previous step", 1, 3, _COPY),
            Part("load inputs of later steps", 4, 6, _COPY),
        ),
    },
    "Cluster": {
        "warps": (
            Part("R h, own part", 0, 1, _MULTIPLY),
            Part("R h, other parts as they arrive", 1, 3, _MULTIPLY),
            Part("sums", 4, 1, _ADD),
            Part("cells", 5, 1.5, _CELL),
            Part("send h to all blocks", 6.5, 1.5, _SEND),
            Part("wait for the first part", 8, 2, _WAIT),
        ),
        "overlapped": (Part("other parts arrive", 0, 3, _SEND), Part("load inputs of later steps", 4, 6, _COPY)),
    },
    "Grid": {
        "warps": (
            Part("R h", 0, 2, _MULTIPLY),
            Part("sums", 2, 0.7, _ADD),
            Part("cells", 2.7, 1, _CELL),
            Part("h to L2", 3.7, 1, _SEND),
            Part("poll L2 until h of all blocks has arrived", 4.7, 5.3, _WAIT),
        ),
        "overlapped": (Part("clear workspace of next h", 0, 2, _SEND), Part("load inputs of later steps", 3, 7, _COPY)),
    },
}


def draw_storage(file: Path) -> None:
    """Plot, over head size, the KiB of R that a block keeps in registers and in shared memory, and the layout."""
    from matplotlib.figure import Figure

    from flashrnn.gpu import named_gpu
    from flashrnn.plan import plans

    gpu = named_gpu("H100")
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle("A block stores its part of R in registers, and what does not fit there in shared memory")
    for axes, direction in zip(figure.subplots(2, 1, sharex=True), ("forward", "backward"), strict=True):
        chosen = [next(plans(direction, "lstm", max(1, HIDDEN // D), D, BATCH, torch.bfloat16, gpu)) for D in HEADS]
        in_registers = [_FRAGMENT * plan.register_fragments * plan.warps / 1024 for plan in chosen]
        all_of_it = [_FRAGMENT * plan.fragments * plan.warps / 1024 for plan in chosen]
        axes.bar(range(len(HEADS)), all_of_it, color="C1", label="in shared memory")
        axes.bar(range(len(HEADS)), in_registers, color="C0", label="in registers")
        for i, (plan, height) in enumerate(zip(chosen, all_of_it, strict=True)):
            group = f"{'grid' if plan.grid else 'cluster'} of {plan.blocks}"
            blocks = "one block" if plan.blocks == 1 else group
            warps = f"{plan.warps} warp{'s' * (plan.warps > 1)}"
            axes.text(i, height + 6, f"{blocks},\n{warps}", ha="center", fontsize=8)
        axes.set(ylabel="KiB of R per block", title=f"LSTM, {direction}", ylim=(0, 350))
        axes.set_xticks(range(len(HEADS)), labels=[f"{max(1, HIDDEN // D)} × {D}" for D in HEADS])
    axes.legend(loc="upper left")
    axes.set_xlabel(f"heads × size; {BATCH} sequences, bfloat16, {gpu.name}")
    figure.savefig(file, dpi=150)


def draw_steps(file: Path) -> None:
    """Draw a timeline of what the warps of a block do in a forward step, and what overlaps with it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.7), layout="constrained")
    figure.suptitle("Loads and stores are overlapped with a step; product, sums, cells and exchange of h are not")
    for axes, (title, lanes) in zip(figure.subplots(len(STEPS), 1), STEPS.items(), strict=True):
        for row, parts in enumerate(reversed(lanes.values())):
            for part in parts:
                axes.barh(row, part.length, left=part.start, color=part.color, edgecolor="white", height=0.9)
                axes.text(part.start + part.length / 2, row, part.text, ha="center", va="center", fontsize=8)
        axes.set_yticks(range(len(lanes)), labels=list(reversed(lanes)))
        axes.set_xticks([])
        axes.set_xlim(0, 10)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[:].set_visible(False)
    axes.set_xlabel("one step of the time loop, not to scale")
    figure.savefig(file, dpi=150)


def main() -> None:
    ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, draw in {"kernel_storage": draw_storage, "kernel_steps": draw_steps}.items():
        draw(FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
