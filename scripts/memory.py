"""Predict the memory that a training needs on each GPU. No GPU is needed for this.

    python -m scripts.memory [experiment=NAME] [KEY=VALUE ...]

The overrides are those of scripts.train. training/memory.py describes what is counted.
"""

from omegaconf import DictConfig

from training.command_line import hydra_command


@hydra_command("memory")
def main(config: DictConfig) -> None:
    """Print the memory per GPU in GiB, by kind."""
    from rich.console import Console
    from rich.table import Table

    from training.configuration import mixer_name
    from training.memory import predict

    table = Table("", "GiB per GPU")
    table.columns[1].justify = "right"
    for name, size in predict(config).items():
        table.add_row(name, f"{size:.2f}")
    step = f"{config.data.batch_size} x {config.data.context_length} tokens per GPU, {config.trainer.precision}"
    print(f"\nPredicted memory of a training step, {config.name} with {mixer_name(config.model)}, {step}:")
    Console().print(table)


if __name__ == "__main__":
    main()
