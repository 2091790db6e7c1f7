"""Signals that stop training. The ranks agree on them at the end of a step, save a checkpoint, and exit."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import TrainerCallback


logger = logging.getLogger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
# A signal to all processes (systemd, scancel) reaches a rank twice, since the launcher forwards its own.
TOGETHER_SECONDS = 1.0
NOT_HANDLED = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(SystemExit):
    """Raised when a signal has stopped training and a checkpoint is saved. The exit code is 128 + the signal number,
    as in a shell."""

    def __init__(self, number: int, folder: str):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.folder = folder


def is_another(number: int, since: float | None, now: float) -> bool:
    """Returns whether a signal that arrives at `now`, and first arrived at `since` (`None`: never), counts as a second
    one. Except for SIGINT, arrivals within `TOGETHER_SECONDS` count as one signal."""
    return since is not None and (number == signal.SIGINT or now - since > TOGETHER_SECONDS)


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and stops when any rank receives one of `signals`: by default SIGTERM and SIGUSR1.

    Handlers of the user are kept. A second signal of the same kind ends the process immediately. Except for SIGINT,
    signals within a second count as one.
    """

    def __init__(self, trainer):
        self.signals: tuple[signal.Signals, ...] = STOPPING
        self.remedy = "continue with resume_from_checkpoint=True"  # for the log line after saving
        self._trainer = trainer
        self._received = 0
        self._since: dict[int, float] = {}  # time of the first signal, by number
        self._stopping = 0  # the signal that the ranks have agreed on

    @contextmanager
    def received(self) -> Iterator[None]:
        """Installs handlers for the signals that have no other handler."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python allows handlers only in the main thread
            return
        before = {number: signal.getsignal(number) for number in self.signals}
        before = {number: handler for number, handler in before.items() if handler in NOT_HANDLED}
        if before:  # otherwise an outer context has installed them: keep the signals that it has received
            self._received = self._stopping = 0
            self._since.clear()
        for number in before:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        now = time.monotonic()
        if is_another(number, self._since.get(number), now):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = number
        self._since.setdefault(number, now)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGINT and self._trainer.args.local_process_index == 0:
            # not print: the interrupted code may be printing
            os.write(2, b"\nCtrl-C: finishing the current step and saving; press again to stop immediately\n")

    def agreed(self) -> int:
        """Returns the signal that any rank has received, the same on all ranks, or 0. A collective."""
        comm = self._trainer._engine.comm.on_host
        own = torch.tensor([self._received], dtype=torch.int32)
        return int(comm.all_gather_vector(own, what="a vote on signals").max())

    def on_step_end(self, args, state, control, **kwargs):
        self._stopping = self.agreed()
        if self._stopping:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # time may be short, and the metric could prevent saving

    def on_save(self, args, state, control, **kwargs):
        if self._stopping:
            folder = self._trainer.wait_for_checkpoint()
            if state.is_world_process_zero:
                logger.warning(
                    "%s: saved %s at step %d; %s",
                    signal.Signals(self._stopping).name,
                    folder,
                    state.global_step,
                    self.remedy,
                )
            raise Stopped(self._stopping, str(folder))
