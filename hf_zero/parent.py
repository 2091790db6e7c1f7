"""Ends a rank when its launcher ends. A launcher that is killed cannot end its ranks itself.

This module has only fast imports, and `recipes/launch.py` runs it by its path: importing torch takes seconds, during
which the launcher may already have ended.
"""

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import parent_process


_LAUNCHED = b"TORCHELASTIC_RUN_ID="  # set by torch's launcher in the environment of its ranks
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # prctl(2)


def _starts_ranks(process: int) -> bool:
    """Whether a process may be a launcher: ranks and their child processes have this variable, launchers do not."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return not any(entry.startswith(_LAUNCHED) for entry in file.read().split(b"\0"))
    except OSError:  # not Linux, or the process is another user's
        return False


# Recorded at import, because the launcher may have ended when `end_with_parent` is called.
PARENT, _SELF = os.getppid(), os.getpid()
_IS_STARTED_BY_LAUNCHER = _starts_ranks(PARENT)


def end_with_parent(parent: int = PARENT) -> None:
    """Makes the kernel kill this process when its parent ends. Does nothing on systems other than Linux.

    For the kernel, the parent is the thread that started this process, so launchers must start processes from a thread
    that keeps running. torch's launcher uses the one that waits for the ranks.

    Args:
        parent (`int`): process id of the launcher. If it is no longer the parent, the launcher has already ended.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_launcher() -> None:
    """Like `end_with_parent`, but only if the parent is torch's launcher (torchrun, `accelerate launch`) and no other
    death signal is set. Processes started by a rank inherit its environment but are not affected, because the thread
    that started them may end first."""
    if _is_launched() and not _death_signal():
        end_with_parent()


def _is_launched() -> bool:
    is_started = "TORCHELASTIC_RUN_ID" in os.environ and _IS_STARTED_BY_LAUNCHER
    return is_started and os.getpid() == _SELF and parent_process() is None


def tell_launcher(error: BaseException) -> None:
    """Reports the exception that ends this process to torch's launcher, whose final message then includes its text.
    Otherwise the text appears only far above in the log."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or not _is_launched() or os.path.exists(path):  # torch's `record` has already written it
        return
    text = f"{type(error).__name__}: {error}"
    content = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": content}, file)


def tell_launcher_of(module: str) -> None:
    """Installs an exception hook that calls `tell_launcher` for uncaught exceptions whose class, or one of its base
    classes, is defined in `module`."""
    show = sys.excepthook

    def tell(kind, error, trace) -> None:
        if any(base.__module__ == module for base in kind.__mro__):
            tell_launcher(error)
        show(kind, error, trace)

    if _is_launched():
        sys.excepthook = tell


def _death_signal() -> int:
    """Returns the signal sent when the parent ends, or 0 for none."""
    if sys.platform != "linux":
        return 0
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value
