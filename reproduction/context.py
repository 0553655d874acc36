"""The benefit of carrying states from batch to batch: perplexity by position in long documents."""

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
LANE = 4096  # number of tokens over which a state is carried in shuffled lanes
EXPERIMENT = "context"
EDGES = (0, 128, 1024, 4096, 16384)  # positions where columns start; the last one ends with the documents
QUICK = (
    *("data.source=stdlib", "data.max_bytes=3_000_000", "data.tokenizer=bpe:2048", "data.eval_length=4096"),
    *("model.d_model=64", "model.num_blocks=2", "model.num_heads=2", "compile=false", "threads=1"),
    *("trainer.precision=32-true", "trainer.max_steps=40", "val_every=40", "schedule.warmup_steps=10"),
)
QUICK_TOKENS = 2048  # tokens per step
_CARRIED = {
    "lanes": ("data.stateful=true", f"data.lane_tokens={LANE}"),
    "whole": ("data.stateful=true",),
    "none": ("data.stateful=false",),
}
_TOLD = {"none": "without a carried state", "whole": "in one lane for each row", "lanes": "in shuffled lanes"}
_STYLES = {  # by whether the model is an LSTM, and how its state is carried
    (True, "none"): ("tab:orange", "--"),
    (True, "whole"): ("tab:green", ":"),
    (True, "lanes"): ("tab:blue", "-"),
    (False, "none"): ("black", ":"),
    (False, "apart"): ("black", "-"),
}
_TOKENS = 32768
_VALIDATED = 2**20  # number of validation tokens, the same for all contexts


def _measure(options: Options) -> list[Path]:
    folder = folder_of_runs("context", options, partial(_runs, quick=options.quick))
    rows = collect(folder, options.add_to, _described)
    check_finished(options, rows)
    rows.sort(key=lambda row: (row["model"], row.get("context_length", 0), row.get("stateful", False)))
    check_experiment(finished(rows), EXPERIMENT)
    return [save("context", options, {"runs": rows}, made_on(rows))]


def _runs(folder: Path, quick: bool) -> Iterator[Run]:
    """Yield the runs, the longest first.

    They are a Transformer that reads a whole document, or forgets as in training, and LSTMs without carried states,
    with states carried in shuffled lanes, and with states carried in one lane for each row of a step.
    """
    size = _size(CONTEXTS[-1], quick)
    for seen in ("null", CONTEXTS[-1]):
        yield Run(folder / f"transformer_{seen}", (*size, "model=transformer", f"data.eval_context={seen}"))
    for context in reversed(CONTEXTS):
        for name, carried in _CARRIED.items():
            yield Run(folder / f"lstm_{context}_{name}", (*_size(context, quick), "model=lstm", *carried))


def _size(context: int, quick: bool) -> tuple[str, ...]:
    rows = (QUICK_TOKENS if quick else _TOKENS) // context
    size = (f"data.context_length={context}", f"data.batch_size={rows}", f"data.max_val_blocks={_VALIDATED // context}")
    return (f"experiment={EXPERIMENT}", *size, *(QUICK if quick else ()))


def _described(folder: Path) -> dict:
    found = evaluation(folder)
    if found is None:
        return {}
    data = found["config"]["data"]
    return {key: data.get(key) for key in ("context_length", "stateful", "lane_tokens", "eval_context")}


def name_of(run: dict) -> str:
    if run["eval_context"]:
        return f"{run['model']}, context {run['context_length']}, blocks apart"
    over = f" over {run['lane_tokens']} tokens" if run.get("lane_tokens") else ""
    carried = f", state carried{over}" if run["stateful"] else ""
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
    """Return the first position of each column, and the one after its last."""
    found = runs[0]["by_position"]
    length = len(found["losses"]) * found["window"]
    return list(pairwise([edge for edge in EDGES if edge < length] + [length]))


def perplexity(run: dict, low: int, high: int) -> float:
    """Return the perplexity at the positions low ... high - 1 of the documents."""
    found = run["by_position"]
    losses = found["losses"][low // found["window"] : high // found["window"]]
    return math.exp(sum(losses) / len(losses))


def _notes(contents: list[dict]) -> list[str]:
    runs = runs_of(contents)
    found = finished(runs)[0]["by_position"]
    return [
        f"Columns of positions: perplexity on {found['documents']} held-out documents, read from their beginning. "
        "Validation: perplexity on all held-out text, in blocks of the context, or with the state carried on. All "
        "models were trained on the same number of tokens. In every evaluation, the state of an LSTM is carried "
        "through a document. A Transformer attends to the whole document or, with 'blocks apart', only to one context "
        "at a time, as in training.",
        f"Seed 0. By {trained_by(runs)}.",
        *quick_note(contents),
        *failures(runs),
    ]


def _draw(contents: list[dict], file: Path) -> None:
    """Draw perplexity against position, with solid lines for states carried in training, and dashed lines otherwise."""
    from matplotlib.figure import Figure

    from reproduction.axes import over_tokens

    runs = finished(runs_of(contents))
    contexts = sorted({run["context_length"] for run in runs})
    figure = Figure(figsize=(max(8.0, 4.5 * len(contexts)), 4.6), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for context, axes in zip(contexts, panels, strict=True):
        for run in runs:
            if run["context_length"] == context:
                style = dict(zip(("color", "linestyle"), _STYLES[_is_lstm(run), kind(run)], strict=True))
                axes.plot(*zip(*doubling(run), strict=True), label=name_of(run), marker=".", markersize=4, **style)
        over_tokens(axes)
        axes.set_xlabel("position in the document (each point: mean up to the next one)", fontsize=8)
        axes.legend(fontsize=7)
    shown = [value for run in runs if _is_lstm(run) or run["eval_context"] for _, value in doubling(run)]
    panels[0].set_ylim(0.9 * min(shown), 1.1 * max(shown))
    panels[0].set_ylabel("perplexity")
    figure.suptitle(_finding(runs), fontsize=10)
    figure.savefig(file, dpi=150)


def kind(run: dict) -> str:
    """Return how states were carried in training, or that the evaluation treats blocks separately."""
    if run["eval_context"]:
        return "apart"
    return "none" if not run["stateful"] else "lanes" if run.get("lane_tokens") else "whole"


def _is_lstm(run: dict) -> bool:
    return run["model"] == "lstm"


def doubling(run: dict) -> list[tuple[int, float]]:
    """Return first position (64 instead of 0) and perplexity of ranges whose length doubles."""
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
    """Return the title of the figure."""
    low, high = edges(runs)[-1]
    told, best = [], set()
    for context in CONTEXTS:
        found = {kind(run): run for run in runs if _is_lstm(run) and run["context_length"] == context}
        values = {one: perplexity(found[one], low, high) for one in _TOLD if one in found}
        if values:
            best.add(min(values, key=values.get))
            told.append(f"context {context}: {', '.join(f'{values[one]:.2f} {_TOLD[one]}' for one in values)}")
    where = f"at positions {low} to {high - 1}"
    lowest = f"LSTMs trained {_TOLD[best.pop()]} have the lowest perplexity {where}" if len(best) == 1 else None
    return "\n".join([lowest or f"Perplexity of LSTMs {where}", *told])


CONTEXT = Reproduction(
    source="context",
    what="The same LSTM trained on windows of several lengths, with and without its state carried from window to "
    f"window (`data.stateful`), in shuffled lanes of {LANE:,} tokens (`data.lane_tokens`) or in one lane for each "
    "row of a step, compared with a Transformer: perplexity by the position in long documents (experiment=context).",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
