"""The paper's table of language models on SlimPajama, with hours, seconds per step and perplexity."""

from collections.abc import Sequence
from pathlib import Path

from reproduction.accuracy import model_name
from reproduction.loss_curves import NN_LSTM
from reproduction.result import Options, Reproduction, Table, paper, save
from reproduction.runs import Run, collect, failures, folder_of_runs, made_on, runs_of, speed, tokens, trained_by
from reproduction.text_runs import by_text, check_finished, finished, names

SOURCE = "language_model_runs"  # because language_model_* are files of scripts.benchmark
# By the paper's name of a backend; there, `auto` selects the fused kernels.
BACKENDS = {"CUDA fused": (), "CUDA alternating": ("model.mixer.backend=cuda",), "nn.LSTM": NN_LSTM, "attention": ()}
FULL, SCALED_DOWN = "slimpajama_160m", "python_160m"  # experiments
TOKENS, STEPS, GPUS = 512 * 1024, 30_000, 8  # tokens per step, number of steps and GPUs in the paper


def _run(row: dict, folder: Path, quick: bool) -> Run:
    name = "_".join((row["model"], row["backend"], str(row["heads"]))).replace(" ", "_")
    sizes = (f"model={_model(row)}", f"model.num_heads={row['heads']}")
    return Run(folder / name, (f"experiment={SCALED_DOWN if quick else FULL}", *sizes, *BACKENDS[row["backend"]]))


def _model(row: dict) -> str:
    return "nn_lstm" if row["backend"] == "nn.LSTM" else row["model"]


def _measure(options: Options) -> list[Path]:
    table = paper("language_model")
    folder = folder_of_runs(
        "language_model", options, lambda folder: [_run(row, folder, options.quick) for row in table]
    )
    rows = collect(folder, options.add_to)
    check_finished(options, rows)
    if options.runs and not any(ours(rows, row) for row in table):
        raise ValueError(f"no run below {folder} has a model, number of heads and backend of the paper's table")
    return [save(SOURCE, options, {"runs": rows}, made_on(rows))]


def ours(runs: list[dict], row: dict) -> dict | None:
    """Return our finished run for a row of the paper's table, the one with the first seed; None if there is none."""

    def key(model: str, heads: int, overrides: Sequence[str]) -> tuple:
        named = ("model.mixer.backend=", *(["trainer.precision="] if model == "nn_lstm" else []))
        return model, heads, *(override for override in overrides if override.startswith(named))

    wanted = key(_model(row), row["heads"], BACKENDS[row["backend"]])
    found = [run for run in finished(runs) if key(run["model"], run["num_heads"], run["overrides"]) == wanted]
    return min(found, key=lambda run: run["seed"], default=None)


def _table(contents: list[dict]) -> Table:
    names = ["parameters (M)", "s / step", "hours", "perplexity (tokens trained on)"]
    table = [["model", "backend", "heads", *(cell for name in names for cell in (name, "paper"))]]
    runs = runs_of(contents)
    for row in paper("language_model"):
        run = ours(runs, row)
        step = run and TOKENS / (GPUS * speed(run))
        pairs = [
            (run and f"{run['parameters'] // 10**6}", str(row["parameters"])),
            (run and f"{step:.3f}", f"{row['step']:.3f}"),
            (run and f"{step * STEPS / 3600:.1f}", str(row["hours"])),
            (run and f"{run['perplexity']:.1f} ({_trained_on(run)})", f"{row['perplexity']} (15 B)"),
        ]
        cells = [cell or "" for pair in pairs for cell in pair]
        table.append([row["model"], row["backend"], str(row["heads"]), *cells])
    return table


def _trained_on(run: dict) -> str:
    number = tokens(run)
    return f"{number / 1e9:.0f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def _notes(contents: list[dict]) -> list[str]:
    seconds = (
        "Seconds per step are for 512 x 1024 tokens on eight GPUs, extrapolated from the speed of one GPU without the "
        "exchange of gradients. Hours are for 30,000 such steps."
    )
    scaled_down = (
        "Perplexities after 30 M tokens are those of the scaled-down run (`quick=true`: experiment=python_160m, "
        "trained on the machine's Python sources). Compare them with each other, not with the paper's."
    )
    runs = runs_of(contents)
    experiments = {run["experiment"] for run in runs}
    by = f"By {trained_by(runs)}."
    return [seconds, *([scaled_down] if SCALED_DOWN in experiments else []), *_texts(runs), by, *failures(runs)]


def _texts(runs: list[dict]) -> list[str]:
    """Return a paragraph if not all rows were trained on the same text, because a machine's sources have changed."""
    shown = [run for row in paper("language_model") if (run := ours(runs, row))]
    name_of = {id(run): f"`{name}`" for name, run in zip(names(shown), shown, strict=True)}
    texts = by_text(shown)
    if len(texts) < 2:
        return []
    parts = [
        f"{', '.join(name_of[id(run)] for run in of_text)} (unigram perplexity {unigram})"
        for unigram, of_text in sorted(texts.items())
    ]
    return [f"Not all perplexities were measured on the same text: {'; '.join(parts)}."]


def _draw(contents: list[dict], file: Path) -> None:
    """Draw tokens per second and GPU for this project and for the paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    rows, runs = paper("language_model"), runs_of(contents)
    trained = [(ours(runs, row), row) for row in rows]
    for place, (run, row) in enumerate(trained):
        published = TOKENS / row["step"] / GPUS
        axes.barh(place - 0.2, published, 0.4, color="tab:orange")
        if run:
            axes.barh(place + 0.2, speed(run), 0.4, color="tab:blue")
            axes.text(speed(run), place + 0.2, f" {speed(run) / published:.1f} ×", va="center", fontsize=8)
    devices = ", ".join(dict.fromkeys(run["environment"]["device"] for run, _ in trained if run))
    axes.barh(0, 0, color="tab:orange", label="paper, each of 8 H100")
    axes.barh(0, 0, color="tab:blue", label=f"this project, one {devices}")
    axes.set_yticks(range(len(rows)), labels=[_label(row) for row in rows])
    axes.invert_yaxis()
    ratios = [speed(run) / (TOKENS / row["step"] / GPUS) for run, row in trained if run]
    finding = f"Training is {min(ratios):.1f} to {max(ratios):.1f} times as fast as in the paper"
    axes.set(xlabel="tokens per second and GPU", title=finding)
    axes.margins(x=0.08)  # leaves room for the numbers at the bars
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=150)


def _label(row: dict) -> str:
    backend = "" if row["backend"] == "attention" else f", {row['backend']}"
    return f"{model_name(row['model'])}{backend}, {row['heads']} head{'s' * (row['heads'] > 1)}"


LANGUAGE_MODEL = Reproduction(
    source=SOURCE,
    what="Models of 160 M parameters with the GPT-2 vocabulary or one of equal size, context 1024. Seconds per step "
    "are medians.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
