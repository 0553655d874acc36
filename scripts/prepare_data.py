"""Tokenise the corpus of a config ahead of training, in parallel processes.

    python -m scripts.prepare_data [data=NAME] [experiment=NAME] [KEY=VALUE ...]
    python -m scripts.prepare_data part=I/N [...]          the share of machine I of N, counted from 0, on a shared disk

The overrides are those of scripts.train; training with the same overrides finds the folder. An interrupted command
continues where it stopped. At the end, the sha256 of every file is checked.
"""

import re
import sys
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from training.command_line import hydra_command
from training.configuration import check_complete

if TYPE_CHECKING:
    from lightning import LightningDataModule


def prepare_data(config: DictConfig) -> "LightningDataModule":
    """Prepare and return the data of a config; print their sizes and their folder."""
    from hydra.utils import instantiate
    from rich.console import Console
    from rich.table import Table

    data = instantiate(config.data)
    if not hasattr(data, "prepared"):
        raise ValueError(
            f"{type(data).__name__} generates its data during training; only text, as data=slimpajama, is prepared"
        )
    if (part := _part(config.part)) != (0, 1):
        left = data.prepare_part(*part)
        if left:
            print(f"part {config.part} is prepared; {left} sections are left for the other parts")
            return data
    console, table = Console(), Table()
    for name in ("split", "documents", "tokens", "shards"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, total in data.prepared().items():
        table.add_row(split, *(f"{total[name]:,}" for name in ("documents", "tokens", "shards")))
    console.print(table)
    console.print(f"prepared: {data.folder}", soft_wrap=True)
    return data


def _part(text: str) -> tuple[int, int]:
    """Return 3 and 16 for "3/16"."""
    found = re.fullmatch(r"(\d+)/(\d+)", str(text))
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not part < parts:
        raise ValueError(f"part={text}: expected I/N with I from 0 to N - 1, such as 3/16")
    return part, parts


@hydra_command("prepare_data")
def main(config: DictConfig) -> None:
    """Prepare the data, and print a message at an interruption."""
    check_complete(config)
    try:
        prepare_data(config)
    except KeyboardInterrupt:
        print("interrupted; the same command continues after the finished shards", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
