"""What starts the processes of a run: torchrun, srun, or Lightning itself."""

import os

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)


def started_by_launcher() -> bool:
    """Return whether torchrun or srun has started all processes of this run.

    A SLURM job of one task has one process, and Lightning starts the others, as outside of SLURM.
    """
    if TorchElasticEnvironment.detect():
        return True
    return SLURMEnvironment.detect() and int(os.environ["SLURM_NTASKS"]) > 1


def environments() -> list[ClusterEnvironment]:
    """Return the plugin of a Trainer within a SLURM job; none elsewhere, where Lightning chooses right."""
    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():  # torchrun may run within a job
        return []
    # Lightning's own requeueing writes checkpoints to the working folder, from which all later jobs would resume.
    return [SLURMEnvironment(auto_requeue=False) if started_by_launcher() else LightningEnvironment()]
