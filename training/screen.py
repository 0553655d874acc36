"""Progress of a run on the screen: a progress bar in a terminal, lines of text in a file or a pipe."""

import sys

from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

_SHOWN = {
    "loss": "{:.4f}",
    "perplexity": "{:.2f}",
    "bits_per_byte": "{:.4f}",
    "accuracy": "{:.4f}",
    "lr": "{:.2e}",
    "gradient_norm": "{:.2f}",
    "tokens_per_second": "{:,.0f}",
}


class Lines(Logger):
    """A logger that prints a line for each logged step and each validation.

    Args:
        folder: the folder of the run; Lightning puts files of other callbacks there.
        max_steps: the number of steps of the run.
    """

    def __init__(self, folder: str, max_steps: int) -> None:
        super().__init__()
        self.folder, self.max_steps = folder, max_steps

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return self.folder

    @rank_zero_only
    def log_hyperparams(self, *_, **__) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is None or step >= self.max_steps:  # the final evaluation prints a table
            return
        for part in ("train", "val"):
            shown = [
                f"{name} {form.format(metrics[f'{part}/{name}'])}"
                for name, form in _SHOWN.items()
                if f"{part}/{name}" in metrics
            ]
            if shown:
                print(f"step {step + 1}/{self.max_steps}  {part:<5}  {'  '.join(shown)}", flush=True)


def progress_bar(asked: bool, hooks: list) -> ProgressBar | None:
    """Return the progress bar of a run: one of its callbacks, or Lightning's if it is enabled and there is a terminal.

    Return None if lines are to be printed instead."""
    own = next((hook for hook in hooks if isinstance(hook, ProgressBar)), None)
    return own or (TQDMProgressBar(refresh_rate=10) if asked and sys.stdout.isatty() else None)


@rank_zero_only
def show_model(model: nn.Module) -> None:
    """Print the number of a model's parameters."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{type(model).__name__}: {parameters:,} parameters")
