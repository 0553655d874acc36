"""Training on a GPU: precision, errors, synchronisation, weight averages."""

import pytest
import torch
from lightning import Callback

from tests.training.test_lightning_module import batch, loader, tiny_module, tiny_trainer
from training.averaging import MovingAverage
from training.callbacks import StepStatistics
from training.results import environment


def fit(folder, precision, steps, ckpt_path=None):
    """Train on the GPU up to step `steps`; return the module and its trainer."""
    module = tiny_module()
    trainer = tiny_trainer(folder, accelerator="gpu", precision=precision, max_steps=steps, gradient_clip_val=None)
    trainer.fit(module, loader(*map(batch, range(6))), ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


@pytest.mark.parametrize(("before", "after"), [("16-mixed", "bf16-mixed"), ("bf16-mixed", "16-mixed")])
def test_run_can_be_resumed_in_another_precision(before, after, tmp_path):
    """In float16, the optimizer is not fused and counts its steps on the CPU."""
    fit(tmp_path, before, 3)[1].save_checkpoint(tmp_path / "before.ckpt")
    _, trainer = fit(tmp_path, after, 6, ckpt_path=tmp_path / "before.ckpt")
    (optimizer,) = trainer.optimizers
    assert {group["fused"] for group in optimizer.param_groups} == {after != "16-mixed"}
    counts = [state["step"] for state in optimizer.state.values()]
    assert {count.device.type for count in counts} == {"cpu" if after == "16-mixed" else "cuda"}
    assert {count.item() for count in counts} == {6}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_loss_that_is_not_finite_ends_the_run_at_the_next_log_step(accumulated, tmp_path):
    module = tiny_module()
    with torch.no_grad():
        module.model.head.weight[0, 0] = float("nan")
    trainer = tiny_trainer(tmp_path, accelerator="gpu", log_every_n_steps=2, accumulate_grad_batches=accumulated)
    with pytest.raises(FloatingPointError, match=r"nan .*step 1:.*optim\.lr"):
        trainer.fit(module, loader(*map(batch, range(12))))


def test_host_waits_for_the_gpu_only_in_logged_steps(tmp_path):
    """Lightning reads the values of the progress bar in every step, so they must be on the CPU."""

    shown = {}

    class Strict(Callback):
        def on_train_batch_start(self, trainer, *_):
            torch.cuda.set_sync_debug_mode("error" if 4 <= trainer.global_step < 7 else "default")
            shown.update(trainer.progress_bar_metrics)

    options = {"max_steps": 8, "log_every_n_steps": 4, "gradient_clip_val": 1.0}
    trainer = tiny_trainer(tmp_path, accelerator="gpu", callbacks=[StepStatistics(), Strict()], **options)
    try:
        trainer.fit(tiny_module(), loader(*map(batch, range(8))))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 8
    assert shown.keys() >= {"train/loss", "train/tokens_per_second"}


def test_average_of_weights_is_on_the_gpu(tmp_path):
    average = MovingAverage(decay=0.5)
    devices = set()

    class Look(Callback):
        def on_train_batch_end(self, *_):
            devices.update(parameter.device.type for parameter in average._average_model.parameters())

    module = tiny_module()
    trainer = tiny_trainer(tmp_path, accelerator="gpu", callbacks=[average, Look()])
    trainer.fit(module, loader(*map(batch, range(6))), loader(batch(99)))
    assert devices == {"cuda"}


def test_results_name_the_device_of_the_run():
    """Runs on the CPU of a machine with a GPU name the CPU."""
    assert environment(torch.device("cuda", 0))["device"] == torch.cuda.get_device_name(0)
    assert "cores" in environment(torch.device("cpu"))["device"]
