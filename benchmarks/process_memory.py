"""What a process holds above its state before, as Linux sees it: resident, and private and shared pages correctly.

The resident set counts a page that two processes map in full for each, and pages of mapped files too. So a second
figure is sampled while the work goes on: anonymous pages (`RssAnon`) and this process's share of shared memory
(`Pss_Shmem`: a page that two ranks map counts half for each). The sampler is a small process of its own, because a
thread would wait wherever the work holds the interpreter. The share takes a walk over all pages, so it is looked at
for a tenth of the time only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

from benchmarks import counters


_SAMPLER = """
import select, sys, threading, time
folder, over, samples = f"/proc/{sys.argv[1]}", threading.Event(), 0
def field(name, key):
    with open(f"{folder}/{name}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024
def follow_shared():
    global shared
    start = time.perf_counter()
    while not over.wait(max(0.01, 9 * (time.perf_counter() - start))):
        start = time.perf_counter()
        shared = field("smaps_rollup", "Pss_Shmem:")
shared = field("smaps_rollup", "Pss_Shmem:")
before = peak = field("status", "RssAnon:") + shared
thread = threading.Thread(target=follow_shared)
thread.start()
print(before, flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    peak, samples = max(peak, field("status", "RssAnon:") + shared), samples + 1
over.set()
thread.join()
last = field("status", "RssAnon:") + field("smaps_rollup", "Pss_Shmem:")
print(max(peak, last), last, samples, flush=True)
"""


def trim_heap() -> None:
    """Gives what was freed back to the system, so that nothing freed before hides what is taken next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class ProcessMemory:
    """Peaks between entry and exit, in bytes above what was held at entry.

    Args:
        sample: also follow private and shared pages, every 10 ms; it costs a part of a core.
    """

    def __init__(self, *, sample: bool = True) -> None:
        self.sample = sample
        self.owned_nbytes: int | None = None
        self.owned_kept_nbytes: int | None = None  # still held at the exit
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
            trim_heap()
            answer, _ = self.sampler.communicate("stop\n")
            peak, last, self.num_samples = map(int, answer.split())
            self.owned_nbytes, self.owned_kept_nbytes = peak - self.owned_before, last - self.owned_before

    def to_dict(self) -> dict:
        return {
            "resident_nbytes": self.resident_nbytes,
            "owned_nbytes": self.owned_nbytes,
            "owned_kept_nbytes": self.owned_kept_nbytes,
            "num_samples": self.num_samples,
        }
