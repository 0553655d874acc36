"""Long documents and prompts: perplexity, size of the state and speed of generation against the length."""

from pathlib import Path

from benchmarks.markdown import markdown
from benchmarks.results import device_folder
from reproduction.context import CONTEXTS, doubling, edges, kind, name_of, perplexity
from reproduction.result import Options, Reproduction, Table
from reproduction.runs import runs_of, trained_by
from reproduction.text_runs import finished
from training.provenance import short

_SOURCES = ("context", "generation")
_STYLES = {"lanes": "-", "whole": "-.", "none": "--", "apart": ":"}  # by how states are carried


def _measure(options: Options) -> list[Path]:
    """Return the files from which this result is made."""
    files = [options.out / device_folder() / f"{source}.json" for source in _SOURCES]
    if missing := [file for file in files if not file.exists()]:
        raise ValueError(
            f"there is no {missing[0]}: first run `python -m scripts.reproduce context` and `python -m scripts."
            "benchmark generation`, or name their files with files=[CONTEXT,GENERATION]"
        )
    return files


def _runs(contents: list[dict]) -> list[dict]:
    """Return the runs with the longest context, with LSTMs first."""
    found = [run for run in finished(runs_of(contents[:1])) if run["context_length"] == CONTEXTS[-1]]
    return sorted(found, key=lambda run: (run["model"], list(_STYLES).index(kind(run))))


def _generation(contents: list[dict]) -> list[dict]:
    """Return the rows that were timed after long prompts."""
    if len(contents) != len(_SOURCES) or "rows" not in contents[1]:
        raise ValueError(f"expected data of {' and '.join(_SOURCES)}, in this order")
    rows = [row for row in contents[1]["rows"] if row["batch"] == 1 and row["context"] >= 512]
    return sorted(rows, key=lambda row: (row["model"], row["context"]))


def _table(contents: list[dict]) -> Table:
    runs = _runs(contents)
    ranges = edges(runs)
    last = ranges[-1][1]
    rows = [["model", *(f"{low}-{high - 1}" for low, high in ranges), f"state after {last} tokens, MiB"]]
    for run in runs:
        values = [f"{perplexity(run, low, high):.2f}" for low, high in ranges]
        rows.append([name_of(run), *values, f"{run['by_position']['state_mib'][-1]:.4g}"])
    return rows


def _notes(contents: list[dict]) -> list[str]:
    runs, timed = _runs(contents), contents[1]
    found, machine = runs[0]["by_position"], timed["machine"]
    rows = [["model", "after tokens", "tokens per s", "memory, MiB"]]
    for row in _generation(contents):
        memory = row.get("peak_mib", row.get("cache_mib", ""))
        pace = row.get("tokens_per_s", row.get("error"))
        rows.append([row["model"], f"{row['context']:,}", str(pace), str(memory)])
    return [
        f"Above: {found['documents']} held-out documents, read once from the beginning in windows of {found['window']} "
        f"tokens; the state is all that a model stores of one document. Trained by {trained_by(runs)}.",
        "Below: `generate()` after a prompt, one sequence, by models of other sizes with random weights; memory "
        f"without the weights. Commit {short(timed['commit'])} on {machine['gpu'] or machine['processor']}.",
        markdown(rows),
    ]


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    from benchmarks.figures import name_curves, number_log_axis
    from reproduction.axes import over_tokens

    runs = _runs(contents)
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    of_text, of_state, of_speed = figure.subplots(1, 3)
    for run in runs:
        style = {"color": _color(run["model"]), "linestyle": _STYLES[kind(run)]}
        of_text.plot(*zip(*doubling(run), strict=True), marker=".", label=name_of(run), **style)
        if run["eval_context"] is None:
            found = run["by_position"]
            ends = [(number + 1) * found["window"] for number in range(len(found["losses"]))]
            of_state.plot(ends, found["state_mib"], **style)
    rows = [row for row in _generation(contents) if "error" not in row]
    of_models = {}
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        points = [(row["context"], row["tokens_per_s"]) for row in rows if row["model"] == model]
        of_speed.plot(*zip(*points, strict=True), "o-", color=f"C{number}")
        of_models[model] = points[-1][1], f"C{number}"
    of_text.set(ylabel="perplexity", xlabel="position in the document", yscale="log")
    number_log_axis(of_text.yaxis)
    of_state.set(ylabel="state of a document, MiB", xlabel="tokens read", yscale="log")
    paces = [row["tokens_per_s"] for row in rows]
    of_speed.set(ylabel="tokens per second, one sequence", xlabel="tokens before", yscale="log")
    of_speed.set_ylim(min(paces) / 3, 2 * max(paces))  # differences of a per cent should not be visible
    number_log_axis(of_speed.yaxis)
    for axes in (of_text, of_state, of_speed):
        over_tokens(axes)
    of_text.legend(fontsize=7, loc="lower right")
    name_curves(of_speed, of_models)
    figure.suptitle(_finding(runs), fontsize=11)
    figure.savefig(file, dpi=150)


def _color(model: str) -> str:
    return "tab:blue" if "lstm" in model.lower() else "black"


def _finding(runs: list[dict]) -> str:
    """Return the title: the sizes of the states at the end."""
    tokens = len(runs[0]["by_position"]["losses"]) * runs[0]["by_position"]["window"]
    sizes = {run["model"]: run["by_position"]["state_mib"][-1] for run in runs if not run["eval_context"]}
    told = ", ".join(f"{model} {size:.3g} MiB" for model, size in sorted(sizes.items()))
    return f"State after {tokens:,} tokens: {told}"


OVER_LENGTH = Reproduction(
    source="context",
    what="Perplexity and size of the state over the position in long documents, for the models of `reproduce context` "
    f"that were trained with {CONTEXTS[-1]} tokens, and speed and memory of generation after long prompts.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
