"""Builds data, model and trainer from a config."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from hydra.utils import get_object, instantiate
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from omegaconf import DictConfig
from torch import Tensor

from models.backbone import SequenceModel
from training import callbacks, checkpoint, launchers
from training.config_checks import check
from training.data_interface import check_metric, take_tokenizer
from training.graceful_stop import GracefulStop
from training.lightning_module import TrainingModule
from training.resume import Resumed
from training.schedules import schedule_of
from training.screen import Lines, progress_bar, show_model


class Run(NamedTuple):
    """Everything that a training needs, ready to start."""

    trainer: Trainer
    module: TrainingModule
    data: LightningDataModule


def build(config: DictConfig, resumed: Resumed | None = None) -> Run:
    """Return the run of a config; the seed of the config determines all random values.

    Values that the config leaves open are set in it: sizes of the model, and an id for wandb.
    """
    check(config)
    seed_everything(config.seed, verbose=False)
    data = instantiate(config.data)
    check_metric(data, config.metric)
    start = None if resumed or config.init_from is None else checkpoint.find(config.init_from)
    before = resumed.file if resumed else start
    take_tokenizer(data, before and checkpoint.tokenizer_folder(before))
    name_wandb_run(config.logger, resumed.content["config"]["logger"] if resumed else {})
    # Before the data, whose preparation may take hours, because Lightning and the callbacks report mistakes here.
    trainer = build_trainer(config)
    data.prepare_data()
    data.setup("fit")
    fit_model_to_data(config.model, data)
    if config.compile:
        torch.compiler.reset()  # PyTorch recompiles a function only a few times, and a sweep has many models
    model, weights = build_model(config, start, isinstance(trainer.strategy, ModelParallelStrategy))
    model.checkpoint_blocks = config.activation_checkpointing
    schedule = schedule_of(config.get("schedule"))
    module = TrainingModule(model, instantiate(config.optim), schedule, config.compile, weights)
    show_model(model)
    return Run(trainer, module, data)


def build_model(
    config: DictConfig, start: Path | None, sharded: bool
) -> tuple[SequenceModel, Callable[[], Mapping[str, Tensor]] | None]:
    """Return a model with its initial weights, and None.

    A model that will be sharded is on the meta device. The second result is then a function that returns the initial
    weights on the CPU, to be called by one process.

    Args:
        config: the config of the run.
        start: a checkpoint or export with initial weights; None means random weights.
        sharded: whether the weights will be sharded over devices.
    """
    random_state = torch.get_rng_state()

    def whole() -> SequenceModel:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)
            model = instantiate(config.model)
        if start:
            checkpoint.load_initial_weights(model, start)
        return model

    if not sharded:
        return whole(), None
    with torch.device("meta"):
        return instantiate(config.model), lambda: whole().state_dict()


def name_wandb_run(loggers: DictConfig, before: Mapping) -> None:
    """Set the id of the wandb run in the config: that of the resumed run, or a new one. Checkpoints store the config.

    Args:
        loggers: the loggers of the config, by name.
        before: the loggers of the resumed run, by name; empty for a new run.
    """
    if "wandb" in loggers:
        loggers.wandb.id = loggers.wandb.id or before.get("wandb", {}).get("id") or secrets.token_hex(4)


def build_loggers(loggers: DictConfig) -> list[Logger]:
    """Return the loggers of a config."""
    if "_target_" in loggers:
        raise ValueError(f"logger._target_={loggers._target_}: give the logger a name, as in logger.mine._target_=...")
    return [instantiate(logger) for logger in loggers.values()]


def fit_model_to_data(model: DictConfig, data: LightningDataModule) -> None:
    """Set the vocabulary and output sizes that the config leaves open to those of the data."""
    for key in ("vocab_size", "num_classes"):
        needed = getattr(data, key, None)
        model[key] = needed if model[key] is None else model[key]
        if model[key] is None:
            raise ValueError(f"model.{key} is null, and {type(data).__name__} has no {key}: set one of them")
        if needed is not None and model[key] < needed:
            raise ValueError(f"model.{key}={model[key]} is less than the {needed} of the data; null means that number")


def build_trainer(config: DictConfig) -> Trainer:
    """Return the Trainer of a config with its callbacks."""
    ends = [GracefulStop(), callbacks.RunRecord(config)]  # in this order: RunRecord reports the signal
    samples = [callbacks.TextSamples(config.run_dir)] if config.samples else []
    reports = [*samples, callbacks.StepStatistics()]  # in this order: generating samples is not training time
    hooks = [instantiate(config.checkpoint), *ends, *reports]
    hooks += [instantiate(callback) for callback in config.callbacks.values()]
    distributes_itself = getattr(get_object(config.data._target_), "distributes_itself", False)
    loggers = build_loggers(config.logger)
    if bar := progress_bar(config.trainer.enable_progress_bar, hooks):
        hooks += [bar] * (bar not in hooks)
    else:
        loggers.append(Lines(config.run_dir, config.trainer.max_steps))
    return instantiate(
        config.trainer,
        default_root_dir=config.run_dir,
        logger=loggers,
        callbacks=hooks,
        enable_progress_bar=bar is not None,
        use_distributed_sampler=not distributes_itself,
        plugins=[checkpoint.AtomicCheckpointIO(), *launchers.environments()],
    )
