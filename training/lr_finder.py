"""callbacks=lr_finder: Lightning's search for a learning rate, in runs that can be resumed."""

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities import rank_zero_only


class LRFinder(LearningRateFinder):
    """A LearningRateFinder at the beginning of a run, but not of a resumed one; its suggestion becomes `optim.lr`."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None or pl_module.lr is None:
            return
        pl_module.checks_loss = False  # the largest rates make it diverge on purpose
        super().on_fit_start(trainer, pl_module)
        pl_module.checks_loss = True
        rank_zero_only(print)(f"callbacks=lr_finder: optim.lr={pl_module.lr:.3g}")
