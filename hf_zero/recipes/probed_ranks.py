"""The ranks on which `check` tries a machine, how fast they exchange values and their devices copy, and how they agree
on what was found. What arrives last is compared with what was sent."""

import os
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.activation.shard_model import shard_with
from hf_zero.comm import Bus, Comm, Counters, DistributedComm, connect
from hf_zero.comm.distributed import NativeComm
from hf_zero.comm.streams import Streams
from hf_zero.comm.world import local_device
from hf_zero.config import ZeroConfig
from hf_zero.engine import ZeroEngine
from hf_zero.errors import HfZeroError


ON_DEVICE_NBYTES, ON_CPU_NBYTES = 256 * 2**20, 32 * 2**20
TIMES = 5
# A prime: a block that is written to another block's place then has other values.
PERIOD = 251
MEAN_ROUNDING = 1e-5  # of a mean of whole numbers in fp32, which a backend may take in any order
# Bytes per second of one lane in one direction, by generation of PCIe, after its encoding.
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
Result = TypeVar("Result")
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
TIMEOUT_SECONDS, AGREEMENT_SECONDS = 40.0, 90.0  # who waits for a rank that has failed gives up before the agreement


class Wrong(Exception):
    """A probe has found that something is wrong. The message says what."""


def gather_rate(comm: Comm) -> float:
    """Measures the bytes that a rank receives in an all-gather, per second. All ranks call it."""
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


def reduce_rate(comm: Comm) -> float:
    """Measures the bytes that a rank receives in a reduce-scatter, per second. All ranks call it."""
    full, shard = _buffer(comm)

    def reduce() -> None:
        comm.reduce_scatter(full, shard, dtype=full.dtype, accumulate=False, what="a measurement").wait()

    rate = _exchanged(comm, full, reduce)
    wanted = _pattern(full, 0).chunk(comm.num_ranks)[comm.rank] + PERIOD * (comm.num_ranks - 1) / 2
    full.copy_(_pattern(full, comm.rank))
    _once(comm, reduce)
    _compare(shard, wanted, f"reduce-scatter: range of rank {comm.rank}", MEAN_ROUNDING)
    return rate


def shared_memory_rate(comm: Comm) -> float:
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


def copy_rate(device: torch.device) -> float:
    """Measures copies inside of the device's memory. Each byte is read once and written once."""
    source = torch.empty(_nbytes(device), dtype=torch.uint8, device=device)
    source.copy_(_pattern(source, 0))
    target = torch.zeros_like(source)
    rate = _rate(source.nbytes, lambda: target.copy_(source), device)
    _compare(target, source, "copies in memory")
    return rate


def transfer_rate(device: torch.device, way: str) -> float:
    """Measures the bytes per second of copies between a device and page-locked memory of the host: "up" to the device,
    or "down" to the host."""
    bus = Bus(device, Counters())
    host = bus.empty(_nbytes(device), torch.uint8).zero_()
    here = torch.zeros(host.numel(), dtype=torch.uint8, device=device)
    source, target = (host, here) if way == "up" else (here, host)
    source.copy_(_pattern(source, 0))

    def copy() -> None:
        (bus.up(here, host) if way == "up" else bus.down(host, here)).synchronize()

    rate = _rate(host.nbytes, copy, device)
    _compare(target, _pattern(target, 0), f"copies {way}")
    return rate


def pcie_of(device: torch.device) -> tuple[float, str] | None:
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
    streams = Streams(comm.device)
    streams.synchronize()
    comm.barrier()
    act()
    streams.synchronize()


def _compare(found: torch.Tensor, wanted: torch.Tensor, what: str, rounding: float = 0.0) -> None:
    differ = ~((found - wanted).abs() <= rounding * wanted) if rounding else found != wanted
    if differ.any():
        at = int(differ.nonzero()[0])
        raise Wrong(
            f"{what}: {int(differ.sum())} of {found.numel()} values are wrong, the first at {at}: found "
            f"{found[at].item()}, expected {wanted[at].item()}"
        )


def _exchanged(comm: Comm, full: torch.Tensor, act: Callable[[], object]) -> float:
    comm.barrier()
    return _rate(full.nbytes * (comm.num_ranks - 1) // comm.num_ranks, act, comm.device)


def _rate(nbytes: int, act: Callable[[], object], device: torch.device) -> float:
    """The bytes per second in the fastest of several times, after one that warms up."""
    streams, seconds = Streams(device), []
    for _ in range(TIMES + 1):
        streams.synchronize()
        begin = time.perf_counter()
        act()
        streams.synchronize()
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds[1:])


class Skipped(str):
    """What a probe returns that cannot be made on these devices: the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a probe has found."""

    name: str
    status: str  # ok, FAILED or skipped
    text: str  # what was found, in one line

    def line(self) -> str:
        return f"{self.status:8}{self.name}: {self.text}"


class Ranks:
    """The rank of this process. Alone, it trains as one of several does (`strict`)."""

    def __init__(self, device_type: str):
        self.is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = local_device(device_type)
        self.comm: Comm = connect(self.device, timeout_seconds=TIMEOUT_SECONDS, bucket_nbytes="auto")
        self.num_ranks = self.comm.num_ranks
        self._talk: Comm = self.comm
        if not self.is_alone:  # over connections of its own: of the others a failure may leave messages behind
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_SECONDS))
            self._talk = DistributedComm(group, torch.device("cpu"), AGREEMENT_SECONDS)

    @property
    def repeats_bits(self) -> bool:
        """Whether all stages take each sum in the same order. A GPU may choose another kernel where memory is aligned
        otherwise, and a backend's own collectives may add up more than two ranks in any order."""
        return self.device.type == "cpu" and (self.num_ranks <= 2 or not isinstance(self.comm, NativeComm))

    def each(self, act: Callable[[Comm, Callable[..., Any]], Result]) -> list[Result]:
        """Calls a function with this rank's collectives and what shards a model."""

        def shard(model: nn.Module, config: ZeroConfig) -> ZeroEngine:
            return shard_with(model, replace(config, strict=config.strict or self.is_alone), device=self.device)

        return [act(self.comm, shard)]

    def agree(self, name: str, probe: Callable[[], str]) -> tuple[Outcome, bool]:
        """Runs a probe on all ranks. Returns what the first rank found on which it failed, or rank 0; and whether the
        ranks are in step, so that others may follow."""
        outcome, is_in_step = _tried(name, probe)
        is_in_step = is_in_step or self.is_alone
        found = self._talk.all_gather_object((outcome, is_in_step))
        failed = [rank for rank, (each, _) in enumerate(found) if each.status == FAILED]
        # who waited in vain for a rank says less than that rank
        first = min(failed, key=lambda rank: "CommError" in found[rank][0].text, default=0)
        outcome = found[first][0]
        if failed and len(found) > 1:
            outcome = Outcome(name, FAILED, f"rank {first}: {outcome.text}")
        return outcome, all(in_step for _, in_step in found)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _tried(name: str, probe: Callable[[], str]) -> tuple[Outcome, bool]:
    try:
        said = probe()
        return Outcome(name, SKIPPED if isinstance(said, Skipped) else OK, said), True
    except Wrong as wrong:
        return Outcome(name, FAILED, str(wrong)), True
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        where = "" if isinstance(error, HfZeroError) else f" ({Path(frame.filename).name}:{frame.lineno})"
        return Outcome(name, FAILED, f"{type(error).__name__}: {text}{where}"), False
