"""Predict the memory of a training on each of its GPUs; needs none.

    python -m scripts.memory [experiment=NAME] [KEY=VALUE ...]

Takes the overrides of scripts.train. training/memory.py says what is counted.
"""

from omegaconf import DictConfig

from training.command_line import hydra_command


@hydra_command("memory")
def main(config: DictConfig) -> None:
    """Print GiB per GPU, by what takes them."""
    from rich.console import Console
    from rich.table import Table

    from training.memory import predict

    table = Table("", "GiB per GPU")
    table.columns[1].justify = "right"
    for name, size in predict(config).items():
        table.add_row(name, f"{size:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
