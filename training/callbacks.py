"""Callbacks that record a run: its config and tokenizer, statistics of its steps, and samples of generated text."""

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from data.atomic_file import replacing
from training import results
from training.checkpoint import LAST, TOKENIZER
from training.data_interface import decoded, samples
from training.metrics_file import MetricsFile
from training.peaks import PEAK_FLOPS, peak_flops

PROMPT, CONTINUATION = 32, 64  # tokens taken from a validation block, tokens that the model generates
SAMPLES = 3


class RunRecord(Callback):
    """Writes the config to the run's folder, checkpoints and loggers, and the tokenizer of the data to the folder."""

    def __init__(self, config: DictConfig) -> None:
        self._open_config = config  # the data set the model's vocabulary size in it later

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.config: dict[str, Any] = OmegaConf.to_container(self._open_config, resolve=True)
        self.last = Path(self.config["checkpoint"]["dirpath"]) / LAST

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.begin_at(trainer.global_step)
        if not trainer.is_global_zero:
            return
        folder = Path(self.config["run_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        if pl_module.lr is not None:  # callbacks=lr_finder may have changed it
            self.config["optim"]["lr"] = pl_module.lr
        OmegaConf.save(OmegaConf.create(self.config), folder / "config.yaml")
        if (tokenizer := getattr(trainer.datamodule, "tokenizer", None)) is not None:
            self._keep_tokenizer(tokenizer, folder / TOKENIZER)
        environment = results.environment(trainer.strategy.root_device)
        for logger in trainer.loggers:
            if not isinstance(logger, MetricsFile):  # which would only write a second config.yaml
                logger.log_hyperparams({**self.config, "environment": environment})

    def _keep_tokenizer(self, tokenizer: Any, kept: Path) -> None:
        """Save the tokenizer in the folder `kept`, replacing an earlier one."""
        new = kept.with_name(f"{TOKENIZER}.new")
        tokenizer.save_pretrained(str(new))
        shutil.rmtree(kept, ignore_errors=True)
        new.rename(kept)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or not step:
            return
        run = self.config["run_dir"]
        advice = f"ckpt_path={run} resumes it from its checkpoint"
        if not self.last.exists():
            advice = f"no checkpoint yet: one is written every val_every={self.config['val_every']} steps"
        elif step == trainer.max_steps:
            advice = f"python -m scripts.evaluate ckpt={run} evaluates it"
        by_signal = isinstance(exception, SIGTERMException) and exception.code
        cause = f"by {signal.Signals(exception.code - 128).name} " if by_signal else ""
        print(f"stopped {cause}at step {step}; {advice}", file=sys.stderr)
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "test":
            raise SystemExit(128 + signal.SIGINT) from None  # Lightning's exit code would be 1


class StepStatistics(Callback):
    """Logs means over the last `log_every_n_steps` steps. Times include checkpoints, but not validation and samples.

    train/step_time: seconds per optimizer step.
    train/tokens_per_second: tokens per second on all devices.
    train/data_wait: fraction of the time in which the process waited for a batch of a `data.module.TimedLoader`. A GPU
        may have been busy meanwhile.
    train/mfu: model FLOPs utilisation, `SequenceModel.flops_per_token` relative to the peak of the GPU
        (training/peaks.py). Logged in half precision on GPUs with a known peak.
    train/gpu_memory: peak of the allocated memory in GiB.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = None
        if pl_module.device.type == "cuda" and trainer.precision != "32-true":
            name = torch.cuda.get_device_name(pl_module.device)
            self._peak = peak_flops(name)
            if self._peak is None:
                rank_zero_warn(
                    f"train/mfu is not logged: the peak of {name!r} is unknown; known are {', '.join(PEAK_FLOPS)}"
                )
        self._logged_step = trainer.global_step
        self._restart(trainer)

    def _restart(self, trainer: Trainer) -> None:
        self._since, self._waited, self._tokens = time.perf_counter(), _waited(trainer), 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _within_training(trainer):
            self._since += time.perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict, batch_idx: int
    ) -> None:
        self._tokens += batch["input_ids"].numel()
        steps = trainer.global_step - self._logged_step
        if not steps or trainer.global_step % trainer.log_every_n_steps:
            return
        if pl_module.device.type == "cuda":  # logging waits for the GPU anyway
            torch.cuda.synchronize(pl_module.device)
        seconds = time.perf_counter() - self._since
        speed = self._tokens / seconds
        found = {"step_time": seconds / steps, "tokens_per_second": speed * trainer.world_size}
        found["data_wait"] = (_waited(trainer) - self._waited) / seconds
        if self._peak is not None:
            found["mfu"] = speed * pl_module.model.flops_per_token(batch["input_ids"].shape[1]) / self._peak
        if pl_module.device.type == "cuda":
            found["gpu_memory"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
        for name, value in found.items():  # as CPU tensors: Lightning would turn numbers into tensors on the GPU
            pl_module.log(f"train/{name}", torch.tensor(value), prog_bar=name in ("tokens_per_second", "mfu"))
        self._logged_step = trainer.global_step
        self._restart(trainer)


def _waited(trainer: Trainer) -> float:
    """Return the seconds that training has waited for batches; 0 for a loader that does not count them."""
    return getattr(trainer.train_dataloader, "waited", 0.0)


def _within_training(trainer: Trainer) -> bool:
    """Return whether the current validation is part of training, and not the sanity check before it."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


class TextSamples(Callback):
    """Writes continuations of some validation texts to samples.txt and to wandb after each validation."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "samples.txt"

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule
        if not _within_training(trainer) or (prompts := samples(data, SAMPLES, PROMPT)) is None:
            return
        draws = torch.Generator(pl_module.device).manual_seed(0)  # own generator: samples must not change training
        with trainer.precision_plugin.forward_context():  # runs on all ranks, because weights may be sharded
            tokens = [continuation(pl_module.model, prompt.to(pl_module.device), draws) for prompt in prompts]
        if not trainer.is_global_zero:
            return
        rows = [[decoded(data, part) for part in pair] for pair in zip(prompts, tokens, strict=True)]
        title = f"--- step {trainer.global_step}\n"
        before = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        before = before.partition(title)[0]  # a resumed run writes some steps again
        text = "".join(f"{title}{prompt}|{added}\n" for prompt, added in rows)
        with replacing(self.file) as file:
            file.write((before + text).encode())
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_text("samples", columns=["prompt", "continuation"], data=rows)


def continuation(model: torch.nn.Module, prompt: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """Return CONTINUATION tokens sampled after `prompt` [T], int64 on the CPU."""
    tokens, states = [prompt], None
    for _ in range(CONTINUATION):
        logits, states = model(tokens[-1][None], states, return_states=True)
        tokens.append(torch.multinomial(logits[0, -1].float().softmax(-1), 1, generator=draws))
    return torch.cat(tokens[1:]).cpu()
