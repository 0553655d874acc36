"""What happens on SIGTERM, SIGUSR1 and Ctrl-C: the step under way is finished and saved, and the run ends."""

import os
import signal
import threading
from functools import partial
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from training._compat import end_by_sigterm, handle_sigterm_by


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
        handle_sigterm_by(trainer, self._handler)
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
            end_by_sigterm(trainer, self._received_by_any(trainer))

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
    """Return whether this is the thread that alone may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()
