"""An exponential moving average of the weights."""

import warnings

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy

from training._compat import keep_average_on


class MovingAverage(EMAWeightAveraging):
    """An EMAWeightAveraging that keeps the average on the device of the weights.

    Lightning keeps it on the CPU, so that each update copies all weights.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise ValueError("callbacks=ema does not support sharded weights (FSDP); use trainer=h100_8 (DDP)")
        keep_average_on(self, trainer.strategy.root_device)
        with warnings.catch_warnings():  # about a configure_model that shards; without FSDP ours only compiles
            warnings.filterwarnings("ignore", message=".*overrides the configure_model")
            super().setup(trainer, pl_module, stage)
