"""Training of a run, from its start or from a checkpoint."""

from omegaconf import DictConfig

from training import checkpoint, resume
from training.build import Run


def fit(run: Run, config: DictConfig, resumed: resume.Resumed | None = None) -> int:
    """Train the remaining steps, and return the number of the last one."""
    left = resumed is None or resume.steps_left(resumed, config)
    if not left:  # the run was interrupted after training, during its evaluation
        run.trainer.logger = None
        checkpoint.load_weights(run.module, *resumed)
        return resumed.content["global_step"]
    file = resumed.file if resumed else None
    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=file, weights_only=True)
    return run.trainer.global_step
