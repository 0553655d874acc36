"""The measured parts of README.md, from the files in docs/results.

    python -m docs.tools.readme

writes them anew, between the comments that name them.
"""

import json
from argparse import ArgumentParser
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.cases import HIDDEN, TRAINING, Case, Job
from benchmarks.markdown import Table, filled, markdown
from benchmarks.ours import NAME as OURS
from benchmarks.results import by_job
from benchmarks.table import FLASHRNN, fastest_peer, times
from reproduction.accuracy import MODELS, TASKS, finished, mean_extrapolated
from reproduction.language_model import ours
from reproduction.result import known, paper

PAGE = ROOT / "README.md"
PARITY = RESULTS / "parity_cpu_h100_80gb_hbm3_h200.json"
STATE_TRACKING = RESULTS / "state_tracking_h200.json"
KERNELS = RESULTS / "kernels_main_h200.json"
STEPS = {size: RESULTS / f"language_model_h200_b{size}.json" for size in (32, 64)}
TRAINED = RESULTS / "loss_curves_h200.json"

_NAMES = {"transformer": "Transformer", "lstm": "LSTM", "slstm": "sLSTM"}
_CUDNN = "cudnn_fp16"
_CASES = [Case("lstm", N, D, B) for N, D in ((12, 64), (1, HIDDEN)) for B in (16, 32, 64)]
# The paper's name of a row's backend, and the benchmark's of its model.
_LANGUAGE_MODELS = {
    ("transformer", "attention", 12): "model=transformer",
    ("lstm", "CUDA fused", 12): "model=lstm model.num_heads=12",
    ("slstm", "CUDA fused", 12): "model=slstm model.num_heads=12",
    ("lstm", "CUDA fused", 1): "model=lstm model.num_heads=1",
    ("lstm", "nn.LSTM", 1): "model=nn_lstm model.num_heads=1",
}


def _read(file: Path) -> dict:
    return json.loads(file.read_text())


def accuracies() -> Table:
    """Mean over seeds, beyond the lengths of training."""
    parity, tasks = _read(PARITY), _read(STATE_TRACKING)

    def row(label: str, content: dict, task: str) -> list[str]:
        means = (mean_extrapolated([content], data=task, model=model) for model in MODELS)
        accuracy = ("" if value is None else f"{value:.3f}" for value in means)
        return [label, *accuracy, f"{finished([content], data=task)[0]['chance']:.3f}"]

    return [
        ["task, longest sequence", *MODELS, "chance"],
        row("parity, the paper's protocol, 256", parity, "parity"),
        ["the same, in the paper", *(known(paper("parity").get(model)) for model in MODELS), ""],
        *(row(f"{task}, 512", tasks, task) for task in TASKS if finished([tasks], data=task)),
    ]


def kernels() -> Table:
    """Milliseconds of forward and backward, and how many times those of the faster peer are ours."""
    rows = by_job(_read(KERNELS)["rows"])
    table = [["LSTM, heads × size, batch", "ours", "FlashRNN 1.0.8", "cuDNN, float16", "the faster one / ours"]]
    for case in _CASES:
        ms = times(rows[Job(case, TRAINING)])
        cells = [f"{ms[name]:.2f}" if name in ms else "" for name in (OURS, FLASHRNN, _CUDNN)]
        table.append([f"{case.N} × {case.D}, {case.B}", *cells, f"{ms[fastest_peer(ms)] / ms[OURS]:.1f}"])
    return table


def language_models() -> Table:
    """Time of a training step, and what the models learn."""
    steps = {size: {row["model"]: row for row in _read(file)["rows"]} for size, file in STEPS.items()}
    published = {(row["model"], row["backend"], row["heads"]): row for row in paper("language_model")}
    trained = _read(TRAINED)
    of_transformer = published[next(iter(_LANGUAGE_MODELS))]["step"]
    relative = [f"over the Transformer's, {size} × 1024 tokens" for size in STEPS]
    table = [["model", "ms, 32 × 1024 tokens", *relative, "the same in the paper", "perplexity, 30 M tokens of Python"]]
    for place, model in _LANGUAGE_MODELS.items():
        row, run = published[place], ours([trained], published[place])
        name = "nn.LSTM (cuDNN)" if row["backend"] == "nn.LSTM" else _NAMES[row["model"]]
        heads = f"{row['heads']} head{'s' * (row['heads'] > 1)}"
        cells = [
            f"{name}, {heads}, {row['parameters']} M",
            f"{steps[32][model]['ms']:.1f}",
            *(f"{steps[size][model]['over_transformer']:.2f}" for size in STEPS),
            f"{row['step'] / of_transformer:.2f}",
            f"{run['perplexity']:.1f}" if run else "",
        ]
        table.append(cells)
    return table


def page() -> str:
    """README.md with tables made anew."""
    tables = {"accuracies": accuracies(), "kernels": kernels(), "language_models": language_models()}
    return filled(PAGE.read_text(), {place: markdown(table) for place, table in tables.items()})


if __name__ == "__main__":
    ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    PAGE.write_text(page())
    print(PAGE)
