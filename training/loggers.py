"""Loggers that need more preparation than a call of their constructor."""

import os
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info


def wandb_logger(save_dir: str, project: str, name: str, **options: Any) -> WandbLogger:
    """Return a WandbLogger that never asks for a login. Without a key and without WANDB_MODE, it logs offline.

    `options` are those of WandbLogger and wandb.init.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False):
        mode = "offline"
        rank_zero_info(
            f"wandb: no key found, logging offline to {save_dir}/wandb; upload it with `wandb sync`, "
            "or run `wandb login`, or set WANDB_API_KEY or WANDB_MODE before the next run"
        )
    wandb.finish()  # otherwise WandbLogger would continue the run of the previous job of a sweep
    return WandbLogger(save_dir=save_dir, project=project, name=name, mode=mode, **options)
