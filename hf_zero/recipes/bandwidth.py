"""How fast ranks exchange values and devices copy, beside what the link can do where that is known."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.comm import Bus, Comm, Counters


ON_DEVICE_NBYTES, ON_CPU_NBYTES = 256 * 2**20, 32 * 2**20
TIMES = 5
# Bytes per second of one lane in one direction, by generation of PCIe, after its encoding.
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class Rate:
    """A measured bandwidth.

    Args:
        nbytes_per_second (`float`): What was measured.
        limit (`float`, *optional*): What the link can do, in the same unit.
        of (`str`): What it is the limit of.
    """

    nbytes_per_second: float
    limit: float | None = None
    of: str = ""

    def text(self) -> str:
        """Returns it in words."""
        said = f"{self.nbytes_per_second / 1e9:.1f} GB/s"
        return f"{said} of {self.limit / 1e9:.1f} ({self.of})" if self.limit else said


def gather_rate(comm: Comm) -> Rate:
    """Measures what a rank receives in an all-gather, per second. All ranks call it."""
    full, shard = _buffer(comm)
    return _exchanged(comm, full, lambda: comm.all_gather(full, shard, what="a measurement").wait())


def reduce_rate(comm: Comm) -> Rate:
    """Measures what a rank receives in a reduce-scatter, per second. All ranks call it."""
    full, shard = _buffer(comm)

    def reduce() -> None:
        comm.reduce_scatter(full, shard, dtype=full.dtype, accumulate=False, what="a measurement").wait()

    return _exchanged(comm, full, reduce)


def shared_memory_rate(comm: Comm) -> Rate:
    """Measures reads of memory that all ranks of this host map. All ranks call it; they have such memory."""
    assert comm.shared_memory is not None
    common = comm.shared_memory.common(_nbytes(comm.device) // 4, torch.float32)
    own = torch.empty_like(common)
    return _rate(common.nbytes, lambda: own.copy_(common), comm.device)


def copy_rate(device: torch.device) -> Rate:
    """Measures copies inside of the device's memory. Each byte is read once and written once."""
    source = torch.zeros(_nbytes(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(source.nbytes, lambda: target.copy_(source), device)


def transfer_rate(device: torch.device, way: str) -> Rate:
    """Measures copies between a device and page-locked memory of the host.

    Args:
        device (`torch.device`): The device.
        way (`str`): "up" to the device, or "down" to the host.
    """
    bus = Bus(device, Counters())
    host = bus.empty(_nbytes(device), torch.uint8)
    here = torch.zeros(host.numel(), dtype=torch.uint8, device=device)

    def copy() -> None:
        (bus.up(here, host) if way == "up" else bus.down(host, here)).synchronize()

    found, link = _rate(host.nbytes, copy, device), pcie_of(device)
    return found if link is None else Rate(found.nbytes_per_second, *link)


def pcie_of(device: torch.device) -> tuple[float, str] | None:
    """Returns the bytes per second of a device's link to the host in one direction, and its name; `None` where nobody
    tells."""
    if device.type != "cuda":
        return None
    query = ["--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"]
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        answer = subprocess.run(
            ["nvidia-smi", f"--id={uuid}", *query], capture_output=True, text=True, timeout=10, check=True
        )
        generation, width = map(int, answer.stdout.strip().split(","))
        return PCIE_LANE[generation] * width, f"PCIe {generation} x{width}"
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, AttributeError):
        return None


def _nbytes(device: torch.device) -> int:
    return ON_CPU_NBYTES if device.type == "cpu" else ON_DEVICE_NBYTES


def _buffer(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the whole, and this rank's range of it, as the engine takes them."""
    full = comm.empty(_nbytes(comm.device) // 4 // comm.num_ranks * comm.num_ranks, torch.float32).zero_()
    return full, full.chunk(comm.num_ranks)[comm.rank]


def _exchanged(comm: Comm, full: torch.Tensor, act: Callable[[], object]) -> Rate:
    comm.barrier()
    return _rate(full.nbytes * (comm.num_ranks - 1) // comm.num_ranks, act, comm.device)


def _rate(nbytes: int, act: Callable[[], object], device: torch.device) -> Rate:
    """The fastest of several times, after one that warms up."""
    backend: Any = torch.get_device_module(device)
    seconds = []
    for _ in range(TIMES + 1):
        backend.synchronize()
        begin = time.perf_counter()
        act()
        backend.synchronize()
        seconds.append(time.perf_counter() - begin)
    return Rate(nbytes / min(seconds[1:]))
