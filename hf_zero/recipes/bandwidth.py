"""How fast ranks exchange values and devices copy, beside what the link can do where that is known. What arrives last
is compared with what was sent."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.comm import Bus, Comm, Counters


ON_DEVICE_NBYTES, ON_CPU_NBYTES = 256 * 2**20, 32 * 2**20
TIMES = 5
# A prime: a block that is written to another block's place then has other values.
PERIOD = 251
MEAN_ROUNDING = 1e-5  # of a mean of whole numbers in fp32, which a backend may take in any order
# Bytes per second of one lane in one direction, by generation of PCIe, after its encoding.
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


class Wrong(Exception):
    """A probe has found that something is wrong. The message says what."""


@dataclass(frozen=True)
class Rate:
    """A measured bandwidth."""

    nbytes_per_second: float  # what was measured
    limit: float | None = None  # what the link can do, in the same unit
    of: str = ""  # what it is the limit of

    def text(self) -> str:
        """Returns it in words."""
        said = f"{self.nbytes_per_second / 1e9:.1f} GB/s"
        return f"{said} of {self.limit / 1e9:.1f} ({self.of})" if self.limit else said


def gather_rate(comm: Comm) -> Rate:
    """Measures what a rank receives in an all-gather, per second. All ranks call it."""
    full, shard = _buffer(comm)

    def gather() -> None:
        comm.all_gather(full, shard, what="a measurement").wait()

    rate = _exchanged(comm, full, gather)
    full.fill_(-1.0)
    shard.copy_(_pattern(shard, comm.rank))
    _once(comm, gather)
    for rank, found in enumerate(full.chunk(comm.num_ranks)):
        _compare(found, _pattern(found, rank), f"all-gather: range of rank {rank}")
    return rate


def reduce_rate(comm: Comm) -> Rate:
    """Measures what a rank receives in a reduce-scatter, per second. All ranks call it."""
    full, shard = _buffer(comm)

    def reduce() -> None:
        comm.reduce_scatter(full, shard, dtype=full.dtype, accumulate=False, what="a measurement").wait()

    rate = _exchanged(comm, full, reduce)
    wanted = _pattern(full, 0).chunk(comm.num_ranks)[comm.rank] + PERIOD * (comm.num_ranks - 1) / 2
    full.copy_(_pattern(full, comm.rank))
    _once(comm, reduce)
    _compare(shard, wanted, f"reduce-scatter: range of rank {comm.rank}", MEAN_ROUNDING)
    return rate


def shared_memory_rate(comm: Comm) -> Rate:
    """Measures reads of memory that all ranks of this host map. All ranks call it; they have such memory."""
    assert comm.shared_memory is not None
    common = comm.shared_memory.common(_nbytes(comm.device) // 4, torch.float32)
    own = torch.empty_like(common)
    written = common.tensor_split(comm.num_ranks)[comm.rank]
    written.copy_(_pattern(written, comm.rank))
    comm.shared_memory.barrier()
    rate = _rate(common.nbytes, lambda: own.copy_(common), comm.device)
    for rank, found in enumerate(own.tensor_split(comm.num_ranks)):
        _compare(found, _pattern(found, rank), f"shared memory: range of rank {rank}")
    return rate


def copy_rate(device: torch.device) -> Rate:
    """Measures copies inside of the device's memory. Each byte is read once and written once."""
    source = torch.empty(_nbytes(device), dtype=torch.uint8, device=device)
    source.copy_(_pattern(source, 0))
    target = torch.zeros_like(source)
    rate = _rate(source.nbytes, lambda: target.copy_(source), device)
    _compare(target, source, "copies in memory")
    return rate


def transfer_rate(device: torch.device, way: str) -> Rate:
    """Measures copies between a device and page-locked memory of the host: "up" to the device, or "down" to
    the host."""
    bus = Bus(device, Counters())
    host = bus.empty(_nbytes(device), torch.uint8).zero_()
    here = torch.zeros(host.numel(), dtype=torch.uint8, device=device)
    source, target = (host, here) if way == "up" else (here, host)
    source.copy_(_pattern(source, 0))

    def copy() -> None:
        (bus.up(here, host) if way == "up" else bus.down(host, here)).synchronize()

    found, link = _rate(host.nbytes, copy, device), _pcie_of(device)
    _compare(target, _pattern(target, 0), f"copies {way}")
    return found if link is None else Rate(found.nbytes_per_second, *link)


def _pcie_of(device: torch.device) -> tuple[float, str] | None:
    """Returns the bytes per second of a device's link to the host one way, and its name; `None` where nobody tells."""
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


def _pattern(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Whole numbers that tell the place in a tensor, and the rank, on its device."""
    return (torch.arange(like.numel(), dtype=torch.int32, device=like.device) % PERIOD + PERIOD * rank).float()


def _once(comm: Comm, act: Callable[[], object]) -> None:
    """Does something once, when all ranks have written what they send."""
    backend: Any = torch.get_device_module(comm.device)
    backend.synchronize()
    comm.barrier()
    act()
    backend.synchronize()


def _compare(found: torch.Tensor, wanted: torch.Tensor, what: str, rounding: float = 0.0) -> None:
    differ = ~((found - wanted).abs() <= rounding * wanted) if rounding else found != wanted
    if differ.any():
        at = int(differ.nonzero()[0])
        raise Wrong(
            f"{what}: {int(differ.sum())} of {found.numel()} values are wrong, the first at {at}: found "
            f"{found[at].item()}, expected {wanted[at].item()}"
        )


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
