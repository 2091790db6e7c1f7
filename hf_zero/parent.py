"""Ends a rank when its launcher has ended, since a launcher that is killed cannot end its ranks.

It imports nothing that takes time, and `recipes/launch.py` runs it by its path: the ranks import torch for seconds,
and the launcher may end meanwhile.
"""

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import parent_process


_LAUNCHED = b"TORCHELASTIC_RUN_ID="  # what torch's launcher puts into the environment of its ranks
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # prctl(2)


def _starts_ranks(process: int) -> bool:
    """Whether a process may be a launcher. Ranks, and what they have started themselves, have been launched."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return not any(entry.startswith(_LAUNCHED) for entry in file.read().split(b"\0"))
    except OSError:  # not Linux, or the process is another user's
        return False


# When this was imported: by the time of `end_with_parent` the launcher may have ended.
PARENT, _SELF = os.getppid(), os.getpid()
_IS_STARTED_BY_LAUNCHER = _starts_ranks(PARENT)


def end_with_parent(parent: int = PARENT) -> None:
    """Lets the kernel kill this process when its parent ends. Only Linux can; elsewhere nothing happens.

    To the kernel the parent is the thread that has started this process, so launchers start theirs from a thread that
    lasts: torch's does it from the one that waits for the ranks.

    Args:
        parent (`int`): the process id of the launcher. If it is no longer this process's parent, it has ended.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_launcher() -> None:
    """As `end_with_parent` where torch's launcher (torchrun, `accelerate launch`) is the parent, and where nobody has
    said otherwise already. What a rank has started itself inherits the environment, and is left alone: it may have
    been started from a thread that ends."""
    if _is_launched() and not _death_signal():
        end_with_parent()


def _is_launched() -> bool:
    is_started = "TORCHELASTIC_RUN_ID" in os.environ and _IS_STARTED_BY_LAUNCHER
    return is_started and os.getpid() == _SELF and parent_process() is None


def tell_launcher(error: BaseException) -> None:
    """Lets torch's launcher hear of the error that ends this process. What it says last then has the error's text,
    which otherwise stands far above."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or not _is_launched() or os.path.exists(path):  # torch's `record` has written it
        return
    text = f"{type(error).__name__}: {error}"
    content = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": content}, file)


def tell_launcher_of(module: str) -> None:
    """Does that for errors of a module, and of classes derived from them, that nobody catches."""
    show = sys.excepthook

    def tell(kind, error, trace) -> None:
        if any(base.__module__ == module for base in kind.__mro__):
            tell_launcher(error)
        show(kind, error, trace)

    if _is_launched():
        sys.excepthook = tell


def _death_signal() -> int:
    """What the kernel sends when the parent ends; 0 for nothing."""
    if sys.platform != "linux":
        return 0
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value
