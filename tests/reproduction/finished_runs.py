"""Folders of finished runs of scripts.train, and the tables of pages made from them."""

import json

import yaml

from reproduction.runs import LOG


def leave_run(folder, model="lstm", data="parity", seed=0, accuracies=(1.0, 0.5), chance=0.5, step=250, fitted=1.0):
    """Write the files of a run of scripts.train; without `accuracies`, those of a failed run."""
    (folder / ".hydra").mkdir(parents=True)
    choices = {"model": model, "data": data, "experiment": "parity"}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"model={model}", "ckpt_path=x"]))
    if accuracies is None:
        (folder / LOG).write_text("step 1\nerror: out of memory\n(HYDRA_FULL_ERROR=1 shows where)\n")
        return
    lengths = [[40, 63], [64, 255]]
    evaluation = {
        "task": data,
        "chance": chance,
        "parameters": 1234,
        "step": step,
        "devices": 1,
        "training_lengths": [1, 40],
        "environment": {"commit": "abc", "device": "a CPU"},
        "in_distribution": {"lengths": [1, 40], "accuracy": fitted, "sequences": 4},
        "ranges": [{"lengths": ab, "accuracy": a, "sequences": 4} for ab, a in zip(lengths, accuracies, strict=True)],
        "accuracy_by_length": {"40": 1.0, "41": 0.5, "250": 0.5},
        "config": {
            "seed": seed,
            "global_batch_size": None,
            "data": {"batch_size": 128},
            "model": {"num_heads": 1},
            "trainer": {"accumulate_grad_batches": 1},
        },
    }
    (folder / "eval.json").write_text(json.dumps(evaluation))
    (folder / "metrics.csv").write_text("step,train/step_time,train/tokens_per_second\n9,9,1\n19,2,50\n29,,\n39,1,60\n")


def rows(page):
    return [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("|")]
