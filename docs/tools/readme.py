"""Update the measured parts of README.md from the files in docs/results.

    python -m docs.tools.readme

replaces the text between the comments that name these parts.
"""

import json
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

from benchmarks import RESULTS, ROOT
from benchmarks.cases import HIDDEN, TRAINING, Case, Job
from benchmarks.markdown import Table, filled, markdown
from benchmarks.ours import NAME as OURS
from benchmarks.results import by_job, case_of, milliseconds
from reproduction.accuracy import finished, mean_extrapolated
from reproduction.language_model import ours
from reproduction.result import paper

PAGE = ROOT / "README.md"
H200 = RESULTS / "h200"
STATE_TRACKING = H200 / "state_tracking.json"
KERNELS = H200 / "kernels_heads.json"
LOOP = H200 / "kernels_loop.json"
OWN_CELL = H200 / "options.json"
STEPS = H200 / "language_model.json"
TRAINED = H200 / "loss_curves.json"
GENERATION = H200 / "generation.json"
LAYERS = H200 / "layers.json"

_FLASHRNN, _CUDNN = "flashrnn_1.0.8", "cudnn_fp16"
_LLAMA = "Llama of transformers"
_HEADS = Case("lstm", 12, 64, 16)
_ONE_HEAD = Case("lstm", 1, HIDDEN, 16)


def _read(file: Path) -> dict:
    return json.loads(file.read_text())


def _training_ms(file: Path, case: Case, implementation: str) -> float:
    return milliseconds(by_job(_read(file)["rows"])[Job(case, TRAINING)][implementation])


def factor() -> str:
    """Return the sentence that compares the LSTM with a loop in PyTorch, and the README's cell with the LSTM."""
    own = {
        case_of(row).N: row["over"]["ms"]
        for row in _read(OWN_CELL)["rows"]
        if row["variant"] == "own cell" and row["mode"] == TRAINING
    }
    mine, loop = _training_ms(KERNELS, _HEADS, OURS), _training_ms(LOOP, _HEADS, "pytorch_loop")
    sizes = f"batch {_HEADS.B}, {_HEADS.T} steps, bfloat16"
    return (
        f"On an H200 the LSTM with 12 heads of 64 is **{loop / mine:.0f} times as fast as the same loop in PyTorch**:\n"
        f"{mine:.2f} ms instead of {loop:.0f} ms for forward and backward ({sizes};\n"
        f"the loop was timed in an earlier run). The cell above takes {own[12]:.2f} times as long as the\n"
        f"built-in LSTM ({own[1]:.2f} times with one head of {HIDDEN})."
    )


def layers() -> str:
    """Return the sentence that compares layers with PyTorch's."""
    ratios = [row["ratio"] for row in _read(LAYERS)["rows"] if "ratio" in row]
    return (
        f"On an H200, LSTMs and GRUs are {median(ratios):.1f} times as fast as PyTorch's, the median of {len(ratios)} "
        "comparisons:\n[find your shape](docs/results/h200/layers.md)."
    )


def results() -> Table:
    """Return the README's table: measurements of this project, each next to that of the peer it is compared with."""
    table = [["measurement", "this project", "compared with", "speed-up"]]
    tracked = finished(_read(STATE_TRACKING)["runs"])
    table.append(_solved_tasks(tracked))
    for case, peer, name in ((_HEADS, _FLASHRNN, "FlashRNN 1.0.8"), (_ONE_HEAD, _CUDNN, "nn.LSTM, float16")):
        mine, others = (_training_ms(KERNELS, case, implementation) for implementation in (OURS, peer))
        what = f"LSTM, {case.N} head{'s' * (case.N > 1)} of {case.D}, batch {case.B}"
        table.append([what, f"{mine:.2f} ms", f"{name}: {others:.2f} ms", f"{others / mine:.1f}"])
    table += [_step(), _perplexity(), _token()]
    return table


def _solved_tasks(runs: list[dict]) -> list[str]:
    """Return the row with the number of tasks that the LSTM and the Transformer solve beyond the training lengths."""
    tasks = set.intersection(
        *({run["data"] for run in finished(runs, model=model)} for model in ("lstm", "transformer"))
    )

    def said(model: str) -> str:
        return f"{sum(mean_extrapolated(runs, data=task, model=model) > 0.99 for task in tasks)} of {len(tasks)}"

    what = "state-tracking tasks with an accuracy above 0.99 at lengths of 40 to 512, trained on up to 40"
    return [what, f"LSTM: {said('lstm')}", f"Transformer: {said('transformer')}", ""]


def _step() -> list[str]:
    steps = {row["model"]: row["ms"] for row in _read(STEPS)["rows"] if row["batch_size"] == 32}
    lstm, transformer = steps["model=lstm model.num_heads=12"], steps["model=transformer"]
    what = "training step, language model of 160 M parameters, 32 × 1024 tokens"
    return [what, f"LSTM: {lstm:.1f} ms", f"Transformer: {transformer:.1f} ms", f"{transformer / lstm:.2f}"]


def _perplexity() -> list[str]:
    trained = _read(TRAINED)
    slstm, lstm, attention = (
        next(row for row in paper("language_model") if (row["model"], row["heads"]) == (model, 12))
        for model in ("slstm", "lstm", "transformer")
    )
    found = [ours(trained["runs"], row)["perplexity"] for row in (slstm, lstm, attention)]
    what = "perplexity of such a model after 30 M tokens of Python source code, one seed"
    return [what, f"sLSTM: {found[0]:.1f}, LSTM: {found[1]:.1f}", f"Transformer: {found[2]:.1f}", ""]


def _token() -> list[str]:
    """Return the row with the time of one token at the longest context at which Llama was measured."""
    alone = [row for row in _read(GENERATION)["rows"] if row["batch"] == 1]
    ms = {(row["model"], row["context"]): row["ms_per_token"] for row in alone if "ms_per_token" in row}
    context = max(context for model, context in ms if model == _LLAMA)
    lstm, llama = ms["LSTM, 12 heads", context], ms[_LLAMA, context]
    what = f"generated token after {context:,} others, language model of 160 M parameters"
    return [what, f"LSTM: {lstm:.2f} ms", f"Llama, compiled: {llama:.2f} ms", f"{llama / lstm:.1f}"]


def page() -> str:
    """Return README.md with its measured parts updated."""
    return filled(PAGE.read_text(), {"layers": layers(), "factor": factor(), "results": markdown(results())})


if __name__ == "__main__":
    ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    PAGE.write_text(page())
    print(PAGE)
