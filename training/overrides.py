"""KEY=VALUE and GROUP=OPTION of a command line: checked against the configs, and taken over from a resumed run."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from training.configuration import CONFIGS

# Lightning takes these in several types: a number, a list or "auto"; a flag or "warn"; a share or a number.
ANY_TYPE = ("trainer.devices", "trainer.deterministic", "trainer.limit_val_batches")

_OTHER_CONFIGS = ("--config-", "-cd", "-cp", "-cn", "hydra.searchpath")  # of Hydra's


def settings(arguments: list[str]) -> list[str]:
    """The GROUP=OPTION and KEY=VALUE arguments among those of a command line."""
    return [argument for argument in arguments if "=" in argument and not argument.startswith(("-", "+", "~"))]


def is_group(name: str) -> bool:
    """Whether an override of this name chooses an option, such as model=lstm, and sets no key."""
    return Path(CONFIGS, name).is_dir()


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def overrides_of_run(arguments: list[str]) -> list[str]:
    """The arguments, behind those of the run that ckpt_path resumes if they choose no option of a group themselves."""
    given = dict(setting.split("=", 1) for setting in settings(arguments))
    if given.get("ckpt_path") == "":
        raise ValueError("ckpt_path= is empty: give the folder of a run, a checkpoint file or last; null begins anew")
    if not given.get("ckpt_path") or given["ckpt_path"] == "null" or any(map(is_group, given)):
        return arguments
    from training import checkpoint

    file = checkpoint.find(_value(given["ckpt_path"]), given.get("name"))
    again = {_key(argument) for argument in arguments if argument.startswith("+")}  # Hydra adds a key once
    before = [
        o
        for o in checkpoint.load(file)["config"]["overrides"]
        if not o.startswith("ckpt_path=") and not (o.startswith("+") and _key(o) in again)
    ]
    return [*before, *(f"ckpt_path={quoted(file)}" if o.startswith("ckpt_path=") else o for o in arguments)]


def _value(text: str) -> str:
    """What Hydra makes of a text: without quotes and escapes. A path that it reads otherwise is what it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
    return value if isinstance(value, str) else text


def quoted(value: object) -> str:
    """A value that Hydra takes as it stands, whatever characters it has; it unescapes before quotes alone."""
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), str(value))
    return f"'{escaped}'"


def check_type(key: str, value: Any, default: Any) -> None:
    """Raise unless `value` has the type of its default; for a float an int will do, for text anything but a list, for
    null anything."""
    value, default = (OmegaConf.to_container(of) if OmegaConf.is_config(of) else of for of in (value, default))
    if isinstance(default, str) and isinstance(value, list):
        raise ValueError(f"{key}={value}: expected one value, such as {default}")
    if key in ANY_TYPE or default is None or isinstance(default, str):
        return
    if isinstance(default, Mapping) and not isinstance(value, Mapping):
        raise ValueError(f"{key}={value}: {key} has keys of its own, set one of them: {', '.join(default)}")
    if value is None:
        value = "null"
    if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
        raise ValueError(f"{key}={value}: expected a value of type {type(default).__name__}, such as {default}")


def _nearest(key: str, config: DictConfig) -> str | None:
    """The key of the config that `key` is most like, as a whole or in its last part; None if there is none like it."""
    keys = [other for other in _keys(config) if not other.endswith("._target_")]  # which many have
    if found := get_close_matches(key, keys, 1, 0.8):
        return found[0]
    return next((other for other in keys if other.rpartition(".")[2] == key.rpartition(".")[2]), None)


def _keys(config: DictConfig) -> Iterator[str]:
    for part in config:
        yield part
        node = config._get_node(part)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from (f"{part}.{below}" for below in _keys(node))


def check_overrides(arguments: list[str], config_name: str = "train") -> None:
    """Raise ValueError for a KEY=VALUE argument whose key the config does not have, or whose value has another type;
    Hydra would not say what it has, and takes text for numbers and flags. With configs from elsewhere too it is left
    to Hydra."""
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ValueType

    if any(argument.startswith(_OTHER_CONFIGS) for argument in arguments):
        return
    for argument in arguments:
        if argument.startswith("~") and is_group(group := argument.lstrip("~").partition("=")[0]):
            options = ", ".join(sorted(file.stem for file in Path(CONFIGS, group).glob("*.yaml")))
            raise ValueError(f"{argument}: a run has every group of the configs; {group} is one of {options}")
        added = re.fullmatch(r"\+([^+.=@/]+)=.*", argument, re.DOTALL)
        if added and not is_group(added[1]):
            raise ValueError(f"{argument}: nothing reads a key {added[1]!r} beside those of the config")
    groups, keys = [], {}
    for override in OverridesParser.create().parse_overrides(settings(arguments)):
        name = override.key_or_group
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP:  # Hydra looks for what there is
            continue
        if is_group(name):
            values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
            groups.append(f"{name}={next(iter(values))}")
        elif not name.startswith(("hydra.", "hydra/")):
            keys[name] = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    if not keys:  # composing takes a moment, and Hydra will do it again
        return
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose(config_name, overrides=groups)
    without_experiment = OmegaConf.to_container(OmegaConf.load(Path(CONFIGS, "train.yaml")))
    for key, values in keys.items():
        node, above = config, "the config"
        for part in key.split("."):
            if not OmegaConf.is_config(node) or part not in list(node):  # `in` misses keys that are ???
                allowed = ", ".join(map(str, node) if OmegaConf.is_config(node) else []) or "no keys"
                if nearest := _nearest(key, config):
                    raise ValueError(f"unknown config key {key!r}: did you mean {nearest}? {above} has {allowed}")
                added = f" (+{key}=... adds a key)" if "." in key else ""
                raise ValueError(f"unknown config key {key!r}: {above} has {allowed}{added}")
            node, above = node._get_node(part), part
        default = node if OmegaConf.is_config(node) else node._value()
        for value in values:
            # In a section check_nulls knows which of them mean something.
            null = value is None and ("." in key or without_experiment.get(key, ...) is None)
            if not null and not str(value).startswith("${"):
                check_type(key, value, default)
