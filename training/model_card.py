"""The README.md of an exported model, with its architecture, training data, evaluation and usage."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from omegaconf import OmegaConf

from training.configuration import mixer_name
from training.provenance import commit

USAGE = """Install transformers and the wheel of FlashRNN-LM, which `pip wheel --no-deps .` builds in its clone. Then:

```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
inputs = tokenizer(["Once upon a time"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=50))[0])
```"""


def write(folder: Path, training: dict[str, Any], parameters: int, cells: Iterable[str]) -> None:
    """Write README.md into an exported folder.

    Args:
        folder: the folder.
        training: the content of its training.json.
        parameters: number of the model's parameters.
        cells: the model's cells in modules of the user, as module.name.
    """
    modules = sorted({cell.rpartition(".")[0] for cell in cells})
    imports = "".join(f"import {module}  # with the model's cell; not in this folder\n" for module in modules)
    config = training["config"]
    kind = mixer_name(config["model"])
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["flashrnn", kind, "language-model"]
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n\n# {folder.resolve().name}",
        f"A language model of {parameters:,} parameters, trained with FlashRNN-LM: a GPT-2 backbone, its mixer {kind}.",
        "## Model\n\n" + _table(_sizes(config["model"], kind, parameters)),
        "## Data and training\n\n" + _table(_training(training)),
        "## Results\n\n" + _results(training["evaluation"]),
        "## Use\n\n" + USAGE.format(imports=imports, folder=folder.resolve().name),
        f"## Configuration of the run\n\n```yaml\n{OmegaConf.to_yaml(OmegaConf.create(_of_any_machine(config)))}```",
    ]
    ModelCard("\n\n".join(parts) + "\n").save(folder / "README.md")


def _of_any_machine(config: dict[str, Any]) -> dict[str, Any]:
    """Return a run's config without paths of this machine, which do not belong in a published card."""
    return {key: value for key, value in config.items() if key not in ("run_dir", "ckpt_path", "checkpoint", "logger")}


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _sizes(model: dict[str, Any], kind: str, parameters: int) -> dict[str, Any]:
    return {
        "mixer": kind,
        "blocks": model["num_blocks"],
        "width": model["d_model"],
        "heads": model["num_heads"] or "none",
        "vocabulary": model["vocab_size"],
        "parameters": f"{parameters:,}",
    }


def _training(training: dict[str, Any]) -> dict[str, Any]:
    config, data = training["config"], training["config"]["data"]
    trained = (training["evaluation"] or {}).get("environment", {})
    return {
        "data": _source(data),
        **{key.replace("_", " "): data[key] for key in ("tokenizer", "context_length") if key in data},
        "optimizer steps": training["global_step"],
        "sequences per step": config["global_batch_size"] or f"{data.get('batch_size', '?')} per device",
        "precision": config["trainer"]["precision"],
        "commit of the evaluation": trained.get("commit") or "not known",
        "device of the evaluation": trained.get("device", "not known"),
        "commit of the export": commit() or "not known",
    }


def _source(data: dict[str, Any]) -> str:
    """Return the name of the text that a run was trained on; for a mix, all names with their weights."""
    if "sources" not in data:
        return data.get("source", data["_target_"])
    return ", ".join(f"{own['source']} (weight {own['weight']})" for own in data["sources"].values())


def _results(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return "Not evaluated: the checkpoint came without an `eval.json` of its step."
    data = evaluation["config"]["data"]
    names = {
        "perplexity": f"validation perplexity on {_source(data)}",
        "bits_per_byte": "bits per byte",
        "unigram_perplexity": "perplexity of the tokens' frequencies there",
    }
    return _table({name: f"{evaluation[key]:.5g}" for key, name in names.items() if evaluation.get(key) is not None})
