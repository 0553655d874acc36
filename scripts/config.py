"""Configs: resolvers, their way into the run folder and the checkpoint, and errors in one line."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

CONFIGS = str(Path(__file__).parents[1] / "configs")
# Lightning takes these in several types: a number, a list or "auto"; a flag or "warn"; a share or a number.
ANY_TYPE = ("trainer.devices", "trainer.deterministic", "trainer.limit_val_batches")


def accumulate(global_batch_size: int | None, batch_size: int, devices: int, num_nodes: int) -> int:
    """Batches to accumulate so that one optimizer step sees `global_batch_size` sequences."""
    if global_batch_size is None:
        return 1
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"trainer.devices={devices}: with global_batch_size set it must be the number of devices")
    together = batch_size * devices * num_nodes
    if global_batch_size < 1 or global_batch_size % together:
        raise ValueError(
            f"global_batch_size={global_batch_size} is no positive multiple of data.batch_size={batch_size} x "
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} = {together}"
        )
    return global_batch_size // together


OmegaConf.register_new_resolver("accumulate", accumulate)
OmegaConf.register_new_resolver("product", lambda a, b: a * b)


def prepare_process(threads: int | None) -> None:
    """Threads of PyTorch, and Lightning's messages cut down to warnings that a user can act on."""
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: expected at least 1, or null for one per core")
        torch.set_num_threads(threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*logs directory .* exists and is not empty")  # the run's own folder
    warnings.filterwarnings("ignore", message=".*dirpath has changed")  # a resumed run has a folder of its own
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # our batches cost next to nothing
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # between Lightning and PyTorch


def check_trainer(trainer: DictConfig) -> None:
    """Raise for what Lightning takes and does badly: float16 on a CPU, bfloat16 that a GPU emulates, its old FSDP; and
    for what it refuses without naming a key of ours."""
    import torch

    precision, accelerator = str(trainer.precision), trainer.accelerator
    if str(trainer.strategy).startswith(("fsdp", "deepspeed")):
        raise ValueError(f"trainer.strategy={trainer.strategy}: to share weights out, take trainer=fsdp_8 (FSDP2)")
    if accelerator in ("gpu", "cuda") and not torch.accelerator.is_available():
        raise ValueError(
            f"trainer.accelerator={accelerator}: PyTorch sees no GPU (python -m flashrnn doctor shows why); "
            "trainer=single takes what there is"
        )
    if trainer.val_check_interval <= 0:
        raise ValueError(f"val_every makes {trainer.val_check_interval} batches between validations: set at least 1")
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


def check_nulls(name: str, section: DictConfig) -> None:
    """Raise for a null where what the section builds takes none by its type hints; so in the sections below."""
    from hydra.utils import get_object

    hints = {}
    if "_target_" in section:
        target = get_object(section._target_)
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    for key, value in section.items():
        if isinstance(value, DictConfig):
            check_nulls(f"{name}.{key}", value)
        elif value is None and type(None) not in get_args(hint := hints.get(key, Any)) and hint is not Any:
            raise ValueError(f"{name}.{key}=null: expected a value of type {getattr(hint, '__name__', hint)}")


def check_buildable(config: DictConfig) -> None:
    """Raise for sizes that no model can have and settings that no optimizer takes: both are built, without memory, so
    that nobody waits for data first."""
    import torch
    from hydra.utils import instantiate

    vocabulary = {"vocab_size": config.model.vocab_size or 1}  # null: that of the data, which is not known yet
    sized = OmegaConf.merge(config, {"model": vocabulary})
    for name in ("model", "data", "optim", "trainer"):
        check_nulls(name, sized[name])
    with torch.device("meta"):
        model = instantiate(sized.model)
    instantiate(sized.optim)(model, fused=False)


def settings(arguments: list[str]) -> list[str]:
    """The GROUP=OPTION and KEY=VALUE arguments among those of a command line."""
    return [argument for argument in arguments if "=" in argument and not argument.startswith(("-", "+", "~"))]


def is_group(name: str) -> bool:
    """Whether an override of this name chooses an option, such as model=lstm, and sets no key."""
    return Path(CONFIGS, name).is_dir()


def overrides_of_run(arguments: list[str]) -> list[str]:
    """The arguments, behind those of the run that ckpt_path resumes if they choose no option of a group themselves."""
    given = dict(setting.split("=", 1) for setting in settings(arguments))
    if not given.get("ckpt_path") or given["ckpt_path"] == "null" or any(map(is_group, given)):
        return arguments
    from scripts import checkpoint

    file = checkpoint.find(given["ckpt_path"], given.get("name"))
    before = [o for o in checkpoint.load(file)["config"]["overrides"] if not o.startswith("ckpt_path=")]
    return [*before, *(f"ckpt_path={file}" if o.startswith("ckpt_path=") else o for o in arguments)]


def check_type(key: str, value: Any, default: Any) -> None:
    """Raise unless `value` has the type of its default; for a float an int will do, for text or null anything."""
    if key in ANY_TYPE or default is None or isinstance(default, str):
        return
    if isinstance(default, Mapping) and not isinstance(value, Mapping):
        raise ValueError(f"{key}={value}: {key} has keys of its own, set one of them: {', '.join(default)}")
    if value is None:
        value = "null"
    if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
        raise ValueError(f"{key}={value}: expected a value of type {type(default).__name__}, such as {default}")


def check_overrides(arguments: list[str], config_name: str = "train") -> None:
    """Raise ValueError for a KEY=VALUE argument whose key the config does not have, or whose value has another type;
    Hydra would not say what it has, and takes text for numbers and flags."""
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser

    groups, keys = [], {}
    for override in OverridesParser.create().parse_overrides(settings(arguments)):
        name = override.key_or_group
        if is_group(override.key_or_group):
            values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
            groups.append(f"{name}={next(iter(values))}")
        elif not name.startswith(("hydra.", "hydra/")):
            keys[name] = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    if not keys:  # composing takes a moment, and Hydra will do it again
        return
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose(config_name, overrides=groups)
    for key, values in keys.items():
        node, above = config, "the config"
        for part in key.split("."):
            if not OmegaConf.is_config(node) or part not in list(node):  # `in` misses keys that are ???
                allowed = ", ".join(map(str, node)) if OmegaConf.is_config(node) else "no keys"
                raise ValueError(f"unknown config key {key!r}: {above} has {allowed} (+{key}=... adds a key)")
            node, above = node._get_node(part), part
        default = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
        for value in values:
            null_in_section = value is None and "." in key  # check_nulls knows which of them mean something
            if not null_in_section and not str(value).startswith("${"):
                check_type(key, value, default)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with the message of an expected error alone; HYDRA_FULL_ERROR=1 shows the traceback."""
    try:
        yield
    except Exception as error:
        message = _message(error)
        if message is None or os.environ.get("HYDRA_FULL_ERROR"):
            raise
        sys.exit(f"error: {message}\n(HYDRA_FULL_ERROR=1 shows where)")


def _message(error: BaseException) -> str | None:
    """What to tell a user about an error; None if it is none of the expected kinds, so that its place matters."""
    from hydra.errors import HydraException

    kind, text = type(error).__name__, str(error)
    if isinstance(error, HydraException | OmegaConfBaseException) and error.__cause__ is not None:
        return _message(error.__cause__) or text  # Hydra wraps what a constructor raised
    if isinstance(error, InterpolationResolutionError):  # OmegaConf wraps what a resolver raised, without its cause
        return text.partition("\n")[0].rpartition("raised while resolving interpolation: ")[2]
    if kind == "OutOfMemoryError":
        return f"{text.partition('. ')[0]}: lower data.batch_size (global_batch_size keeps what a step sees)"
    if text.startswith("DataLoader worker"):
        reason = text.strip().rstrip(".")
        return f"{reason}. A process that loads data died, often for want of memory: lower data.num_workers"
    if "in DataLoader worker process" in text.partition("\n")[0]:
        return text.strip().rpartition("\n")[2].partition(": ")[2] or text
    expected = HydraException, OmegaConfBaseException, ValueError, TypeError, OSError, ArithmeticError
    return text if isinstance(error, expected) or kind == "MisconfigurationException" else None
