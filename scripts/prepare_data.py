"""Tokenise the corpus of a config once, in parallel processes, ahead of training.

    python -m scripts.prepare_data [data=NAME] [experiment=NAME] [KEY=VALUE ...]

Takes the overrides of scripts.train; training with the same finds the folder. A command that was interrupted, or
killed, goes on where it stopped. At the end, and when all was there before, every file is checked against its sha256.
"""

import sys
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from training.command_line import one_line_errors
from training.config_checks import check_nulls
from training.configuration import CONFIGS
from training.overrides import check_overrides

if TYPE_CHECKING:
    from data.text import Text


def prepare_data(config: DictConfig) -> "Text":
    """The DataModule with all its files there, and right."""
    from hydra.utils import instantiate

    from data.text import Text

    if config.data._target_ != "data.text.Text":
        raise ValueError(
            f"{config.data._target_} draws its data while it trains; only text (data=slimpajama) is prepared"
        )
    check_nulls("data", config.data)
    datamodule: Text = instantiate(config.data)
    datamodule.prepare_data()
    datamodule.setup()
    datamodule.manifest.verify(datamodule.folder)
    return datamodule


def show(datamodule: "Text") -> None:
    """Print what there is now, and where."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(), Table()
    for name in ("split", "documents", "tokens", "shards"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, total in datamodule.manifest.totals.items():
        table.add_row(split, *(f"{total[name]:,}" for name in ("documents", "tokens", "shards")))
    console.print(table)
    console.print(f"prepared: {datamodule.folder}", soft_wrap=True)


@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="prepare_data")
def main(config: DictConfig) -> None:
    with one_line_errors():
        try:
            show(prepare_data(config))
        except KeyboardInterrupt:
            print("interrupted; finished shards are kept, and the same command goes on behind them", file=sys.stderr)
            raise


if __name__ == "__main__":
    with one_line_errors():
        check_overrides(sys.argv[1:], "prepare_data")
    main()
