"""Evaluate a checkpoint. Its model and data are built from the config that it contains.

    python -m scripts.evaluate ckpt=PATH [KEY=VALUE ...]

PATH is a checkpoint file, the folder of a run or of scripts.export, or last: the newest checkpoint in outputs/. Every
other KEY=VALUE changes the run's own config, for example data.eval_lengths=[40,64,128,256,512] or
trainer.accelerator=cpu. State tracking: accuracy per range of lengths, as a table, JSON and a plot. Text: validation
perplexity. Results go to a new folder evaluate_<time> in the folder of the run.
"""

from collections.abc import Sequence

from omegaconf import DictConfig

from training.arguments import literal
from training.command_line import hydra_command
from training.configuration import config_groups


def arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra, with ++ before keys of the run, which evaluate.yaml does not contain."""
    for word in words:
        if (key := word.partition("=")[0]) in config_groups():
            raise ValueError(f"{word}: the run has its own {key}; single keys of it can be changed, as {key}.KEY=VALUE")
    known = ("-", "+", "~", "ckpt=", "weights=", "hydra.")
    changes = [word if word.startswith(known) or "=" not in word else f"++{word}" for word in words]
    return literal(changes, paths=["ckpt"])


@hydra_command("evaluate", arguments)
def main(config: DictConfig) -> None:
    """Evaluate with the changes given on the command line."""
    from training.evaluation import evaluate

    own = ("ckpt", "weights")
    evaluate(config.ckpt, {key: value for key, value in config.items() if key not in own}, config.weights)


if __name__ == "__main__":
    main()
