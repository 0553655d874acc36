"""Training and evaluation of a SequenceModel by cross-entropy on labelled positions."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.backbone import SequenceModel, States, check_ids
from models.loss import IGNORE
from training import sharding
from training._compat import align_loop
from training.carried_states import CarriedStates
from training.compiled_loss import CompiledLoss
from training.evaluation_metrics import EvaluationMetrics, last_answers
from training.schedules import Schedule, with_schedule

STATES = "carried_states"  # key in checkpoints


class TrainingModule(LightningModule):
    """Trains and evaluates a SequenceModel on batches of input_ids [B, T], labels [B, T] and, optionally, reset [B, T].

    Batches may also contain continues, bool [B]. Where it is True, the row starts with the detached state at the end of
    the same row of the previous batch (with gradient accumulation: of the same batch of the previous step). Validation
    and test have their own states; checkpoints store those of training.

    Every `log_every_n_steps` steps, training logs loss, perplexity and accuracy (means over the devices), the learning
    rate and the gradient norm before clipping. Validation and test log loss, perplexity and accuracy over all scored
    labels, and bits per byte if the data know how many bytes a label stands for. Perplexity is left out if the data
    name `metrics` without it, as those of state tracking do.

    Args:
        model: the model to train.
        optim: `optim(model, fused=...)` returns an optimizer, or a dict with an optimizer and its schedule like
            `configure_optimizers`; for example a partial of `training.optim.adamw`. None for a module that only
            evaluates.
        schedule: maps an optimizer step, counted from 0, to the factor of the learning rate, as in
            `training.schedules`. None means a constant rate, or that `optim` returns its own schedule.
        weights: returns the initial weights of a `model` on the meta device, for strategies that shard the model.
        compile: compile the model and its loss with torch.compile, for training and for evaluation batches of the same
            shape, as those of text. Other batches run uncompiled, because every new shape takes as long to compile.

    Attributes:
        test_sequences: after a test, the rows of `last_answers`, [sequences, 3].
        test_windows: after a test on documents (batches of `data.long_documents`), a row for each batch: its position,
            the bytes of one document's state after it, the number of labels, and the sum of losses.
    """

    def __init__(
        self,
        model: SequenceModel,
        optim: Callable[..., dict | Optimizer] | None = None,
        schedule: Schedule | None = None,
        compile: bool = False,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.weights = weights
        self.optim = optim
        self.schedule = schedule
        self.checks_loss = True  # end training when the loss is not finite
        self._to_log = torch.empty(2)  # loss and accuracy of the step to log
        self._lr: float | None = getattr(optim, "keywords", {}).get("lr")
        self.compile_loss = compile
        self._compiled_loss: CompiledLoss | None = None
        self._training_shape: torch.Size | None = None
        self._training_states, self._evaluation_states = CarriedStates(), CarriedStates()
        self._group_options: list[dict] = []  # options of this run for each parameter group of the optimizer
        self.evaluated = EvaluationMetrics()
        self.test_sequences = torch.empty(0, 3)
        self.test_windows = torch.empty(0, 4)
        self._of_documents: States | None = None

    def configure_model(self) -> None:
        """Shard the model over the devices under Lightning's ModelParallelStrategy (FSDP), and compile the loss."""
        if self.device_mesh is not None and not isinstance(self.model, FSDPModule):
            sharding.shard(self.model, self.device_mesh["data_parallel"], self.trainer.precision)
            if self.weights is not None:
                sharding.materialize(self.model, self.trainer.strategy.root_device, self.weights)
        if self.compile_loss and self._compiled_loss is None:
            self._compiled_loss = CompiledLoss(self.model.loss)

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer, before its schedule; None for an `optim` without one."""
        return self._lr

    @lr.setter
    def lr(self, rate: float) -> None:
        """Set the rate, even after the optimizer has been configured, as Lightning's LearningRateFinder does."""
        self._lr = rate
        for options in self._group_options:
            options |= {"lr": rate} | ({"initial_lr": rate} if "initial_lr" in options else {})

    def configure_optimizers(self) -> dict:
        if not callable(self.optim):
            raise TypeError(
                "optim must be a function that makes the optimizer of a model, as functools.partial(adamw, lr=1e-3), "
                f"got {type(self.optim).__name__}"
            )
        # A fused optimizer unscales float16 gradients inside its step, which is too late for clipping them.
        options = {"fused": self.trainer.precision != "16-mixed"} | getattr(self.optim, "keywords", {})
        if self.lr is not None:
            options["lr"] = self.lr
        configured = with_schedule(self.optim(self.model, **options), self.schedule)
        groups = configured["optimizer"].param_groups
        self._group_options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return configured

    def on_train_start(self) -> None:
        """Replace the optimizer's options from the checkpoint by those of this run, and align Lightning's counters."""
        if hasattr(self.trainer.datamodule, "epoch_progress"):
            align_loop(self.trainer, self.trainer.datamodule.epoch_progress)
        optimizer, schedule = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        groups = optimizer.param_groups
        for group, asked in zip(groups, self._group_options, strict=True):
            group |= asked if schedule is None else asked | {"lr": group["lr"]}
            _place_counts(optimizer, group)
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = [asked["initial_lr"] for asked in self._group_options]
            for group, lr, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["lr"] = lr * factor(schedule.last_epoch)

    def _loss(
        self, batch: dict[str, Tensor], batch_idx: int, carried: CarriedStates, slots: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy over the scored labels, and which predictions are correct, bool [B, T].

        `carried` are the states of earlier batches, of which each of `slots` accumulated batches has its own.
        """
        input_ids, labels = batch["input_ids"], batch["labels"]
        if batch_idx == 0:  # only once per epoch, because on a GPU the check waits for the device
            check_ids("input_ids", input_ids, self.model.vocab_size)
            check_ids("labels", labels, self.model.num_classes, ignore=IGNORE)
        compiled = self.compile_loss and input_ids.shape == self._training_shape
        loss = self._compiled_loss if compiled else self.model.loss
        if (continues := batch.get("continues")) is None:
            return loss(input_ids, labels, batch.get("reset"))
        slot, place = batch_idx % slots, (slots, self.trainer.world_size, self.global_rank)
        states = carried.begin(slot, continues, lambda: self._any_states(input_ids, labels), place)
        loss, right, states = loss(input_ids, labels, batch.get("reset"), states, True)
        carried.keep(slot, self.model.carried(states))
        return loss, right

    @torch.no_grad()
    def _any_states(self, input_ids: Tensor, labels: Tensor) -> States:
        """Return states with the shapes of those of a batch, and arbitrary values."""
        return self.model.carried(self.model.loss(input_ids[:, :1], labels[:, :1], return_states=True)[2])

    # --- training ---

    @property
    def _logs_this_step(self) -> bool:
        return (self.global_step + 1) % self.trainer.log_every_n_steps == 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._training_shape = batch["input_ids"].shape
        loss, right = self._loss(batch, batch_idx, self._training_states, self.trainer.accumulate_grad_batches)
        if loss.device.type == "cpu":
            self._check_training_loss(loss)
        if self._logs_this_step:
            accuracy = right.sum() / (batch["labels"] != IGNORE).sum()
            of_this_rank = torch.stack((loss.detach(), accuracy))
            self._to_log = self.trainer.strategy.reduce(of_this_rank, reduce_op="mean")
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take an optimizer step, then log.

        Reading the values waits for the GPU, so that happens after the whole step has been queued. Values are logged as
        CPU tensors, because Lightning reads those of the progress bar in every step, even if it is not logged.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._logs_this_step:
            loss, accuracy = self._to_log.cpu()
            self._check_training_loss(loss)
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/accuracy", accuracy, prog_bar=True)
            if self._has_perplexity:
                self.log("train/perplexity", loss.exp())
            self.log("train/lr", torch.as_tensor(optimizer.param_groups[0]["lr"]).cpu())

    @property
    def _has_perplexity(self) -> bool:
        return "perplexity" in getattr(self.trainer.datamodule, "metrics", ("perplexity",))

    def _check_training_loss(self, loss: Tensor) -> None:
        if self.checks_loss:
            self._check_finite("training loss", loss)

    def configure_gradient_clipping(
        self,
        optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        """Clip the gradients by their total norm, once per optimizer step, and log the norm before clipping."""
        if gradient_clip_algorithm not in (None, GradClipAlgorithmType.NORM):
            raise ValueError(
                f"trainer.gradient_clip_algorithm={gradient_clip_algorithm.value}: only 'norm' is supported"
            )
        if gradient_clip_val is None and not self._logs_this_step:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(parameter.grad for parameter in parameters)
        if gradient_clip_val is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        if self._logs_this_step:
            self.log("train/gradient_norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Raise FloatingPointError if weights are not finite: on a GPU the loss is not checked in every step."""
        wrong = [name for name, weight in checkpoint["state_dict"].items() if not weight.isfinite().all()]
        # Under FSDP only one process has the weights, and all have to raise.
        if self.trainer.strategy.reduce_boolean_decision(bool(wrong), all=False):
            raise FloatingPointError(self._advice(f"{wrong[0] if wrong else 'a weight'} is not finite"))
        if states := self._training_states.state_dict(self._of_all_ranks):
            checkpoint[STATES] = states

    def _of_all_ranks(self, part: Tensor) -> Tensor:
        """Gather a tensor [B, ...] of each rank into one tensor [ranks * B, ...]."""
        return self.all_gather(part).reshape(-1, *part.shape[1:])

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self._training_states.load_state_dict(checkpoint.get(STATES))

    def _check_finite(self, name: str, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            raise FloatingPointError(self._advice(f"the {name} is {loss.item()}"))

    def _advice(self, found: str) -> str:
        return (
            f"{found} at step {self.global_step}: lower optim.lr, lengthen schedule.warmup_steps, "
            "or set trainer.gradient_clip_val"
        )

    # --- evaluation ---

    def _begin_evaluation(self) -> None:
        self._evaluation_states.clear()
        self.evaluated.begin()

    on_validation_epoch_start = on_test_epoch_start = _begin_evaluation

    def _end_evaluation(self, name: str) -> None:
        found = self.evaluated.means()
        self._check_finite(f"{name} loss", found["loss"])
        if not self._has_perplexity:
            del found["perplexity"]
        if (size := getattr(self.trainer.datamodule, "bytes_per_label", None)) is not None:
            found["bits_per_byte"] = found["loss"] / (math.log(2) * size)
        found = {f"{name}/{key}": value for key, value in found.items()}
        self.log_dict(found, sync_dist=True)  # values are equal on all ranks, but Lightning warns without sync_dist

    def _eval_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Add a batch to the metrics; return which predictions are correct, bool [B, T]."""
        loss, right = self._loss(batch, batch_idx, self._evaluation_states)
        self.evaluated.add(loss, right, batch["labels"])
        return right

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._eval_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._end_evaluation("val")

    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        if "position" in batch:
            self._read_documents(batch)
            return
        right = self._eval_step(batch, batch_idx)
        self.evaluated.sequences.update(last_answers(right, batch["labels"], dataloader_idx))

    def _read_documents(self, batch: dict[str, Any]) -> None:
        """Evaluate the next window of long documents with the states after the previous one, also for attention."""
        labels, states = batch["labels"], None if batch["begins"] else self._of_documents
        loss, right, self._of_documents = self.model.loss(batch["input_ids"], labels, None, states, True)
        added = self.evaluated.add(loss, right, labels)
        size = sum(part.nbytes for state in self._of_documents for part in state)
        about = added.new_tensor([batch["position"], size / len(labels)])
        self.evaluated.windows.update(torch.cat((about, added))[None])

    def on_test_epoch_end(self) -> None:
        self._end_evaluation("test")
        self._of_documents = None
        self.test_sequences = self.evaluated.rows(self.evaluated.sequences)
        self.test_windows = self.evaluated.rows(self.evaluated.windows)
        self.evaluated.begin()


def _place_counts(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """Move the step count of each parameter to the device where the optimizer's kernels read it.

    PyTorch does this when it loads a state, but according to the saved options, and the saved optimizer may have been
    fused when this one is not.
    """
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if isinstance(count := state.get("step"), Tensor):
            state["step"] = count.to(parameter.device if group.get("fused") else "cpu")
