"""Checkpoints: found by file or folder, opened with one clear error, and complete with the config of their run."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

LAST = "last.ckpt"
OUTPUTS = Path("outputs")
EXPORTED, TRAINING = "model.safetensors", "training.json"  # of a folder of scripts.export: weights; config and step


class RunRecord(Callback):
    """Puts the config into the run's folder, checkpoints and loggers, and saves the state after the last step."""

    def __init__(self, config: DictConfig) -> None:
        self.config: dict[str, Any] = OmegaConf.to_container(config, resolve=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folder = Path(self.config["run_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(self.config), folder / "config.yaml")
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):  # it would only write a second config.yaml
                logger.log_hyperparams(self.config)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Not after trainer.fit, when the loops have moved on: a run that is resumed from there miscounts its steps.
        every = self.config["checkpoint"]["every_n_train_steps"]
        if trainer.global_step == trainer.max_steps and trainer.global_step % every:
            trainer.save_checkpoint(Path(self.config["checkpoint"]["dirpath"]) / LAST)


def find(path: str, run_name: str | None = None) -> Path:
    """The checkpoint file of `path`: a file, a folder of a run or an export, or "last", the latest of `run_name`."""
    if path == "last" and run_name:
        found = sorted(OUTPUTS.joinpath(run_name).rglob(f"checkpoints/{LAST}"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise FileNotFoundError(f"ckpt_path=last: there is no checkpoint under {OUTPUTS / run_name}")
        return found[-1]
    file = Path(path)
    if file.is_dir():
        file = file / EXPORTED if (file / EXPORTED).is_file() else file / "checkpoints" / LAST
    if not file.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {file}: expected a .ckpt file or the folder of a run")
    return file


def load(file: Path) -> dict[str, Any]:
    """The content of a checkpoint of scripts.train, on the CPU; of an exported folder what is left of it."""
    try:
        content = _load_exported(file) if file.name == EXPORTED else torch.load(file, "cpu", weights_only=True)
        if not isinstance(content, dict) or not {"config", "state_dict"} <= content.keys():
            raise ValueError("it was not written by scripts.train")
    except Exception as error:  # torch raises a different kind for each way of being damaged
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} is damaged or no checkpoint of ours: {reason}") from error
    return content


def _load_exported(file: Path) -> dict[str, Any]:
    import models.hugging_face  # noqa: F401, or transformers warns of the folder when it reads the tokenizer
    from data.tokenization import trained_size

    content = json.loads(file.with_name(TRAINING).read_text())
    data = content["config"]["data"]
    if trained_size(data["tokenizer"]) is not None:  # the corpus that it was trained on may have changed
        data["tokenizer"] = str(file.parent)
    return content | {"state_dict": load_file(file)}


def check_resumable(file: Path, config: DictConfig) -> None:
    """Raise unless the checkpoint holds the model of this config, with steps left to train."""
    content = load(file)
    saved = content["config"]["model"]
    asked = OmegaConf.to_container(config.model, resolve=True)
    if saved != asked:
        raise ValueError(f"{file} holds another model:\n  in the checkpoint: {saved}\n  in this config:    {asked}")
    if content["global_step"] >= config.trainer.max_steps:
        raise ValueError(
            f"{file} is at step {content['global_step']}, so nothing is left of trainer.max_steps="
            f"{config.trainer.max_steps}: raise it, or use scripts.evaluate"
        )
