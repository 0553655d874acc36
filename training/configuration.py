"""The folder of configs, its resolvers, and functions of composed configs."""

import re
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf

CONFIGS = str(Path(__file__).parents[1] / "configs")


def accumulate(global_batch_size: int | None, batch_size: int | None, devices: int, num_nodes: int) -> int:
    """Return the number of batches to accumulate for `global_batch_size` sequences per optimizer step."""
    if global_batch_size is None:
        return 1
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"trainer.devices={devices} must be the number of devices if global_batch_size is set")
    if batch_size is None:
        raise ValueError(
            f"global_batch_size={global_batch_size} must be a multiple of data.batch_size, which these data lack"
        )
    together = batch_size * devices * num_nodes
    if global_batch_size < 1 or global_batch_size % together:
        raise ValueError(
            f"global_batch_size={global_batch_size} must be a positive multiple of data.batch_size={batch_size} x "
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} = {together}"
        )
    return global_batch_size // together


def composed(overrides: Sequence[str], name: str = "train") -> DictConfig:
    """Return the config configs/<name>.yaml composed with these overrides."""
    in_a_command = GlobalHydra.instance().is_initialized()  # a command has initialised Hydra with the same folder
    with nullcontext() if in_a_command else initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose(name, overrides=list(overrides))


