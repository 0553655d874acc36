"""Training of a SequenceModel: cross-entropy on labelled positions, and what is logged about it."""

import time
from collections.abc import Callable

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.aggregation import CatMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.functional.classification import multiclass_accuracy

from models.backbone import SequenceModel, check_ids

IGNORE = -100  # label of a position that is not scored


class SequenceModule(LightningModule):
    """Trains and evaluates a SequenceModel on batches of input_ids [B, T], labels [B, T] and perhaps reset [B, T].

    Training logs every `log_every_n_steps` steps: loss, perplexity, accuracy, learning rate, gradient norm before
    clipping, tokens per second over all devices, step time. Validation and test log loss, perplexity and accuracy over
    all scored labels.

    Args:
        model: the model to train.
        optim: `optim(model, fused=...)` gives what `configure_optimizers` returns, such as a partial of
            `models.optim.adamw_cosine`; None for a module that only evaluates.
        compile: torch.compile the model.

    After a test, `test_sequences` holds one row per sequence: index of its dataloader, its length (position of the last
    label, from 1), and 1 where the answer at that last position was right, else 0.
    """

    def __init__(self, model: SequenceModel, optim: Callable[..., dict] | None = None, compile: bool = False) -> None:
        super().__init__()
        self.model = model
        self.optim = optim
        if compile:
            self.model.compile()
        self.eval_loss = SumMetric(nan_strategy="disable")  # summed over the scored labels, which eval_labels counts
        self.eval_labels = SumMetric()
        self.eval_accuracy = MulticlassAccuracy(
            model.num_classes, average="micro", ignore_index=IGNORE, validate_args=False
        )
        self.eval_sequences = CatMetric(nan_strategy="disable")
        self.test_sequences = torch.empty(0, 3)

    def configure_optimizers(self) -> dict:
        # A fused optimizer unscales float16 gradients inside its step, too late for clipping them.
        return self.optim(self.model, fused=self.trainer.precision != "16-mixed")

    def _loss(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy over the scored labels, and the logits [B, T, num_classes]."""
        input_ids, labels = batch["input_ids"], batch["labels"]
        if batch_idx == 0:  # on a GPU the check waits for the device: once per epoch is enough to see a wrong model
            check_ids("input_ids", input_ids, self.model.vocab_size)
            check_ids("labels", labels, self.model.num_classes, ignore=IGNORE)
        logits = self.model(input_ids, reset=batch.get("reset"))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE), logits

    # --- training ---

    def on_train_start(self) -> None:
        self._tokens, self._steps, self._since = 0, 0, time.perf_counter()

    @property
    def _logs_this_step(self) -> bool:
        return (self.global_step + 1) % self.trainer.log_every_n_steps == 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, logits = self._loss(batch, batch_idx)
        self._tokens += batch["input_ids"].numel()
        # Reading a value from a GPU stalls it, so there the loss is looked at only when it is logged anyway.
        if self._logs_this_step or loss.device.type == "cpu":
            self._check_finite("training", loss)
        if self._logs_this_step:
            accuracy = multiclass_accuracy(
                logits.argmax(-1),
                batch["labels"],
                self.model.num_classes,
                average="micro",
                ignore_index=IGNORE,
                validate_args=False,
            )
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/accuracy", accuracy, prog_bar=True)
            self.log("train/perplexity", loss.detach().exp())
        return loss

    def configure_gradient_clipping(
        self,
        optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        """Clip by norm, once per optimizer step; here because the norm is what we log, and it is computed once."""
        if gradient_clip_algorithm not in (None, GradClipAlgorithmType.NORM):
            raise ValueError(
                f"trainer.gradient_clip_algorithm={gradient_clip_algorithm.value}: only 'norm' is supported"
            )
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val or float("inf"))
        self._steps += 1
        if self._logs_this_step:
            now = time.perf_counter()
            seconds = now - self._since
            self.log("train/gradient_norm", norm)
            self.log("train/lr", optimizer.param_groups[0]["lr"])
            self.log("train/step_time", seconds / self._steps)
            self.log("train/tokens_per_second", self._tokens * self.trainer.world_size / seconds, prog_bar=True)
            self._tokens, self._steps, self._since = 0, 0, now

    def _check_finite(self, name: str, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the {name} loss is {loss.item()} at step {self.global_step}: lower optim.lr, lengthen "
                "optim.warmup_steps, or set trainer.gradient_clip_val"
            )

    # --- evaluation ---

    def on_validation_start(self) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking and hasattr(self, "_since"):
            self._since += time.perf_counter() - self._paused  # step times are those of training

    def _eval_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Update the metrics; right answers, bool [B, T]."""
        loss, logits = self._loss(batch, batch_idx)
        answers, labels = logits.argmax(-1), batch["labels"]
        number = (labels != IGNORE).sum()
        self.eval_loss.update(loss * number)
        self.eval_labels.update(number)
        self.eval_accuracy.update(answers, labels)
        return answers == labels

    def _eval_epoch_end(self, name: str) -> None:
        loss = self.eval_loss.compute() / self.eval_labels.compute()
        self._check_finite(name, loss)
        accuracy = self.eval_accuracy.compute()
        results = {f"{name}/loss": loss, f"{name}/perplexity": loss.exp(), f"{name}/accuracy": accuracy}
        self.log_dict(results, sync_dist=True)  # the same on all ranks already; Lightning wants to be told
        for metric in (self.eval_loss, self.eval_labels, self.eval_accuracy):
            metric.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._eval_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._eval_epoch_end("val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        right = self._eval_step(batch, batch_idx)
        position = torch.arange(1, right.shape[1] + 1, device=right.device)
        length = torch.where(batch["labels"] != IGNORE, position, 0).amax(dim=1)  # [B]
        last = right.gather(1, length[:, None] - 1).squeeze(1)
        self.eval_sequences.update(torch.stack((torch.full_like(length, dataloader_idx), length, last), dim=1))

    def on_test_epoch_end(self) -> None:
        self._eval_epoch_end("test")
        self.test_sequences = self.eval_sequences.compute().cpu()
        self.eval_sequences.reset()
