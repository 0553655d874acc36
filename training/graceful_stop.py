"""On SIGTERM, SIGUSR1 or Ctrl-C, a run finishes and saves its current step, and ends."""

import os
import signal
import threading
from functools import partial
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from training._compat import end_by_sigterm, handle_sigterm_by


class GracefulStop(Callback):
    """Ends training after the current step, and saves it, in all processes of a run.

    SIGTERM or SIGUSR1, which clusters send before they end a job, stops the run. With one process, so does the first
    Ctrl-C; the second one ends it at once.

    Lightning 2.6 has its own handler, which sets a flag that makes its loops raise SIGTERMException. It is not usable
    here for three reasons. It sets the flag at once, even between accumulated batches, where a run cannot be resumed.
    It notifies the other processes by a collective inside the handler, which can deadlock with another collective. And
    it checks for the signal in every batch, which stalls the GPU. Here, the flag is set at the end of a step, and
    several processes agree on it in logged steps, in which the GPU is synchronized anyway.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._signal: signal.Signals | None = None  # the received signal
        self._handler = partial(self._on_request, trainer)
        handle_sigterm_by(trainer, self._handler)
        current = signal.getsignal(signal.SIGUSR1)  # after a failed job of a sweep, Lightning leaves our handler
        if _in_main_thread() and (current is signal.SIG_DFL or _is_ours(current)):
            signal.signal(signal.SIGUSR1, self._handler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs ignore Ctrl-C
        if trainer.world_size == 1 and default and _in_main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, number: int, _: Any) -> None:
        self._signal = signal.SIGINT
        self._restore_interrupts()
        # os.write, because the signal may have interrupted a print
        os.write(2, b"\nstopping when this step is done; Ctrl-C again stops at once\n")

    def _restore_interrupts(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_request(self, trainer: Trainer, number: int, _: Any) -> None:
        self._signal = signal.Signals(number)
        if trainer.state.fn == "fit":
            return
        if trainer.strategy.launcher is not None:  # torchrun and SLURM signal all processes themselves
            trainer.strategy.launcher.kill(number)
        signal.signal(number, signal.SIG_DFL)  # there is nothing to save outside of training
        os.kill(os.getpid(), number)

    def _received_by_any(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self._signal is not None, all=False)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # an accumulated batch
            return
        self._step = trainer.global_step
        if trainer.world_size == 1 or self._step % trainer.log_every_n_steps == 0:
            end_by_sigterm(trainer, self._received_by_any(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._received_by_any(trainer):  # the signal came after the last check
            raise SIGTERMException

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_interrupts()
        if isinstance(exception, SIGTERMException) and trainer.local_rank == 0:
            # The other ranks exit with 0, because Lightning kills all processes as soon as one fails.
            exception.code = 128 + (self._signal or signal.SIGTERM)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore_interrupts()
        if signal.getsignal(signal.SIGUSR1) is self._handler:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _is_ours(handler: Any) -> bool:
    """Return whether a signal handler belongs to a GracefulStop."""
    return isinstance(handler, partial) and getattr(handler.func, "__func__", None) is GracefulStop._on_request


def _in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()
