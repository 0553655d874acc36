"""Train the model of a config, then evaluate it.

    python -m scripts.train [experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...]

configs/train.yaml lists what can be set; a run writes everything to outputs/<name>/<time>.
"""

import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from training.command_line import one_line_errors, prepare_process
from training.config_checks import check_buildable, check_callbacks, check_seed, check_sweep, check_trainer
from training.configuration import CONFIGS
from training.overrides import check_overrides, overrides_of_run

if TYPE_CHECKING:
    from lightning import LightningDataModule, Trainer


def fit_model_to_data(model: DictConfig, datamodule: "LightningDataModule") -> None:
    """Set the sizes of the model's vocabulary and output that the config leaves open."""
    for key in ("vocab_size", "num_classes"):
        needed = getattr(datamodule, key)
        model[key] = needed if model[key] is None else model[key]
        if model[key] < needed:
            raise ValueError(f"model.{key}={model[key]}, but the data has {needed}; null takes that of the data")


def name_wandb_run(logger: DictConfig | None, before: Mapping | None) -> None:
    """Give a run of wandb an id that its checkpoints remember: that of the run that it resumes, or a new one."""
    if logger is not None and "id" in logger:
        logger.id = logger.id or (before or {}).get("id") or secrets.token_hex(4)


def build_trainer(config: DictConfig, samples: bool) -> "Trainer":
    """The Trainer of a config with its callbacks; with `samples`, it generates text."""
    from hydra.utils import instantiate
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar

    from training import callbacks, checkpoint

    data_wait = callbacks.DataWait()
    ends = [callbacks.GracefulStop(), callbacks.RunRecord(config)]  # the second says what signal the first has noted
    hooks = [instantiate(config.checkpoint), *ends]
    if samples:
        hooks.append(callbacks.TextSamples(config.run_dir))
    hooks.append(callbacks.StepStatistics(data_wait))  # behind the samples, which then do not count as training
    hooks += [instantiate(callback) for callback in config.callbacks.values()]
    if config.trainer.enable_progress_bar and not any(isinstance(hook, ProgressBar) for hook in hooks):
        hooks.append(TQDMProgressBar(refresh_rate=10))
    # By itself Lightning writes checkpoints of SLURM's jobs to the working folder, from which all later jobs go on.
    by_srun = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()  # torchrun may be in a job too
    slurm = [SLURMEnvironment(auto_requeue=False)] if by_srun else []
    return instantiate(
        config.trainer,
        default_root_dir=config.run_dir,
        logger=instantiate(config.logger) or False,
        callbacks=hooks,
        plugins=[checkpoint.AtomicCheckpointIO(), *slurm],
        profiler=data_wait,
    )


def train(config: DictConfig) -> dict:
    """Train and evaluate; the result of scripts.evaluate. Everything is left in config.run_dir."""
    start = time.perf_counter()
    import torch
    from hydra.utils import instantiate
    from lightning import seed_everything
    from lightning.pytorch.utilities import rank_zero_only

    from training import checkpoint, results
    from training.evaluation import evaluate
    from training.lightning_module import TrainingModule

    prepare_process(config.threads)
    check_seed(config.seed)
    check_trainer(config.trainer)
    check_callbacks(config.callbacks)
    check_buildable(config)
    resume, folder = config.ckpt_path and checkpoint.find(config.ckpt_path, config.name), Path(config.run_dir)
    checkpoint.check_folder(folder, resume or None)
    saved = checkpoint.load(resume) if resume else {"config": {}}
    if resume:
        checkpoint.check_data(resume, saved, config)
        checkpoint.check_tokenizer(resume, saved, config)
        checkpoint.check_unseen(saved, config)
    seed_everything(config.seed, verbose=False)
    datamodule = instantiate(config.data)
    if resume and (tokenizer := checkpoint.tokenizer_folder(resume)):
        datamodule.take_tokenizer(tokenizer)
    name_wandb_run(config.logger, saved["config"].get("logger"))
    # Before the data, which may take hours to prepare: this raises for what Lightning and the callbacks refuse.
    trainer = build_trainer(config, samples=hasattr(datamodule, "tokenizer"))
    datamodule.prepare_data()
    datamodule.setup("fit")
    fit_model_to_data(config.model, datamodule)
    steps_left = True
    if resume:
        steps_left = checkpoint.check_resumable(resume, saved, config)
        rank_zero_only(print)(f"resuming from {resume}")

    if config.compile:
        torch.compiler.reset()  # the jobs of a sweep are one function of many models, and PyTorch compiles it for few
    module = TrainingModule(instantiate(config.model), instantiate(config.optim), compile=config.compile)
    if steps_left:
        trainer.fit(module, datamodule=datamodule, ckpt_path=resume or None, weights_only=True)
        step = trainer.global_step
    else:  # the run ended between training and the end of its evaluation
        trainer.logger, step = None, saved["global_step"]
        checkpoint.load_weights(module, resume, saved)
    result = evaluate(trainer, module, datamodule)
    if trainer.is_global_zero:
        parameters = sum(parameter.numel() for parameter in module.model.parameters())
        seconds = time.perf_counter() - start  # with loading libraries and data, training, evaluation
        made = {"parameters": parameters, "step": step, "devices": trainer.world_size}
        places = results.save(folder, result, config, trainer.strategy.root_device, **made, seconds=seconds)
        results.show(result, {"checkpoint": checkpoint.find(config.run_dir), "logs": folder, **places})
    return result


@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
def main(config: DictConfig) -> None:
    config.overrides = list(HydraConfig.get().overrides.task)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    with one_line_errors(" ".join(config.overrides) if in_sweep else None):
        if in_sweep:
            check_sweep(config.trainer)
        train(config)


if __name__ == "__main__":
    with one_line_errors():
        sys.argv[1:] = overrides_of_run(sys.argv[1:])
        check_overrides(sys.argv[1:])
    main()