def with_values(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a composed config with other values of existing keys, given as KEY=VALUE."""
    changed = deepcopy(config)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        OmegaConf.update(changed, override.key_or_group, override.value())
    return changed


def check_complete(config: DictConfig) -> None:
    """Raise ValueError for values that are still ???. Hydra would omit them and use the defaults of arguments."""
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"{', '.join(missing)}: give a value, as in {missing[0]}=VALUE")


def check_required(config: DictConfig, name: str) -> None:
    """Raise ValueError for required keys of configs/<name>.yaml that were not given."""
    for key in config:
        if OmegaConf.is_missing(config, key):
            comment = re.search(rf"^{key}: \?\?\?  # (.*)", keys_of(name), re.MULTILINE)
            what = f": {comment[1]}" if comment else ""
            raise ValueError(f"{key}=VALUE is required{what}")


def check_kinds(given: Mapping[str, Any], usual: DictConfig) -> None:
    """Raise ValueError for strings and lists where the config has a number or a boolean.

    Later errors would not name the key, and Python takes the string "no" as true. Keys of Lightning's trainer, some of
    which accept strings and numbers, are left to Lightning.

    Args:
        given: the given values by key.
        usual: a config with the usual values of these keys.
    """
    for key, value in filter(_is_text_or_list, given.items()):
        other = OmegaConf.select(usual, key)
        if isinstance(other, int | float):
            kind = "true or false" if isinstance(other, bool) else "a number"
            raise ValueError(f"{key}={value}: expected {kind}, such as {str(other).lower()}")


def _is_text_or_list(entry: tuple[str, Any]) -> bool:
    key, value = entry
    return isinstance(value, str | list) and not key.startswith("trainer.") and "${" not in value


def config_groups() -> set[str]:
    """Return the names of the config groups of this project."""
    return {folder.name for folder in Path(CONFIGS).iterdir() if folder.is_dir()}


def check_overrides(overrides: Sequence[str], groups: Container[str], name: str = "train") -> None:
    """Check the values that a command line gives by `check_kinds`, against the config composed without them.

    Args:
        overrides: all overrides of the command.
        groups: the names of all config groups.
        name: name of the command's config file.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    values = [one for one in parsed if one.key_or_group not in groups and not one.key_or_group.startswith("hydra.")]
    given = {one.key_or_group: one.value() for one in values}
    if any(map(_is_text_or_list, given.items())):  # composing takes 0.1 s
        check_kinds(given, composed([one.input_line for one in parsed if one not in values], name))


def say_overruled(config: DictConfig, hydra: DictConfig) -> None:
    """Print which values in the file of the chosen model have been replaced by the experiment.

    Args:
        config: the composed config.
        hydra: Hydra's own config.
    """
    from lightning.pytorch.utilities import rank_zero_only

    choices = hydra.runtime.choices
    files = [Path(source.path, "model", f"{choices.model}.yaml") for source in hydra.runtime.config_sources]
    own = OmegaConf.to_container(OmegaConf.load(next(file for file in files if file.is_file())))
    given = {override.partition("=")[0] for override in hydra.overrides.task}
    for key, value in leaves(own, "model").items():
        now = OmegaConf.select(config, key)
        if key.startswith("model.defaults") or value is None or str(value).startswith(("${", "???")) or key in given:
            continue
        if now != value:
            text = f"experiment={choices.experiment} sets {key}={now}, where model={choices.model} has {value}"
            rank_zero_only(print)(f"{text}; {key}={value} on the command line overrides it")


def leaves(section: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the values of a nested config by their full keys, which begin with `name`."""
    found = {}
    for key, value in section.items():
        found |= leaves(value, f"{name}.{key}") if isinstance(value, dict) else {f"{name}.{key}": value}
    return found


def mixer_name(model: Mapping[str, Any]) -> str:
    """Return the name of a model: its pattern, its cell or its mixer."""
    if model.get("pattern"):
        return "-".join(model["pattern"])
    mixer = model["mixer"]
    return mixer.get("function") or mixer.get("_target_", "model").rpartition(".")[2]


def chooses_backend(key: str) -> bool:
    """Return whether a key sets the backend of a mixer, which does not change the model's weights."""
    return key.startswith("model.mixer.") and key.endswith(".backend")


def keys_of(name: str) -> str:
    """Return the keys of configs/<name>.yaml with their comments, for the command's help."""
    text = Path(CONFIGS, f"{name}.yaml").read_text().partition("\nhydra:\n")[0]
    text, _, defaults = text.removeprefix("# @package _global_\n").partition("defaults:\n")
    shared = keys_of(str(Path(name).with_name("base"))) if "  - base\n" in defaults else ""
    return text.rstrip("\n").replace("$", "$$") + "\n" + shared  # Hydra would substitute a single $


def help_of(group: str, option: str | None) -> str:
    """Return the keys of an option of a group. Without an option, return the group's keys and a list of its options."""
    if option is not None:
        return keys_of(f"{group}/{option}")
    return keys_of(group) + "\n".join(f"{name:<17}{title}" for name, title in titles(group).items())


def values(config: DictConfig, name: str) -> dict[str, Any]:
    """Return a config as a dictionary. A single value becomes a list where configs/<name>.yaml has a list.

    Args:
        config: the composed config of a command.
        name: name of the file with the command's keys.
    """
    keys = OmegaConf.load(Path(CONFIGS, f"{name}.yaml"))
    lists = {key for key, value in keys.items_ex(resolve=False) if isinstance(value, ListConfig)}
    found = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return {key: [value] if key in lists and not isinstance(value, list) else value for key, value in found.items()}


def groups_of(name: str) -> str:
    """Return the config groups of configs/<name>.yaml and their options, one group per line, for the command's help.

    Options in folders given by --config-dir are included.
    """
    loader = GlobalHydra.instance().config_loader()
    chosen = OmegaConf.load(Path(CONFIGS, f"{name}.yaml")).defaults
    groups = sorted(group for entry in chosen if isinstance(entry, DictConfig) for group in entry)
    return "\n".join(f"{group}: {', '.join(loader.get_group_options(group))}" for group in groups)


def titles(group: str) -> dict[str, str]:
    """Return the first comment of every option of a group, except base, by the option's name."""
    files = {path.stem: path for path in sorted(Path(CONFIGS, group).glob("*.yaml")) if path.stem != "base"}
    return {name: path.read_text().splitlines()[1].removeprefix("# ") for name, path in files.items()}


OmegaConf.register_new_resolver("accumulate", accumulate)
OmegaConf.register_new_resolver("product", lambda a, b: a * b)
OmegaConf.register_new_resolver("keys_of", keys_of)
OmegaConf.register_new_resolver("help_of", help_of)
OmegaConf.register_new_resolver("groups_of", groups_of)
