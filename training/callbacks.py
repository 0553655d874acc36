"""What a run reports and leaves behind while it trains."""

import os
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from data.atomic_file import replacing
from data.text import Text
from training import results
from training.checkpoint import LAST, TOKENIZER
from training.metrics_file import MetricsFile
from training.peaks import PEAK_FLOPS, peak_flops

PROMPT, CONTINUATION, SAMPLES = 32, 64, 3  # tokens of a validation block, tokens that the model adds, how often


class GracefulStop(Callback):
    """SIGTERM, and SIGUSR1 as clusters send it ahead of time, end training after the step under way, whose state is
    saved, in all processes of the run alike. So does the first Ctrl-C where there is one process; the second one ends
    it at once.

    Lightning 2.6 has a flag for the signal, at which its loops raise SIGTERMException. Left to itself it sets the flag
    at once, also between accumulated batches, where no run can go on; it tells the other processes by a collective in
    the signal's handler, in the midst of theirs, and all wait for ever; and it asks for the signal in every batch, so
    that a GPU waits for the answer. So here the flag is set where a step ends; several processes agree on it in steps
    that are logged, for which GPUs wait anyway.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._signal: signal.Signals | None = None  # that was received
        self._handler = partial(self._on_request, trainer)
        trainer._signal_connector._sigterm_notifier_fn = self._handler
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        if _in_main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._handler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores Ctrl-C
        if trainer.world_size == 1 and heard and _in_main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, number: int, _: Any) -> None:
        self._signal = signal.SIGINT
        self._let_go_of_interrupts()
        # not print: the signal may have come in the midst of one
        os.write(2, b"\nstopping when this step is done; Ctrl-C again stops at once\n")

    def _let_go_of_interrupts(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_request(self, trainer: Trainer, number: int, _: Any) -> None:
        self._signal = signal.Signals(number)
        if trainer.state.fn == "fit":
            return
        if trainer.strategy.launcher is not None:  # under torchrun and SLURM others start the processes, and end them
            trainer.strategy.launcher.kill(number)
        signal.signal(number, signal.SIG_DFL)  # at once: outside of training there is nothing to save
        os.kill(os.getpid(), number)

    def _received_by_any(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self._signal is not None, all=False)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # the batch is accumulated
            return
        self._step = trainer.global_step
        if trainer.world_size == 1 or self._step % trainer.log_every_n_steps == 0:
            trainer._signal_connector.received_sigterm = self._received_by_any(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._received_by_any(trainer):  # after the last step that was asked
            raise SIGTERMException

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go_of_interrupts()
        if isinstance(exception, SIGTERMException) and trainer.local_rank == 0:
            # of the others 0: Lightning kills a run of which one fails; SIGTERM may have come to one of them alone
            exception.code = 128 + (self._signal or signal.SIGTERM)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go_of_interrupts()
        if signal.getsignal(signal.SIGUSR1) is self._handler:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _in_main_thread() -> bool:
    """Which alone may say who hears of signals."""
    return threading.current_thread() is threading.main_thread()


class RunRecord(Callback):
    """Puts the config into the run's folder, checkpoints and loggers, and a tokenizer into the folder."""

    def __init__(self, config: DictConfig) -> None:
        self._open_config = config  # the data will set the model's vocabulary

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.config: dict[str, Any] = OmegaConf.to_container(self._open_config, resolve=True)
        self.last = Path(self.config["checkpoint"]["dirpath"]) / LAST

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folder = Path(self.config["run_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(self.config), folder / "config.yaml")
        if isinstance(trainer.datamodule, Text):
            self._keep_tokenizer(Path(trainer.datamodule.tokenizer_folder), folder / TOKENIZER)
        environment = results.environment(trainer.strategy.root_device)
        for logger in trainer.loggers:
            if not isinstance(logger, MetricsFile):  # it would only write a second config.yaml
                logger.log_hyperparams({**self.config, "environment": environment})

    def _keep_tokenizer(self, source: Path, kept: Path) -> None:
        """A copy, in place of one that another run left in the folder."""
        if kept.exists() and kept.samefile(source):
            return
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(source, kept)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.begin_at(trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or not step:
            return
        run = self.config["run_dir"]
        advice = f"ckpt_path={run} goes on from its checkpoint"
        if not self.last.exists():
            advice = f"no checkpoint yet, there is one every val_every={self.config['val_every']} steps"
        elif step == trainer.max_steps:  # nothing is left to train
            advice = f"python -m scripts.evaluate ckpt={run} evaluates it"
        by_signal = isinstance(exception, SIGTERMException) and exception.code
        cause = f"by {signal.Signals(exception.code - 128).name} " if by_signal else ""
        print(f"stopped {cause}at step {step}; {advice}", file=sys.stderr)
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "test":
            raise SystemExit(128 + signal.SIGINT) from None  # Lightning would end with 1


class DataWait(Profiler):
    """Adds up the seconds in which training waits for its next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = self._since = 0.0

    def start(self, action_name: str) -> None:
        self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._since


class StepStatistics(Callback):
    """Logs every `log_every_n_steps` steps, as means since the last time, validation and its text samples left out,
    writing checkpoints not:

    train/step_time: seconds.
    train/tokens_per_second: over all devices.
    train/data_wait: share of the time in which the process waited for a batch. A GPU may have had work meanwhile.
    train/mfu: model FLOPs utilisation, the FLOPs of `SequenceModel.flops_per_token` over the peak of the GPU
        (training/peaks.py). Only for half precision on a GPU whose peak is known.
    train/gpu_memory: GiB, the most that was allocated at once.
    """

    def __init__(self, data_wait: DataWait) -> None:
        self.data_wait = data_wait

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = None
        if pl_module.device.type == "cuda" and trainer.precision != "32-true":
            name = torch.cuda.get_device_name(pl_module.device)
            self._peak = peak_flops(name)
            if self._peak is None:
                rank_zero_warn(f"train/mfu: the peak of {name!r} is unknown; known are {', '.join(PEAK_FLOPS)}")
        self._logged_step = trainer.global_step
        self._restart()

    def _restart(self) -> None:
        self._since, self._waited, self._tokens = time.perf_counter(), self.data_wait.seconds, 0

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
        seconds = time.perf_counter() - self._since
        speed = self._tokens / seconds
        pl_module.log("train/step_time", seconds / steps)
        pl_module.log("train/tokens_per_second", speed * trainer.world_size, prog_bar=True)
        pl_module.log("train/data_wait", (self.data_wait.seconds - self._waited) / seconds)
        if self._peak is not None:
            flops = pl_module.model.flops_per_token(batch["input_ids"].shape[1])
            pl_module.log("train/mfu", speed * flops / self._peak, prog_bar=True)
        if pl_module.device.type == "cuda":
            pl_module.log("train/gpu_memory", torch.cuda.max_memory_allocated(pl_module.device) / 2**30)
        self._logged_step = trainer.global_step
        self._restart()


def _within_training(trainer: Trainer) -> bool:
    """Whether a validation belongs to a training, and is not the check before it."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


class TextSamples(Callback):
    """After each validation, continues the beginnings of some validation blocks: samples.txt, and wandb if it is on."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "samples.txt"

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _within_training(trainer):
            return
        data = trainer.datamodule
        prompts = data.val_data[range(min(SAMPLES, len(data.val_data)))]["input_ids"][:, :PROMPT]
        with trainer.precision_plugin.forward_context():  # on all ranks alike, which may share the weights out
            tokens = continuation(pl_module.model, prompts.to(pl_module.device))
        if not trainer.is_global_zero:
            return
        rows = [[data.tokenizer.decode(part) for part in pair] for pair in zip(prompts, tokens, strict=True)]
        title = f"--- step {trainer.global_step}\n"
        before = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        before = before.partition(title)[0]  # a run that was resumed comes by again
        text = "".join(f"{title}{prompt}|{added}\n" for prompt, added in rows)
        with replacing(self.file) as file:
            file.write((before + text).encode())
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_text("samples", columns=["prompt", "continuation"], data=rows)


def continuation(model: torch.nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """CONTINUATION tokens [B, CONTINUATION] behind `prompts` [B, T], drawn from the model's distribution."""
    draws = torch.Generator(prompts.device).manual_seed(0)  # of its own: training is the same with and without samples
    tokens, states = [prompts], None
    for _ in range(CONTINUATION):
        logits, states = model(tokens[-1], states, return_states=True)
        tokens.append(torch.multinomial(logits[:, -1].float().softmax(-1), 1, generator=draws))
    return torch.cat(tokens[1:], dim=1).cpu()
