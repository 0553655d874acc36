"""Train the model of a config, then evaluate it.

    python -m scripts.train [experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...]

configs/train.yaml lists all keys. A run writes all of its files to outputs/<name>/<time>.
"""

import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from training import sweep
from training.command_line import hydra_command, one_line_errors
from training.configuration import say_overruled
from training.resumed_config import command_of_run, command_to_record, take_saved_values


def train(config: DictConfig) -> dict:
    """Train and evaluate the run of a composed config, with all files in config.run_dir; return its evaluation."""
    start = time.perf_counter()
    from training.build import build
    from training.evaluation import evaluate_run
    from training.fit import fit
    from training.resume import find_resumed

    resumed = find_resumed(config)
    run = build(config, resumed)
    step = fit(run, config, resumed)
    return evaluate_run(run, config, step, start)


@hydra_command("train")
def main(config: DictConfig) -> float | None:
    """Train one run, or one job of a sweep; return the number that a sweep optimises."""
    hydra = HydraConfig.get()
    if config.run_dir != hydra.runtime.output_dir:  # Hydra writes logs, and all jobs of a sweep, to its own folder
        raise ValueError(
            f"run_dir={config.run_dir}: set the folder of a run by hydra.run.dir=..., of a sweep by hydra.sweep.dir=..."
        )
    take_saved_values(config)
    config.overrides = command_to_record(hydra)
    say_overruled(config, hydra)
    in_sweep = hydra.mode == RunMode.MULTIRUN
    result = sweep.train_job(train, config, Path(hydra.sweep.dir)) if in_sweep else train(config)
    return sweep.metric(result, config.metric)


if __name__ == "__main__":
    with one_line_errors():
        sys.argv[1:] = sweep.named_by_what_differs(command_of_run(sys.argv[1:]))
    try:
        main()
    finally:
        sweep.show()
