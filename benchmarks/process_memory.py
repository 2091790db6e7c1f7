"""How far a process's private pages and its share of shared pages grow, as Linux counts them.

A small process of its own samples, because a thread would wait wherever the work holds the interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys


# A page that two processes map counts half for each. Reading takes a walk over all pages.
_SAMPLER = """
import select, sys
def nbytes():
    with open(f"/proc/{sys.argv[1]}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
before = peak = nbytes()
print(before, flush=True)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    peak = max(peak, nbytes())
last = nbytes()
print(max(peak, last) - before, last - before, flush=True)
"""


def trim_heap() -> None:
    """Returns freed memory to the system, so that it does not hide what is taken next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class ProcessMemory:
    """Bytes above those held at entry: `peak_nbytes` until the exit, and `kept_nbytes`, which are held then."""

    peak_nbytes: int
    kept_nbytes: int

    def __enter__(self) -> ProcessMemory:
        command = [sys.executable, "-S", "-c", _SAMPLER, str(os.getpid())]
        self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._sampler.stdout.readline()
        return self

    def __exit__(self, *_) -> None:
        trim_heap()
        answer, _ = self._sampler.communicate("stop\n")
        self.peak_nbytes, self.kept_nbytes = map(int, answer.split())
