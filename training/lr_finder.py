"""Lightning's search for a learning rate (callbacks=lr_finder), for runs that can be resumed."""

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities import rank_zero_only


class LRFinder(LearningRateFinder):
    """A LearningRateFinder that runs at the start of a new run, but not of a resumed one, and sets `optim.lr`."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None or pl_module.lr is None:
            return
        pl_module.checks_loss = False  # the search tries rates at which the loss diverges
        super().on_fit_start(trainer, pl_module)
        pl_module.checks_loss = True
        rank_zero_only(print)(f"callbacks=lr_finder: optim.lr={pl_module.lr:.3g}")
