"""Configs that compose and still cannot work, told before anything slow begins."""

import os
import sys
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: expected a number from 0 to {2**32 - 1}")


def check_trainer(trainer: DictConfig) -> None:
    """Raise for what Lightning takes and does badly: float16 on a CPU, bfloat16 that a GPU emulates, its old FSDP; and
    for what it refuses without naming a key of ours."""
    import torch

    precision, accelerator = str(trainer.precision), trainer.accelerator
    if str(trainer.strategy).startswith(("fsdp", "deepspeed")):
        raise ValueError(f"trainer.strategy={trainer.strategy}: to share weights out, take trainer=fsdp_8 (FSDP2)")
    if str(trainer.strategy).endswith(("spawn", "fork", "notebook")):
        raise ValueError(
            f"trainer.strategy={trainer.strategy}: results would stay in the processes it starts; take ddp, "
            "which starts processes too"
        )
    if accelerator in ("gpu", "cuda") and not torch.accelerator.is_available():
        raise ValueError(
            f"trainer.accelerator={accelerator}: PyTorch sees no GPU (python -m flashrnn doctor shows why); "
            "trainer=single takes what there is"
        )
    check_devices(trainer.devices, on_cpu=accelerator == "cpu" or not torch.accelerator.is_available())
    if trainer.val_check_interval <= 0:
        raise ValueError(f"val_every makes {trainer.val_check_interval} batches between validations: set at least 1")
    if trainer.log_every_n_steps is not None and trainer.log_every_n_steps < 1:
        raise ValueError(
            f"trainer.log_every_n_steps={trainer.log_every_n_steps} must be at least 1; logger=none logs nothing"
        )
    if trainer.get("overfit_batches"):
        raise ValueError(
            f"trainer.overfit_batches={trainer.overfit_batches}: the data modules draw their own batches; for a quick "
            "try, trainer.max_steps=20 val_every=10"
        )
    check_evaluation(trainer)
    for name, instead in _OURS.items():
        if name in trainer:
            raise ValueError(f"trainer.{name} is set by this program: {instead}")
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_val <= 0:
        raise ValueError(f"trainer.gradient_clip_val={trainer.gradient_clip_val} must be positive; null: no clipping")
    on_gpu = accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    if precision.startswith("16") and (accelerator == "cpu" or not torch.accelerator.is_available()):
        raise ValueError(f"trainer.precision={precision} needs a GPU; on a CPU it is bf16-mixed or 32-true")
    if precision.startswith("bf16") and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"trainer.precision={precision}: {torch.cuda.get_device_name()} has no bfloat16; "
            "expected 16-mixed or 32-true there"
        )


def check_sweep(trainer: DictConfig) -> None:
    """Raise where Lightning would start more processes: each would go through the whole sweep by itself."""
    import torch
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    devices, on_cpu = trainer.devices, trainer.accelerator == "cpu"
    if devices in ("auto", -1, "-1"):
        devices = 1 if on_cpu else torch.accelerator.device_count()
    number = len(devices) if OmegaConf.is_config(devices) else int(devices)
    if number * trainer.num_nodes > 1 and not (SLURMEnvironment.detect() or TorchElasticEnvironment.detect()):
        raise ValueError(
            f"trainer.devices={trainer.devices} in a sweep (-m): Lightning starts the other processes with the command "
            "of the whole sweep; start the jobs one by one, or set trainer.devices=1"
        )


_OURS = {
    "default_root_dir": "hydra.run.dir=... is the folder of a run",
    "callbacks": "+callbacks.NAME._target_=... adds one",
    "logger": "the group logger chooses it",
    "plugins": "it writes checkpoints with its own",
    "profiler": "it measures the waiting for data with its own",
}


def check_evaluation(trainer: DictConfig) -> None:
    """Raise where nothing would be evaluated."""
    for name in ("limit_val_batches", "limit_test_batches"):
        if trainer.get(name) == 0:
            raise ValueError(f"trainer.{name}=0: a run ends with an evaluation; val_every says how often before")


