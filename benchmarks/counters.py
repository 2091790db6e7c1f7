"""Counters that Linux keeps of this process: bytes written to sockets, resident and shared memory, CPU seconds."""

from __future__ import annotations

import resource
from collections.abc import Collection
from pathlib import Path


def written_nbytes() -> int:
    """Bytes this process handed to write calls (`wchar` of /proc/self/io).

    gloo sends with `writev` on a stream socket, which this counter sees; nothing else is written during a step, so no
    correction is made. A rank's barriers at both ends of a measurement add some hundred bytes.
    """
    return _field("/proc/self/io", "wchar:")


def interfaces_nbytes() -> int:
    """Bytes that have left this host over its network interfaces, including packet headers."""
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields.split()[8]) for name, _, fields in lines if name.strip() != "lo")


def resident_peak_nbytes() -> int:
    """Largest resident set so far, or since `reset_resident_peak`."""
    return _field("/proc/self/status", "VmHWM:") * 1024


def reset_resident_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_nbytes_at(starts: Collection[int]) -> int:
    """Resident bytes of the mappings that begin at these addresses: what of them was ever written."""
    total, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            is_wanted = int(first.partition("-")[0], 16) in starts
        elif first == "Rss:" and is_wanted:
            total += int(rest[0]) * 1024
    return total


def shared_nbytes() -> int:
    """This process's share of mapped shared memory: a page that two ranks map counts half for each."""
    return _field("/proc/self/smaps_rollup", "Pss_Shmem:") * 1024


def cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _field(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise KeyError(f"{path} has no line {key}")
