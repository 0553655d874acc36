"""What a state carried from batch to batch buys: perplexity over the position in long documents."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from reproduction.result import Options, Reproduction, Table, quick_note, save
from reproduction.runs import (
    Run,
    check_experiment,
    collect,
    evaluation,
    failures,
    folder_of_runs,
    made_on,
    runs_of,
    tokens,
    trained_by,
)
from reproduction.text_runs import check_finished, finished

CONTEXTS = (128, 256, 1024)
EXPERIMENT = "context"
EDGES = (0, 128, 1024, 4096, 16384)  # of the columns, in positions; the last ends with the documents
QUICK = (
    *("data.source=stdlib", "data.max_bytes=3_000_000", "data.tokenizer=bpe:2048", "data.eval_length=4096"),
    *("model.d_model=64", "model.num_blocks=2", "model.num_heads=2", "compile=false", "threads=1"),
    *("trainer.precision=32-true", "trainer.max_steps=40", "val_every=40", "schedule.warmup_steps=10"),
)
QUICK_TOKENS = 2048  # in a step
_TOKENS = 32768
_VALIDATED = 2**20  # tokens, the same for all contexts


def _measure(options: Options) -> list[Path]:
    folder = folder_of_runs("context", options, partial(_runs, quick=options.quick))
    rows = collect(folder, options.add_to, _described)
    check_finished(options, rows)
    rows.sort(key=lambda row: (row["model"], row.get("context_length", 0), row.get("stateful", False)))
    check_experiment(finished(rows), EXPERIMENT)
    return [save("context", options, {"runs": rows}, made_on(rows))]


def _runs(folder: Path, quick: bool) -> Iterator[Run]:
    """Yield the runs, the longest first: a Transformer that reads a document at once, or forgets as in training, and
    LSTMs with and without states carried on."""
    size = _size(CONTEXTS[-1], quick)
    for seen in ("null", CONTEXTS[-1]):
        yield Run(folder / f"transformer_{seen}", (*size, "model=transformer", f"data.eval_context={seen}"))
    for context in reversed(CONTEXTS):
        for stateful in ("true", "false"):
            size = _size(context, quick)
            yield Run(folder / f"lstm_{context}_{stateful}", (*size, "model=lstm", f"data.stateful={stateful}"))


def _size(context: int, quick: bool) -> tuple[str, ...]:
    rows = (QUICK_TOKENS if quick else _TOKENS) // context
    size = (f"data.context_length={context}", f"data.batch_size={rows}", f"data.max_val_blocks={_VALIDATED // context}")
    return (f"experiment={EXPERIMENT}", *size, *(QUICK if quick else ()))


def _described(folder: Path) -> dict:
    found = evaluation(folder)
    if found is None:
        return {}
    data = found["config"]["data"]
    return {key: data.get(key) for key in ("context_length", "stateful", "eval_context")}


def name_of(run: dict) -> str:
    if run["eval_context"]:
        return f"{run['model']}, context {run['context_length']}, blocks apart"
    carried = ", state carried" if run["stateful"] else ""
    return f"{run['model']}, context {run['context_length']}{carried}"


def _table(contents: list[dict]) -> Table:
    runs = finished(runs_of(contents))
    ranges = edges(runs)
    columns = [f"{low}-{high - 1}" for low, high in ranges]
    rows = [["model", "parameters (M)", "tokens (M)", "validation", *columns]]
    for run in runs:
        by_position = [f"{perplexity(run, low, high):.2f}" for low, high in ranges]
        size = [f"{run['parameters'] / 1e6:.1f}", f"{tokens(run) / 1e6:.1f}", f"{run['perplexity']:.2f}"]
        rows.append([name_of(run), *size, *by_position])
    return rows


def edges(runs: list[dict]) -> list[tuple[int, int]]:
    """Return first and last + 1 position of each column."""
    found = runs[0]["by_position"]
    length = len(found["losses"]) * found["window"]
    return list(pairwise([edge for edge in EDGES if edge < length] + [length]))


def perplexity(run: dict, low: int, high: int) -> float:
    """Return the perplexity at positions low ... high - 1 of the documents."""
    found = run["by_position"]
    losses = found["losses"][low // found["window"] : high // found["window"]]
    return math.exp(sum(losses) / len(losses))


def _notes(contents: list[dict]) -> list[str]:
    runs = runs_of(contents)
    found = finished(runs)[0]["by_position"]
    return [
        f"Positions: {found['documents']} held-out documents, from their beginning on, all with the same tokens. "
        "Validation: the perplexity on all held-out text in blocks of the context, or with the state carried on. "
        "Trained on the same number of tokens, the state of an LSTM going on through a document in every evaluation; "
        "'blocks apart': the model forgets all after every context, as in training, where it otherwise attends to all "
        "of the document.",
        f"Seed 0. By {trained_by(runs)}.",
        *quick_note(contents),
        *failures(runs),
    ]


def _draw(contents: list[dict], file: Path) -> None:
    """Draw perplexity over the position: solid with states carried on in training, dashed without."""
    from matplotlib.figure import Figure

    runs = finished(runs_of(contents))
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(CONTEXTS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for run in runs:
        points = doubling(run)
        of_lstm = _is_lstm(run)
        colour = colours.get(run["context_length"], "tab:red") if of_lstm else "black"
        style = "-" if run["stateful"] or run["eval_context"] else "--" if of_lstm else ":"
        axes.plot(*zip(*points, strict=True), style, color=colour, label=name_of(run), marker=".", markersize=4)
    shown = [value for run in runs if _is_lstm(run) or run["eval_context"] for _, value in doubling(run)]
    axes.set_ylim(0.9 * min(shown), 1.1 * max(shown))
    axes.set_xscale("log", base=2)
    starts = [start for start, _ in doubling(runs[0])]
    axes.set_xticks(starts, labels=["0", *map(str, starts[1:])])
    axes.set(xlabel="position in the document (each point the mean up to the next)", ylabel="perplexity")
    axes.set_title(_finding(runs), fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=150)


def _is_lstm(run: dict) -> bool:
    return run["model"] == "lstm"


def doubling(run: dict) -> list[tuple[int, float]]:
    """Return the first position, 64 in place of 0, and the perplexity of ranges that double in length."""
    found = run["by_position"]
    window, length = found["window"], len(found["losses"]) * found["window"]
    starts = [0]
    while (following := max(window, 2 * starts[-1])) < length:
        starts.append(following)
    return [
        (low or window // 2, perplexity(run, low, high))
        for low, high in zip(starts, [*starts[1:], length], strict=True)
    ]


def _finding(runs: list[dict]) -> str:
    """Return what the figure shows, as a title."""
    low, high = edges(runs)[-1]
    found = {(run["context_length"], run["stateful"]): perplexity(run, low, high) for run in runs if _is_lstm(run)}
    told = [
        f"{context}: {found[context, False]:.2f} and {found[context, True]:.2f}"
        for context in CONTEXTS
        if {(context, False), (context, True)} <= found.keys()
    ]
    where = f"Perplexity at positions {low} to {high - 1}, without and with the state carried on in training"
    return f"{where}\nLSTM, context {', '.join(told)}"


CONTEXT = Reproduction(
    source="context",
    what="The same LSTM trained on windows of 128, 256 and 1024 tokens, with and without its state carried from window "
    "to window (`data.stateful`), beside a Transformer: perplexity by the position in long documents "
    "(experiment=context).",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
