"""What a number was measured on: machine, versions, date, and the environment that changes speed."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


_PACKAGES = ("hf_zero", "torch", "transformers", "accelerate", "deepspeed", "numpy")
_ENVIRONMENT = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "LD_PRELOAD")


def describe_machine() -> dict:
    load = os.getloadavg()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _line("/proc/cpuinfo", "model name"),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_line("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "load_at_start": round(load, 2),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _ENVIRONMENT or name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
        },
    }


def one_line(machine: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['date']}; {machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB, "
        f"load {machine['load_at_start']} at start; Python {machine['python']}, {versions}"
    )


def describe_gpu(device: str) -> str:
    if device == "cpu":
        return "none, run on the CPU"
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no CUDA device; --dry tries the program on the CPU")
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _line(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
