"""What a process holds above its state before, as Linux sees it: resident, and private and shared pages correctly.

The resident set counts a page that two processes map in full for each, and pages of mapped files too. So a second
figure is sampled while the work goes on: anonymous pages and this process's share of shared memory (a page that two
ranks map counts half for each), out of `smaps_rollup`. The sampler is a small process of its own, because a thread
would wait wherever the work holds the interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

from benchmarks import counters


_SAMPLER = """
import select, sys
path, peak, samples = f"/proc/{sys.argv[1]}/smaps_rollup", 0, 0
def read():
    with open(path) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024
before = peak = read()
print(before, flush=True)
while not select.select([sys.stdin], [], [], 0.03)[0]:
    peak, samples = max(peak, read()), samples + 1
print(max(peak, read()), samples, flush=True)
"""


def trim_heap() -> None:
    """Gives what was freed back to the system, so that nothing freed before hides what is taken next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class ProcessMemory:
    """Peaks between entry and exit, in bytes above what was held at entry.

    Args:
        sample: also follow private and shared pages, every 30 ms; it costs a part of a core.
    """

    def __init__(self, *, sample: bool = True) -> None:
        self.sample = sample
        self.owned_nbytes: int | None = None
        self.num_samples = 0

    def __enter__(self) -> ProcessMemory:
        if self.sample:
            command = [sys.executable, "-S", "-c", _SAMPLER, str(os.getpid())]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.sampler = subprocess.Popen(command, **pipes)
            self.owned_before = int(self.sampler.stdout.readline())
        counters.reset_resident_peak()
        self.resident_before = counters.resident_nbytes()
        return self

    def __exit__(self, *_) -> None:
        self.resident_nbytes = counters.resident_peak_nbytes() - self.resident_before
        if self.sample:
            answer, _ = self.sampler.communicate("stop\n")
            peak, samples = answer.split()
            self.owned_nbytes, self.num_samples = int(peak) - self.owned_before, int(samples)

    def to_dict(self) -> dict:
        return {
            "resident_nbytes": self.resident_nbytes,
            "owned_nbytes": self.owned_nbytes,
            "num_samples": self.num_samples,
        }
