"""What an evaluation found: as JSON, as a plot, and on the screen."""

import json
import os
import platform
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from data.atomic_file import replacing
from training.configuration import mixer_name
from training.provenance import commit


def environment(device: torch.device) -> dict:
    """Return where a number comes from: versions, the device that it was computed on, commit of this checkout."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": gpu or f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }


def save(folder: Path, result: dict, config: DictConfig, device: torch.device, **facts: float) -> dict[str, Path]:
    """Write eval.json and, for accuracies, accuracy.png; return where they are."""
    content = {"name": config.name, **facts, **result, "environment": environment(device)}
    content["config"] = OmegaConf.to_container(config, resolve=True)
    places = {"results": folder / "eval.json"}
    with replacing(places["results"]) as file:
        file.write(f"{json.dumps(content, indent=2)}\n".encode())
    if "ranges" in result:
        places["plot"] = folder / "accuracy.png"
        plot(result, mixer_name(config.model), places["plot"])
    return places


def plot(result: dict, model: str, file: Path) -> None:
    """Draw accuracy over length, beside chance and the lengths seen in training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lengths = [int(length) for length in result["accuracy_by_length"]]
    axes.axvspan(*result["training_lengths"], color="tab:green", alpha=0.15, label="training lengths")
    axes.axhline(result["chance"], color="gray", linestyle="--", label="chance")
    axes.plot(lengths, result["accuracy_by_length"].values(), ".", alpha=0.4, label="each length")
    for index, part in enumerate(result["ranges"]):
        axes.plot(
            part["lengths"], [part["accuracy"]] * 2, color="tab:blue", label=None if index else "mean of the range"
        )
    axes.set(
        xlabel="sequence length",
        ylabel="accuracy at the last position",
        ylim=(0, 1.03),
        title=f"{result['task']}, {model}",
    )
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=150)


def show(result: dict, places: dict[str, Path]) -> None:
    """Print the result as a table, and where everything is."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    if "ranges" in result:
        console.print("\nAccuracy of the label at the last position of a sequence:")
        for name in ("lengths", "accuracy", "chance", "sequences"):
            table.add_column(name, justify="right")
        for part in (result["in_distribution"], *result["ranges"]):
            low, high = part["lengths"]
            lengths = f"{low}-{high}" if part in result["ranges"] else f"{low}-{high}, as in training"
            table.add_row(lengths, f"{part['accuracy']:.4f}", f"{result['chance']:.4f}", str(part["sequences"]))
    else:
        console.print("\nValidation:")
        table.add_column("model")
        table.add_column("perplexity", justify="right")
        table.add_column("bits per byte", justify="right")
        table.add_row("this model", f"{result['perplexity']:.2f}", f"{result['bits_per_byte']:.3f}")
        if result["unigram_perplexity"] is not None:
            table.add_row("unigram", f"{result['unigram_perplexity']:.2f}")
    console.print(table)
    for name, place in places.items():
        console.print(f"{name + ':':<12}{place}", soft_wrap=True)
