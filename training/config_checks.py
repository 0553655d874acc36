"""Checks of a config before anything slow starts, beyond those of Hydra and Lightning."""

import sys
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, ListConfig, OmegaConf

from models.backbone import carries_state
from training.configuration import check_complete
from training.process import prepare_process
from training.schedules import Schedule, schedule_of, with_schedule


def check(config: DictConfig) -> None:
    """Configure the process, and raise ValueError if the training cannot work."""
    check_complete(config)
    if not (isinstance(config.seed, int) and 0 <= config.seed < 2**32):
        raise ValueError(f"seed={config.seed} must be an integer from 0 to {2**32 - 1}")
    prepare_process(config.threads, config.get("matmul_precision"))  # older configs lack this key
    check_trainer(config.trainer)
    check_accelerator(config.trainer)
    check_buildable(config)


def check_trainer(trainer: DictConfig) -> None:
    """Raise ValueError for settings that Lightning accepts but that do not work, or that this program sets itself."""
    for name, instead in _OURS.items():
        if name in trainer:
            raise ValueError(f"trainer.{name} is set by this program: {instead}")
    if not isinstance(trainer.max_steps, int):
        raise ValueError(f"trainer.max_steps={trainer.max_steps} must be an integer, the number of optimizer steps")
    if str(trainer.strategy).startswith(("fsdp", "deepspeed")):
        raise ValueError(f"trainer.strategy={trainer.strategy}: to shard the weights, use trainer=fsdp_8 (FSDP2)")
    if str(trainer.strategy).endswith(("spawn", "fork", "notebook")):
        raise ValueError(
            f"trainer.strategy={trainer.strategy}: results would be lost with the processes it starts; use ddp, "
            "which also starts one process per device"
        )
    if trainer.val_check_interval <= 0:
        raise ValueError(f"val_every gives {trainer.val_check_interval} batches between validations: set at least 1")
    every, clip = trainer.log_every_n_steps, trainer.gradient_clip_val
    if not (isinstance(every, int) and every > 0):
        raise ValueError(f"trainer.log_every_n_steps={every} must be a positive integer")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"trainer.gradient_clip_val={clip} must be a positive number, or null for no clipping")
    check_evaluation(trainer)
    check_precision(trainer)


def check_accelerator(trainer: DictConfig) -> None:
    """Raise ValueError for a training on GPUs if there is none."""
    if trainer.accelerator in ("gpu", "cuda") and not torch.accelerator.is_available():
        raise ValueError(
            f"trainer.accelerator={trainer.accelerator}, but PyTorch finds no GPU (python -m flashrnn doctor "
            "shows why); trainer=single also trains on a CPU"
        )


_OURS = {
    "default_root_dir": "hydra.run.dir=... sets the folder of a run",
    "callbacks": "+callbacks.NAME._target_=... adds a callback",
    "logger": "the config group logger chooses it",
    "plugins": "it needs its own to write checkpoints",
    "use_distributed_sampler": "the DataModule states whether it distributes its samples itself",
    "overfit_batches": "the data draw their own batches; for a quick test, use trainer.max_steps=20 val_every=10",
}


def check_evaluation(trainer: DictConfig) -> None:
    """Raise ValueError if nothing would be evaluated."""
    for name in ("limit_val_batches", "limit_test_batches"):
        if trainer.get(name) == 0:
            raise ValueError(f"trainer.{name}=0: a run ends with an evaluation; val_every sets the steps in between")


def check_precision(trainer: DictConfig) -> None:
    """Raise ValueError for float16 on a CPU, and for bfloat16 on a GPU that only emulates it."""
    precision = str(trainer.precision)
    on_cpu = trainer.accelerator == "cpu" or not torch.accelerator.is_available()
    if precision.startswith("16") and on_cpu:
        raise ValueError(f"trainer.precision={precision} needs a GPU; on a CPU use bf16-mixed or 32-true")
    on_gpu = not on_cpu and torch.cuda.is_available()
    if precision.startswith("bf16") and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"trainer.precision={precision}: {torch.cuda.get_device_name()} does not support bfloat16; "
            "use 16-mixed or 32-true"
        )


def check_buildable(config: DictConfig) -> None:
    """Raise for impossible sizes, unknown settings of the optimizer, and resets or states that the model cannot use.

    To find these, model and optimizer are built on the meta device.
    """
    asked = config.model.vocab_size
    sized = OmegaConf.merge(config, {"model": {"vocab_size": 1 if asked is None else asked}})  # null: that of the data
    import_targets([sized.model, sized.optim])
    try:
        with torch.device("meta"):
            model = instantiate(sized.model)
    except InstantiationException as error:
        if isinstance(error.__cause__, RuntimeError):  # some part reads values, which tensors on the meta device lack
            return
        raise
    check_optimizer(sized.optim, schedule_of(sized.get("schedule")), model)
    without = [part for part in model.modules() if not getattr(part, "trains_with_resets", True)]
    if config.data.get("reset_at_documents") and without:
        raise ValueError(
            f"data.reset_at_documents=true: {type(without[0]).__name__} cannot be trained with resets; set it to false"
        )
    if config.data.get("stateful"):
        _check_states(model)
    _warn_of_float16(model, config.trainer)


def _check_states(model: Any) -> None:
    """Raise ValueError if the model cannot be trained with states; print which mixers carry no state."""
    if without := [part for part in model.modules() if not getattr(part, "trains_with_states", True)]:
        raise ValueError(
            f"data.stateful=true: {type(without[0]).__name__} cannot be trained with states; set it to false"
        )
    if nothing := {type(part).__name__ for part in model.modules() if not carries_state(part)}:
        text = f"data.stateful=true: {', '.join(sorted(nothing))} carries nothing from one batch to the next"
        rank_zero_only(print)(f"{text}, and sees at most data.context_length tokens", file=sys.stderr)


def import_targets(section: Any) -> None:
    """Import all classes that a config names.

    If a module were first imported on the meta device, tensors among its constants would have no values.
    """
    if isinstance(section, DictConfig) and section.get("_target_"):
        try:
            get_object(section._target_)
        except ImportError as error:
            raise ValueError(f"_target_={section._target_}: {str(error).splitlines()[-1]}") from error
    if isinstance(section, DictConfig | ListConfig | list):
        for part in section.values() if isinstance(section, DictConfig) else section:
            import_targets(part)


def check_optimizer(optim: DictConfig, schedule: Schedule | None, model: Any) -> None:
    """Raise ValueError for settings that the optimizer does not accept; experiments set some for AdamW."""
    try:
        configured = instantiate(optim)(model, fused=False)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(
            f"optim: {error}; experiments set keys for AdamW: remove them with ~optim.KEY, or write a function that "
            "accepts **others (docs/training.md has an example)"
        ) from error
    with_schedule(configured, schedule)


def _warn_of_float16(model: Any, trainer: DictConfig) -> None:
    """Warn if PyTorch's autocast would run cuDNN's recurrent networks in float16 instead of bfloat16."""
    on_gpu = trainer.accelerator != "cpu" and torch.cuda.is_available()
    if on_gpu and trainer.precision == "bf16-mixed" and any(isinstance(m, torch.nn.RNNBase) for m in model.modules()):
        text = (
            "warning: with trainer.precision=bf16-mixed, PyTorch still computes torch.nn.LSTM in float16 on a GPU, but "
            "without loss scaling, so that small gradients vanish; use trainer.precision=16-mixed (docs/training.md)"
        )
        rank_zero_only(print)(text, file=sys.stderr)
