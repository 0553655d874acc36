"""The result of an evaluation, as a JSON file and on the screen."""

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from data.atomic_file import replacing
from training import plots
from training.configuration import mixer_name
from training.provenance import commit


def environment(device: torch.device) -> dict:
    """Return the commit of this checkout, the versions of packages, and the device, to be stored with results."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": gpu or f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }


def save(folder: Path, result: dict, config: DictConfig, device: torch.device, **facts: float) -> dict[str, Path]:
    """Write eval.json and, for accuracies and for losses by position, a plot; return the paths of the files by name."""
    places = {"results": write(folder, result, config, device, **facts)}
    if "ranges" in result:
        places["plot"] = folder / "accuracy.png"
        plots.accuracy_by_length(result, mixer_name(config.model), places["plot"])
    if found := result.get("by_position"):
        places["plot"] = folder / "perplexity_by_position.png"
        length = len(found["losses"]) * found["window"]
        title = f"{mixer_name(config.model)}, {found['documents']} documents of {length} tokens"
        plots.perplexity_by_position(by_position(found), config.data.context_length, title, places["plot"])
    return places


def write(folder: Path, result: dict, config: DictConfig, device: torch.device, **facts: float) -> Path:
    """Write eval.json, and return its path."""
    content = {"name": config.name, **facts, **result, "environment": environment(device)}
    content["config"] = OmegaConf.to_container(config, resolve=True)
    path = folder / "eval.json"
    with replacing(path) as file:
        file.write(f"{json.dumps(content, indent=2)}\n".encode())
    return path


def by_position(found: dict) -> list[tuple[int, int, float]]:
    """Return first position, last position (from 0) and perplexity of ranges whose length doubles.

    Args:
        found: the entry "by_position" of the result of `data.text.Text.evaluate`.
    """
    losses, rows, start = found["losses"], [], 0
    while start < len(losses):
        part = losses[start : max(1, 2 * start)]
        last = (start + len(part)) * found["window"] - 1
        rows.append((start * found["window"], last, math.exp(sum(part) / len(part))))
        start += len(part)
    return rows


def show(result: dict, places: dict[str, Path]) -> None:
    """Print the result as a table, followed by the paths."""
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
        console.print("\nEvaluation:")
        table.add_column("of this model")
        table.add_column("", justify="right")
        for name, value in result.items():
            if isinstance(value, int | float):
                table.add_row(name.replace("_", " "), f"{value:.5g}")
        for source, found in result.get("sources", {}).items():
            for name, value in found.items():
                table.add_row(f"{name.replace('_', ' ')} on {source}", f"{value:.5g}")
    console.print(table)
    if "by_position" in result:
        console.print(f"\nBy position in {result['by_position']['documents']} documents:")
        console.print(_positions(result["by_position"]))
    for name, place in places.items():
        console.print(f"{name + ':':<12}{place}", soft_wrap=True)


def _positions(found: dict) -> Any:
    from rich.table import Table

    table = Table()
    for name in ("tokens", "perplexity"):
        table.add_column(name, justify="right")
    for first, last, perplexity in by_position(found):
        table.add_row(f"{first}-{last}", f"{perplexity:.2f}")
    return table
