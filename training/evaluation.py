"""Evaluation of a run at its end, and of a checkpoint."""

import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from models.quantization import check_weights, quantize
from training import checkpoint, data_interface, results
from training.build import Run
from training.config_checks import check_evaluation
from training.configuration import check_kinds, chooses_backend, leaves
from training.lightning_module import TrainingModule
from training.process import prepare_process
from training.resume import check_unseen

_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
_NOT_READ = {
    "seed": "data.seed draws other sequences",
    "data.tokenizer": "a model keeps the tokenizer that it was trained with",
    "name": "a run keeps its name",
    "compile": "it is for training",
    **{f"trainer.{key}": "an evaluation runs on one device" for key in _ONE_DEVICE},
}
_OF_TRAINING = (
    "optim.",
    "schedule.",
    "samples",
    "metric",
    "checkpoint.",
    "logger",
    "callbacks",
    "val_every",
    "global_batch_size",
    "trainer.max_",
)


def evaluate(ckpt: str, changes: DictConfig | dict[str, Any], weights: str = "float") -> dict:
    """Evaluate a checkpoint, and write the results to a new folder in that of its run.

    Args:
        ckpt: a file or folder, see `checkpoint.find`.
        changes: new values for existing keys of the run's config.
        weights: "float", or "int8" to quantize linear layers with `models.quantization.quantize`.

    Returns:
        The result of the data's evaluation.
    """
    check_weights(weights)
    plain = OmegaConf.to_container(OmegaConf.create(changes))
    changed = {key.removeprefix("."): value for key, value in leaves(plain, "").items()}
    _check_read(changed)
    file = checkpoint.find(ckpt)
    content = checkpoint.load(file)
    check_kinds(changed, OmegaConf.create(content["config"]))
    config = changed_config(content["config"], changes)
    check_unseen(content, config)
    prepare_process(config.threads, config.get("matmul_precision"))  # older configs lack this key
    check_evaluation(config.trainer)
    data = instantiate(config.data)
    data_interface.check_evaluation_of(data, changed)
    data_interface.take_tokenizer(data, checkpoint.tokenizer_folder(file))
    module = TrainingModule(instantiate(config.model))
    checkpoint.load_weights(module, file, content)
    if weights == "int8":
        quantize(module.model)
    folder = (checkpoint.run_folder(file) or file.parent) / f"evaluate_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    here = {"default_root_dir": folder, "logger": False, "enable_checkpointing": False}
    here["enable_progress_bar"] = config.trainer.enable_progress_bar and sys.stdout.isatty()
    trainer = instantiate(config.trainer, **_ONE_DEVICE, **here)
    result = data_interface.evaluate(data, trainer, module)
    places = results.save(folder, result, config, trainer.strategy.root_device, step=content["global_step"])
    results.show(result, {"checkpoint": file, **places})
    return result


def evaluate_run(run: Run, config: DictConfig, step: int, start: float) -> dict:
    """Evaluate a run after its training, and write the results to its folder.

    Args:
        run: the run at the end of its training.
        config: the config of the run.
        step: the last optimizer step.
        start: the time.perf_counter() at the start of the run, in seconds.

    Returns:
        The result of the data's evaluation.
    """
    result = data_interface.evaluate(run.data, run.trainer, run.module)
    if run.trainer.is_global_zero:
        parameters = sum(parameter.numel() for parameter in run.module.model.parameters())
        made = {"parameters": parameters, "step": step, "devices": run.trainer.world_size}
        folder, seconds = Path(config.run_dir), time.perf_counter() - start  # includes loading libraries and data
        places = results.save(folder, result, config, run.trainer.strategy.root_device, **made, seconds=seconds)
        results.show(result, {"checkpoint": checkpoint.find(config.run_dir), "logs": folder, **places})
    return result


def changed_config(saved: dict, changes: DictConfig | dict[str, Any]) -> DictConfig:
    """Return the saved config with changes; changes of keys that it does not have are an error."""
    config = OmegaConf.create(saved)
    OmegaConf.set_struct(config, True)
    return OmegaConf.merge(config, {"trainer": {"accelerator": "auto"}}, changes)


def _check_read(changed: Iterable[str]) -> None:
    for key in changed:
        reason = "it is for training" if key.startswith(_OF_TRAINING) else _NOT_READ.get(key)
        if reason:
            raise ValueError(f"{key} would change nothing: {reason}")
        if key.startswith("model.") and not chooses_backend(key):
            raise ValueError(f"{key}: the model of a checkpoint cannot be changed")
