import json

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint


class Recorder(L.LightningModule):
    """A module that records its batches and trains nothing; it fails in the step `fail_at`."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.fail_at = fail_at
        self.seen = []

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise RuntimeError("broken off")
        assert set(batch) <= {"input_ids", "labels", "reset", "continues"}
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * 0.0

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SeenToFile(L.Callback):
    """A callback that writes the batches of each rank to a file."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, model):
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(model.seen))

    def read(self, ranks):
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture
def fit(tmp_path):
    """Return a function that trains a Recorder and returns its batches, with several devices those of each.

    Checkpoints are written to tmp_path: step=<n>.ckpt and on_exception.ckpt.
    """

    def run(datamodule, max_steps, fail_at=None, ckpt_path=None, devices=1):
        model = Recorder(fail_at)
        seen = SeenToFile(tmp_path)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="ddp_fork" if devices > 1 else "auto",
            max_steps=max_steps,
            val_check_interval=2,
            check_val_every_n_epoch=None,
            limit_val_batches=1,
            use_distributed_sampler=False,
            callbacks=[
                ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1),
                OnExceptionCheckpoint(tmp_path, filename="on_exception"),
                seen,
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
        return seen.read(devices) if devices > 1 else model.seen

    return run
