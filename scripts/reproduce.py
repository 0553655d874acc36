"""Regenerate a result of the paper: data, a table with the paper's values, and a figure.

    python -m scripts.reproduce NAME [KEY=VALUE ...] [train.KEY=VALUE ...]
    python -m scripts.reproduce --help

configs/reproduce.yaml lists the keys; train.KEY=VALUE passes KEY=VALUE to scripts.train for every training run.
"""

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from reproduction import ENTRIES
from training.arguments import literal, named, quoted
from training.command_line import hydra_command
from training.configuration import values

if TYPE_CHECKING:
    from reproduction.result import Reproduction

OmegaConf.register_new_resolver(
    "reproductions", lambda: "\n".join(f"{name:<26}{entry.title}" for name, entry in ENTRIES.items()), replace=True
)


def arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: a leading word is the name, and all train.KEY=VALUE are collected in a list."""
    found = {word: re.fullmatch(r"([+~]*)train\.(.*)", word) for word in words}
    overrides = ",".join(quoted(match[1] + match[2]) for match in found.values() if match)
    others = [word for word in words if not found[word]]
    own = literal(named(others, "name"), paths=["runs", "add_to", "out"])
    return own + ([f"overrides=[{overrides}]"] if overrides else [])


def load(name: str) -> "Reproduction":
    return getattr(import_module(f"reproduction.{name}"), name.upper())


def check(asked: dict[str, Any]) -> None:
    """Raise ValueError for wrong values, and for keys that would have no effect."""
    name, jobs, runs, files = (asked[key] for key in ("name", "jobs", "runs", "files"))
    if name not in ENTRIES:
        raise ValueError(f"which result? python -m scripts.reproduce NAME, one of {', '.join(ENTRIES)}")
    if not isinstance(jobs, int) or jobs < 1:
        raise ValueError(f"jobs={jobs}: expected a number of at least 1")
    given = asked | {"train.KEY": asked["overrides"], "jobs": jobs > 1}
    training = ", ".join(name for name, entry in ENTRIES.items() if entry.trains)
    rules = (
        (
            files,
            "no effect with files=..., which are already measured",
            ("train.KEY", "jobs", "runs", "add_to", "quick"),
        ),
        (not ENTRIES[name].trains, f"only for results that train: {training}", ("train.KEY", "jobs", "runs", "add_to")),
        (runs, "no effect with runs=..., which are already trained", ("train.KEY", "jobs")),
        (not runs, "only with runs=..., which are added to it", ("add_to",)),
    )
    for holds, reason, keys in rules:
        if holds and (useless := [key for key in keys if given[key]]):
            raise ValueError(f"{', '.join(useless)}: {reason}")
    for file in [*files, *filter(None, [asked["add_to"]])]:
        if not Path(file).is_file():
            raise ValueError(f"there is no file {file}")


@hydra_command("reproduce", arguments)
def main(config: DictConfig) -> None:
    """Measure, or use files that were measured before, and write data, table and figure."""
    asked = values(config, "reproduce")
    check(asked)
    from benchmarks import RESULTS
    from benchmarks.results import checkout
    from reproduction.result import Options, write
    from reproduction.runs import OUTPUTS

    name, files = asked.pop("name"), [Path(file) for file in asked.pop("files")]
    reproduction = load(name)
    asked |= {key: Path(asked[key]) for key in ("runs", "add_to", "out") if asked[key]}
    asked["out"] = asked["out"] or (OUTPUTS / "quick" if asked["quick"] else RESULTS)
    options = Options(**asked | {"overrides": tuple(asked["overrides"])})
    if not files:
        checkout()  # raises errors before measuring
        files = reproduction.measure(options)
    for path in (*files, *write(name, reproduction, files, options.out)):
        print(path)


if __name__ == "__main__":
    main()