def check_devices(devices: Any, on_cpu: bool) -> None:
    """Raise for more GPUs than there are, which Lightning would after reading the data; warn of too few CPU cores."""
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    there = len(os.sched_getaffinity(0)) if on_cpu else torch.accelerator.device_count()
    if not isinstance(devices, int) or devices <= there:  # Lightning's other ways to say it, such as auto
        return
    if on_cpu:
        text = f"warning: trainer.devices={devices} processes share {there} CPU cores: more than {there} are no faster"
        rank_zero_only(print)(text, file=sys.stderr)
        return
    raise ValueError(
        f"trainer.devices={devices}, but PyTorch sees {there} GPU(s) here (CUDA_VISIBLE_DEVICES may hide some): "
        f"set trainer.devices={there} or less (it counts per node); with global_batch_size set, the steps stay the same"
    )


def check_nulls(name: str, section: DictConfig | ListConfig) -> None:
    """Raise for a null where what the section builds takes none by its type hints; so in the sections below. Imports
    all that they name."""
    in_list = isinstance(section, ListConfig)
    hints = {} if in_list or "_target_" not in section else _hints(section._target_)
    for key, value in enumerate(section) if in_list else section.items():
        hint = hints.get(key, Any)
        if OmegaConf.is_config(value):
            check_nulls(f"{name}.{key}", value)
        elif value is None and hint is not Any and type(None) not in get_args(hint):
            raise ValueError(f"{name}.{key}=null: expected a value of type {getattr(hint, '__name__', hint)}")


def _hints(target: str) -> dict[str, Any]:
    """The type hints of what a _target_ names."""
    from hydra.utils import get_object

    try:
        found = get_object(target)
    except ImportError as error:
        raise ValueError(f"_target_={target}: {str(error).splitlines()[-1]}") from error
    try:
        return get_type_hints(found.__init__ if isinstance(found, type) else found)
    except (NameError, TypeError):  # names that are there for type checkers alone; objects that have none
        return {}


def check_buildable(config: DictConfig) -> None:
    """Raise for sizes that no model can have, settings that no optimizer takes, and resets where the model has none:
    both are built, without memory, so that nobody waits for data first."""
    import torch
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    asked = config.model.vocab_size
    sized = OmegaConf.merge(config, {"model": {"vocab_size": 1 if asked is None else asked}})  # null: that of the data
    for name in ("model", "data", "optim", "trainer"):  # imported on the meta device, modules would have no constants
        check_nulls(name, sized[name])
    try:
        with torch.device("meta"):
            model = instantiate(sized.model)
    except InstantiationException as error:
        if isinstance(error.__cause__, RuntimeError):  # some part wants numbers, and is built when they are there
            return
        raise
    check_optimizer(sized.optim, model)
    without = [part for part in model.modules() if not getattr(part, "trains_with_resets", True)]
    if config.data.get("reset_at_documents") and without:
        raise ValueError(
            f"data.reset_at_documents=true: {type(without[0]).__name__} cannot be trained with resets; set it to false"
        )
    _warn_of_float16(model, config.trainer)


def check_optimizer(optim: DictConfig, model: Any) -> None:
    """Raise for settings that no optimizer takes, those of an experiment too, which are for AdamW."""
    from hydra.utils import instantiate

    try:
        instantiate(optim)(model, fused=False)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(
            f"optim: {error}; experiments set keys for AdamW: ~optim.KEY removes one, and a function with **others "
            "takes all (docs/training.md has an example)"
        ) from error


def check_callbacks(callbacks: DictConfig) -> None:
    """Raise for one without a class, whose name Hydra's own message would leave out."""
    for name, callback in callbacks.items():
        if not (OmegaConf.is_config(callback) and "_target_" in callback):
            raise ValueError(
                f"callbacks.{name}={callback}: expected its class, +callbacks.{name}._target_=module.Class"
            )


def _warn_of_float16(model: Any, trainer: DictConfig) -> None:
    """PyTorch's autocast runs cuDNN's recurrent networks in float16, also where it was asked for bfloat16."""
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    on_gpu = trainer.accelerator != "cpu" and torch.cuda.is_available()
    if on_gpu and trainer.precision == "bf16-mixed" and any(isinstance(m, torch.nn.RNNBase) for m in model.modules()):
        text = (
            "warning: trainer.precision=bf16-mixed: on a GPU PyTorch computes torch.nn.LSTM in float16 all the same, "
            "and no loss is scaled, so that small gradients vanish; trainer.precision=16-mixed does (docs/training.md)"
        )
        rank_zero_only(print)(text, file=sys.stderr)
