"""The paper's table of language models on SlimPajama: hours, seconds per step and perplexity of each."""

from pathlib import Path

from scripts.reproduction.result import Options, Reproduction, Table, paper, save
from scripts.reproduction.runs import OUTPUTS, Run, collect, failures, made_on, train

SOURCE = "language_model_runs"  # language_model_* are files of scripts.benchmark
BACKENDS = {
    "CUDA fused": ("model.mixer.backend=cuda_fused",),
    "CUDA alternating": ("model.mixer.backend=cuda",),
    "nn.LSTM": (),
    "attention": (),
}
QUICK = (
    "data=text_tiny",
    "data.context_length=1024",
    "data.batch_size=32",
    "global_batch_size=32",
    "trainer=single",
    "trainer.precision=bf16-mixed",
    "trainer.max_steps=60",
    "val_every=60",
    "optim.warmup_steps=10",
)


def _run(row: dict, folder: Path, quick: bool) -> Run:
    model = "nn_lstm" if row["backend"] == "nn.LSTM" else row["model"]
    sizes = (f"model={model}", f"model.num_heads={row['heads']}")
    name = "_".join((row["model"], row["backend"], str(row["heads"]))).replace(" ", "_")
    return Run(
        folder / name, ("experiment=slimpajama_160m", *sizes, *BACKENDS[row["backend"]], *(QUICK if quick else ()))
    )


def _measure(options: Options) -> list[Path]:
    folder = options.runs
    if folder is None:
        folder = OUTPUTS / ("language_model_quick" if options.quick else "language_model")
        train([_run(row, folder, options.quick) for row in paper("language_model")], options)
    rows = collect(folder)
    return [save(SOURCE, options, {"runs": rows}, made_on(rows))]


def ours(contents: list[dict], row: dict) -> dict | None:
    """Our run of a row of the paper's table, if it is finished."""
    wanted = set(_run(row, Path(), quick=False).overrides)
    for run in contents[0]["runs"]:
        if wanted <= set(run["overrides"]) and "perplexity" in run:
            return run
    return None


def _table(contents: list[dict]) -> Table:
    header = ["model", "backend", "heads", "parameters (M)", "paper", "hours", "paper", "s / step", "paper"]
    table = [[*header, "perplexity", "paper"]]
    for row in paper("language_model"):
        run = ours(contents, row)
        full = run and not contents[0]["quick"]
        cells = [
            (f"{run['parameters'] // 10**6}" if run else "", str(row["parameters"])),
            (f"{run['seconds'] / 3600:.1f}" if full else "", str(row["hours"])),
            (f"{run['step_time']:.3f}" if run else "", f"{row['step']:.3f}"),
            (f"{run['perplexity']:.1f}" if full else "", str(row["perplexity"])),
        ]
        table.append([row["model"], row["backend"], str(row["heads"]), *(cell for pair in cells for cell in pair)])
    return table


def _notes(contents: list[dict]) -> list[str]:
    if not contents[0]["quick"]:
        return failures(contents)
    scale = (
        "This is the quick run (`--quick`): 60 steps of 32 blocks of 1024 tokens on one device, from the Python "
        "standard library's sources. Only its seconds per step mean anything: they are those of 32,768 tokens on one "
        "GPU, the paper's of 524,288 on eight."
    )
    return [scale, *failures(contents)]


def _draw(contents: list[dict], file: Path) -> None:
    """Tokens per second, ours beside the paper's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    rows = paper("language_model")
    for place, row in enumerate(rows):
        run = ours(contents, row)
        axes.barh(place - 0.2, 512 * 1024 / row["step"] / 8, 0.4, color="tab:orange")
        if run:
            axes.barh(place + 0.2, run["tokens_per_second"] / run["devices"], 0.4, color="tab:blue")
    axes.barh(0, 0, color="tab:orange", label="paper, each of 8 H100")
    axes.barh(0, 0, color="tab:blue", label=f"ours, {contents[0]['machine']['gpu']}")
    axes.set_yticks(range(len(rows)), labels=[f"{row['model']} {row['backend']} {row['heads']}" for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second and GPU")
    axes.legend()
    figure.savefig(file, dpi=150)


LANGUAGE_MODEL = Reproduction(
    source=SOURCE,
    what="160 M parameters, 15 B tokens, GPT-2 vocabulary, context 1024, batches of 512. Seconds per step are medians.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
