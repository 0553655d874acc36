"""Plots of an evaluation: accuracy against sequence length, and perplexity against the position in documents."""

from pathlib import Path


def accuracy_by_length(result: dict, model: str, file: Path) -> None:
    """Plot accuracy against length, with the chance level and the lengths of training.

    Args:
        result: the result of `data.state_tracking.StateTracking.evaluate`.
    """
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


def perplexity_by_position(ranges: list[tuple[int, int, float]], context_length: int, title: str, file: Path) -> None:
    """Plot perplexity against the position in documents, with the context length of training.

    Args:
        ranges: first position, last position and perplexity of each range, from `training.results.by_position`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    edges = [first or 1 for first, _, _ in ranges] + [ranges[-1][1] + 1]
    axes.stairs([perplexity for _, _, perplexity in ranges], edges, baseline=None)
    axes.axvline(context_length, color="gray", linestyle="--", label="context of training")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the document", ylabel="perplexity", title=title)
    axes.legend()
    figure.savefig(file, dpi=150)
