"""SIGTERM and SIGUSR1: the ranks agree at the end of a step, save, and leave."""

import logging
import signal
import threading

import torch
from transformers import TrainerCallback


logger = logging.getLogger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(SystemExit):
    """Training ended because of a signal, with everything saved. The exit code is 128 + the signal's number, as a
    shell gives it."""

    def __init__(self, number: int, folder: str):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.folder = folder


class StopOnSignal(TrainerCallback):
    """Saves and stops when any rank was sent SIGTERM or SIGUSR1.

    A handler of the user's own is left in place. A second signal of the same kind acts as if there were no handler.

    Args:
        trainer (`ZeroTrainerMixin`): whose checkpoints are saved.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._received = 0
        self._stopping = 0  # the signal that the ranks have agreed on

    def install(self) -> list[int]:
        """Takes the signals that nobody else handles; returns them."""
        if threading.current_thread() is not threading.main_thread():
            return []  # Python lets no other thread have handlers
        taken = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_DFL]
        self._received = self._stopping = 0
        for number in taken:
            signal.signal(number, self._receive)
        return taken

    @staticmethod
    def remove(taken: list[int]) -> None:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, frame) -> None:
        self._received = number
        signal.signal(number, signal.SIG_DFL)

    def on_step_end(self, args, state, control, **kwargs):
        comm = self._trainer.zero_engine.comm
        if comm.device.type != "cpu":
            comm = comm.aside("signals")  # a vote on the device would make the host wait for the step
        votes = comm.all_gather_vector(torch.tensor([self._received], dtype=torch.int32, device=comm.device))
        self._stopping = int(votes.max())
        if self._stopping:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may be little time, and it could decide against saving

    def on_save(self, args, state, control, **kwargs):
        if self._stopping:
            folder = self._trainer.wait_for_checkpoint()
            if state.is_world_process_zero:
                logger.warning(
                    "%s: saved %s at step %d; go on with resume_from_checkpoint=True",
                    signal.Signals(self._stopping).name,
                    folder,
                    state.global_step,
                )
            raise Stopped(self._stopping, str(folder))
