"""SIGTERM, SIGUSR1 and Ctrl-C: the current step is finished and saved, and the run ends."""

import os
import signal
import threading
from functools import partial
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from training._compat import end_by_sigterm, handle_sigterm_by


class GracefulStop(Callback):
    """Ends training after the current step, and saves it, on SIGTERM or on SIGUSR1, which clusters send ahead of time,
    in all processes of the run. With one process the first Ctrl-C does the same; the second one ends it at once.

    Lightning 2.6 has a flag for the signal, at which its loops raise SIGTERMException. Its own handler sets the flag at
    once, also between accumulated batches, where no run can be resumed. It tells the other processes by a collective
    within the handler, which can meet another collective, so that all wait forever. And it checks for the signal in
    every batch, for which a GPU waits. Here the flag is set when a step ends; several processes agree on it in logged
    steps, for which GPUs wait anyway.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._signal: signal.Signals | None = None  # that was received
        self._handler = partial(self._on_request, trainer)
        handle_sigterm_by(trainer, self._handler)
        heard_by = signal.getsignal(signal.SIGUSR1)  # Lightning leaves ours where a job of a sweep has failed
        if _in_main_thread() and (heard_by is signal.SIG_DFL or _is_ours(heard_by)):
            signal.signal(signal.SIGUSR1, self._handler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs ignore Ctrl-C
        if trainer.world_size == 1 and heard and _in_main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, number: int, _: Any) -> None:
        self._signal = signal.SIGINT
        self._let_go_of_interrupts()
        # not print, which the signal may have interrupted
        os.write(2, b"\nstopping when this step is done; Ctrl-C again stops at once\n")

    def _let_go_of_interrupts(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_request(self, trainer: Trainer, number: int, _: Any) -> None:
        self._signal = signal.Signals(number)
        if trainer.state.fn == "fit":
            return
        if trainer.strategy.launcher is not None:  # torchrun and SLURM end processes themselves
            trainer.strategy.launcher.kill(number)
        signal.signal(number, signal.SIG_DFL)  # outside of training there is nothing to save
        os.kill(os.getpid(), number)

    def _received_by_any(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self._signal is not None, all=False)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # the batch is accumulated
            return
        self._step = trainer.global_step
        if trainer.world_size == 1 or self._step % trainer.log_every_n_steps == 0:
            end_by_sigterm(trainer, self._received_by_any(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._received_by_any(trainer):  # after the last step that was asked
            raise SIGTERMException

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go_of_interrupts()
        if isinstance(exception, SIGTERMException) and trainer.local_rank == 0:
            # The others end with 0: Lightning kills a run if one process fails, and one alone may get SIGTERM.
            exception.code = 128 + (self._signal or signal.SIGTERM)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go_of_interrupts()
        if signal.getsignal(signal.SIGUSR1) is self._handler:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _is_ours(handler: Any) -> bool:
    """Return whether a handler is that of a GracefulStop."""
    return isinstance(handler, partial) and getattr(handler.func, "__func__", None) is GracefulStop._on_request


def _in_main_thread() -> bool:
    """Return whether this thread may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()
