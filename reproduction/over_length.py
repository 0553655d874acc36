"""Long documents and long prompts: perplexity, size of the state and speed of generation over the length."""

from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks import generation
from benchmarks.markdown import markdown
from benchmarks.results import head
from reproduction.context import CONTEXTS, described, doubling, edges, name_of, perplexity, runs_of_contexts
from reproduction.result import Options, Reproduction, Table, quick_note, save
from reproduction.runs import Run, collect, folder_of_runs, made_on, runs_of, trained_by
from reproduction.text_runs import check_finished, finished
from training.provenance import short

_LENGTHS = (1024, 4096, 16384, 65536)  # after which generation is timed
_QUICK_LENGTHS = (512, 2048)
_STYLES = {(True, False): "-", (False, False): "--", (False, True): ":"}  # by stateful, and whether blocks are apart
_TIMED = {True: ("LSTM, 12 heads", "Transformer"), False: ("LSTM", "Transformer")}  # on a GPU, on a CPU


def _measure(options: Options) -> list[Path]:
    """Train what `reproduce context` trains at the longest context, or take its runs, then time generation here."""

    def runs(folder: Path) -> Iterable[Run]:
        wanted = f"data.context_length={CONTEXTS[-1]}"
        return [run for run in runs_of_contexts(folder, options.quick) if wanted in run.overrides]

    rows = collect(folder_of_runs("context", options, runs), options.add_to, described)
    rows = [row for row in rows if row.get("context_length") == CONTEXTS[-1]]
    check_finished(options, rows)
    rows.sort(key=lambda row: (row["model"], not row["stateful"], row["eval_context"] is not None))
    lengths = _QUICK_LENGTHS if options.quick else _LENGTHS
    timed = list(generation.rows(_TIMED[torch.cuda.is_available()], lengths))
    content = {"runs": rows, "generation": timed, "generation_by": head()}
    return [save("over_length", options, content, made_on(rows))]


def _table(contents: list[dict]) -> Table:
    runs = finished(runs_of(contents))
    ranges = edges(runs)
    last = ranges[-1][1]
    rows = [["model", *(f"{low}-{high - 1}" for low, high in ranges), f"state after {last} tokens, MiB"]]
    for run in runs:
        values = [f"{perplexity(run, low, high):.2f}" for low, high in ranges]
        rows.append([name_of(run), *values, f"{run['by_position']['state_mib'][-1]:.4g}"])
    return rows


def _notes(contents: list[dict]) -> list[str]:
    runs = finished(runs_of(contents))
    found, by = runs[0]["by_position"], contents[0]["generation_by"]
    device = by["machine"]["gpu"] or f"one core of {by['machine']['processor']}"
    timed = [["model", "after tokens", "ms per token", "tokens per s", "memory, MiB"]]
    for row in contents[0]["generation"]:
        memory = row.get("peak_mib", row.get("cache_mib", ""))
        pace = [row.get("ms_per_token", row.get("error")), row.get("tokens_per_s", "")]
        timed.append([row["model"], f"{row['context']:,}", *map(str, pace), str(memory)])
    return [
        f"Above: {found['documents']} held-out documents, read once from the beginning in windows of {found['window']} "
        "tokens; the state is all that a model keeps of one document. Below: `generate()` after a prompt, by models "
        "with random weights of 160 M parameters on a GPU, 4 blocks of width 256 on a CPU; memory beside the weights.",
        markdown(timed),
        f"Trained by {trained_by(runs)}; timed by commit {short(by['commit'])} on {device}.",
        *quick_note(contents),
    ]


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    from benchmarks.figures import number_log_axis

    runs = finished(runs_of(contents))
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    of_text, of_state, of_speed = figure.subplots(1, 3)
    for run in runs:
        style = {"color": _colour(run["model"]), "linestyle": _STYLES[run["stateful"], run["eval_context"] is not None]}
        of_text.plot(*zip(*doubling(run), strict=True), marker=".", label=name_of(run), **style)
        found = run["by_position"]
        ends = [(number + 1) * found["window"] for number in range(len(found["losses"]))]
        of_state.plot(ends, found["state_mib"], **style)
    rows = [row for row in contents[0]["generation"] if "error" not in row]
    for model in dict.fromkeys(row["model"] for row in rows):
        points = [(row["context"], row["tokens_per_s"]) for row in rows if row["model"] == model]
        of_speed.plot(*zip(*points, strict=True), "o-", color=_colour(model), label=model)
    # A Transformer far beyond the lengths of its training may guess: its curve then leaves the panel.
    shown = [value for run in runs if run["eval_context"] or run["model"] == "lstm" for _, value in doubling(run)]
    of_text.set(ylabel="perplexity", xlabel="position in the document", ylim=(0.9 * min(shown), 1.2 * max(shown)))
    of_state.set(ylabel="state of a document, MiB", xlabel="tokens read", yscale="log")
    of_speed.set(ylabel="tokens per second", xlabel="tokens before, one sequence", yscale="log")
    number_log_axis(of_speed.yaxis)
    for axes in (of_text, of_state, of_speed):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    of_text.legend(fontsize=8)
    of_speed.legend(fontsize=8)
    figure.suptitle(_finding(runs), fontsize=11)
    figure.savefig(file, dpi=150)


def _colour(model: str) -> str:
    return "tab:blue" if model.lower().startswith("lstm") else "black"


def _finding(runs: list[dict]) -> str:
    """Return how large the states are at the end, as a title."""
    tokens = len(runs[0]["by_position"]["losses"]) * runs[0]["by_position"]["window"]
    sizes = {run["model"]: run["by_position"]["state_mib"][-1] for run in runs if not run["eval_context"]}
    told = ", ".join(f"{model} {size:.3g} MiB" for model, size in sorted(sizes.items()))
    return f"State after {tokens:,} tokens: {told}"


OVER_LENGTH = Reproduction(
    source="over_length",
    what="Perplexity and size of the state over the position in long documents, for the models of `reproduce context` "
    f"that were trained with {CONTEXTS[-1]} tokens, and speed and memory of generation after long prompts.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
