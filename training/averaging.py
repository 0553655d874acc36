"""An exponential moving average of the weights, kept beside them."""

import warnings

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy

from training._compat import keep_average_on


class MovingAverage(EMAWeightAveraging):
    """An EMAWeightAveraging whose average is on the device of the weights. Lightning's is on the CPU, so that each
    update copies all weights."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise ValueError("callbacks=ema: sharded weights (FSDP) have no average; take trainer=h100_8 (DDP)")
        keep_average_on(self, trainer.strategy.root_device)
        with warnings.catch_warnings():  # of a configure_model that shards; ours only compiles then
            warnings.filterwarnings("ignore", message=".*overrides the configure_model")
            super().setup(trainer, pl_module, stage)
