"""Signals that end a training. The ranks agree on them at the end of a step, save, and exit."""

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
# A signal to all processes (systemd, scancel) reaches a rank twice: its launcher hands on what it gets itself.
TOGETHER_SECONDS = 1.0
NOT_HANDLED = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(SystemExit):
    """The end of a training by a signal, with everything saved. The exit code is 128 + the signal's number, as a shell
    gives it."""

    def __init__(self, number: int, folder: str):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.folder = folder


def is_another(number: int, since: float | None, now: float) -> bool:
    """Returns whether a signal that first came at `since` (`None` for never) was sent a second time."""
    return since is not None and (number == signal.SIGINT or now - since > TOGETHER_SECONDS)


class StopOnSignal(TrainerCallback):
    """Saves and stops when any rank was sent one of `signals`: SIGTERM and SIGUSR1, and what is added to them.

    A handler of the user's own is left in place. A second signal of the same kind ends the process at once; other than
    of SIGINT, those that come within a second are one.
    """

    def __init__(self, trainer):
        self.signals: tuple[signal.Signals, ...] = STOPPING
        self.remedy = "go on with resume_from_checkpoint=True"  # said when it has saved
        self._trainer = trainer
        self._received = 0
        self._since: dict[int, float] = {}  # when each signal came first
        self._stopping = 0  # the signal that the ranks have agreed on

    @contextmanager
    def received(self) -> Iterator[None]:
        """Handles, while it is entered, the signals that have no other handler."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets no other thread have handlers
            return
        before = {number: signal.getsignal(number) for number in self.signals}
        before = {number: handler for number, handler in before.items() if handler in NOT_HANDLED}
        if before:  # else they are taken already, and what has come is not forgotten
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
            # not print: what is interrupted may be printing
            os.write(2, b"\nCtrl-C: the step under way is finished and saved; once more stops at once\n")

    def agreed(self) -> int:
        """Returns the signal that a rank was sent, the same on all ranks; 0 for none. Collective."""
        comm = self._trainer._engine.comm.on_host
        own = torch.tensor([self._received], dtype=torch.int32)
        return int(comm.all_gather_vector(own, what="a vote on signals").max())

    def on_step_end(self, args, state, control, **kwargs):
        self._stopping = self.agreed()
        if self._stopping:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may be little time, and it could decide against saving

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
