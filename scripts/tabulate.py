"""Put the evaluations of one `scripts.train -m` run side by side, as data and as a table.

    python -m scripts.tabulate outputs/parity/<time> docs/results/NAME

writes docs/results/NAME.json and NAME.md.
"""

import json
import sys
from pathlib import Path

import yaml

from scripts.config import one_line_errors


def collect(sweep: Path) -> dict:
    """The eval.json of every job, with the command that ran them."""
    files = sorted(sweep.glob("*/eval.json"), key=lambda file: int(file.parent.name.partition("_")[0]))
    if not files:
        raise FileNotFoundError(f"there is no */eval.json in {sweep}: expected the folder of a finished -m run")
    overrides = yaml.safe_load((sweep / "multirun.yaml").read_text())["hydra"]["overrides"]["task"]
    runs = []
    for file in files:
        run = json.loads(file.read_text())
        seed = run.pop("config")["seed"]  # the rest of the config is said by the command and the commit
        runs.append({"model": file.parent.name.partition("_")[2], "seed": seed, **run})
    return {"command": " ".join(["python -m scripts.train -m", *overrides]), "runs": runs}


def markdown(content: dict, data: str) -> str:
    """Accuracy per model and range of lengths."""
    runs = content["runs"]
    ranges = [f"{low}-{high}" for low, high in (part["lengths"] for part in runs[0]["ranges"])]
    header = ["model", "parameters", "seed", *ranges, "chance", "seconds"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for run in runs:
        accuracies = [f"{part['accuracy']:.4f}" for part in run["ranges"]]
        sizes = [f"{run['parameters']:,}", str(run["seed"])]
        rows.append([run["model"], *sizes, *accuracies, f"{run['chance']:.2f}", f"{run['seconds']:.0f}"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    first, last = runs[0]["training_lengths"]
    environment = ", ".join(f"{key} {value}" for key, value in runs[0]["environment"].items())
    return f"""# {runs[0]["task"].capitalize()}: trained on lengths {first}-{last}, evaluated beyond

    {content["command"]}

Accuracy of the label at the last position of a sequence, {runs[0]["ranges"][0]["sequences"]} sequences per range.
`seconds` is the whole job: training and evaluation, and for the first one loading the libraries.

{table}

{environment}. Data: [{data}]({data}), written with this page by `scripts/tabulate.py`.
"""


def main(sweep: str, target: str) -> None:
    """Write `target`.json and `target`.md."""
    content = collect(Path(sweep))
    data = Path(target).with_suffix(".json")
    data.write_text(json.dumps(content, indent=1) + "\n")
    data.with_suffix(".md").write_text(markdown(content, data.name))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with one_line_errors():
        main(*sys.argv[1:])
