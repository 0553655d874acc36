"""Page and figure of `generation`, made from its file of results."""

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import name_curves, number_log_axis
from benchmarks.generation import ATTENTION, LLAMA
from benchmarks.markdown import markdown, write_page


def write(path: Path) -> list[Path]:
    """Write the page and the figure of a file of `generation` next to it; return their paths."""
    content = json.loads(path.read_text())
    machine = content["machine"]
    device = machine["gpu"] or f"{machine['processor']}, one thread"
    figure = path.with_suffix(".png")
    draw(content["rows"], device, figure)
    paragraphs = [
        f"# Generating text: {device}",
        content["what"],
        f"![speed over batch and context]({figure.name})",
        markdown(_table(content["rows"])),
    ]
    return [write_page(path, paragraphs), figure]


def _table(rows: list[dict]) -> list[list[str]]:
    columns = {
        "ms_per_token": "ms per step",
        "tokens_per_s": "tokens per s",
        "first_token_s": "first token, s",
        "first_call_token_s": "of the first call",
        "peak_mib": "memory, MiB",
        "cache_mib": "cache, MiB",
        "reading_ms": "reading weights, ms",
    }
    columns = {key: title for key, title in columns.items() if any(key in row for row in rows)}
    llama = {(row["batch"], row["context"]): row.get("ms_per_token") for row in rows if row["model"] == LLAMA}
    table = [["model", "batch", "context", *columns.values(), *(["Llama over it"] if llama else [])]]
    for row in rows:
        line = [row["model"], f"{row['batch']:,}", f"{row['context']:,}"]
        line += [f"{row[key]:,}" if key in row else row.get("error", "") for key in columns]
        if llama:
            peer = llama.get((row["batch"], row["context"]))
            line.append(f"{peer / row['ms_per_token']:.1f}" if peer and "ms_per_token" in row else "")
        table.append(line)
    return table


def draw(rows: list[dict], device: str, file: Path) -> None:
    """Draw tokens per second over batch and context, with a curve per model and the limit by memory bandwidth."""
    by_batch = [row for row in rows if "error" not in row and row["context"] == 128]
    by_context = [row for row in rows if "error" not in row and row["batch"] == 1 and row["context"] != 128]
    panels = {over: found for over, found in {"batch": by_batch, "context": by_context}.items() if found}
    figure = Figure(figsize=(6.5 * len(panels), 4.2), layout="constrained")
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, (over, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axes, found, over, models)
    figure.suptitle(f"{_finding(rows)} ({device})", fontsize=11)
    figure.savefig(file, dpi=150)


def _finding(rows: list[dict]) -> str:
    """Return the title: the speed of recurrent models relative to the fastest with attention after the longest context.

    Without both kinds of models, it gives the speed of the first model over the context.
    """
    speeds: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if "error" not in row:
            speeds.setdefault((row["context"], -row["batch"]), {})[row["model"]] = row["tokens_per_s"]
    most = max(map(len, speeds.values()))
    context, batch = max(place for place, found in speeds.items() if len(found) == most)
    found = speeds[context, batch]
    behind = f"{context:,} tokens, {'one sequence' if batch == -1 else f'{-batch} sequences'}"
    attention = [model for model in found if model in ATTENTION]
    recurrent = [model for model in found if model not in ATTENTION]
    if attention and recurrent:
        peer = max(attention, key=found.get)
        ratio = min(found[model] for model in recurrent) / found[peer]
        return f"All recurrent models: at least {ratio:.1f} times as fast as {peer}\nafter {behind}"
    model = next(iter(found))
    pace = [speed[model] for (_, rows_of), speed in speeds.items() if rows_of == batch]
    return f"{model}: {min(pace):,.0f} to {max(pace):,.0f} tokens per second\nafter up to {behind}"


def _panel(axes: Axes, rows: list[dict], over: str, models: list[str]) -> None:
    ends = {}
    for k, model in enumerate(models):
        points = sorted((row[over], row["tokens_per_s"]) for row in rows if row["model"] == model)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{k}")
            ends[model] = points[-1][1], f"C{k}"
    ticks = sorted({row[over] for row in rows})
    first = next((row["reading_ms"] for row in rows if "reading_ms" in row), None)
    if first:
        bound = [1000 * (x if over == "batch" else 1) / first for x in ticks]
        axes.plot(ticks, bound, "k--")
        ends[f"memory bandwidth, {models[0]}"] = bound[-1], "k"
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels=[f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    title = "sequences, each after 128 tokens" if over == "batch" else "tokens of context, one sequence"
    axes.set(xlabel=title, ylabel="tokens per second")
    number_log_axis(axes.yaxis)
    axes.grid(alpha=0.3)
    name_curves(axes, ends)
