"""KEY=VALUE arguments of a command, whose keys and defaults are a flat file in configs/."""

import sys
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from training.configuration import CONFIGS
from training.overrides import check_type

MISSING = "???"


def read(name: str, documentation: str) -> dict[str, Any]:
    """The keys of configs/<name>.yaml with what sys.argv says; --help shows the file and ends the program."""
    file = Path(CONFIGS, f"{name}.yaml")
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{documentation}\n{file.read_text()}", end="")
        sys.exit()
    return parse(yaml.safe_load(file.read_text()), sys.argv[1:])


def parse(defaults: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The defaults with KEY=VALUE arguments. Where the default is a string, VALUE is taken as it is, else as YAML."""
    config = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in defaults:
            raise ValueError(f"{argument!r}: expected KEY=VALUE with KEY one of {', '.join(defaults)}")
        config[key] = value if isinstance(defaults[key], str) else _value(key, value, defaults[key])
    if missing := [f"{key}=..." for key, value in config.items() if value == MISSING]:
        raise ValueError(f"{' '.join(missing)} is missing (--help shows all keys)")
    return config


def _value(key: str, text: str, default: bool | int | float) -> bool | int | float:
    value = OmegaConf.from_dotlist([f"value={text}"]).value  # as Hydra's commands read it: 1e-1 is a number
    if isinstance(default, float) and type(value) is int:
        return float(value)
    check_type(key, value, default)
    return value
