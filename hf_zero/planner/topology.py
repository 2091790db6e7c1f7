"""Devices and the links between them: how long each kind of work takes there.

[Note: what is assumed] Matrix products run at one share of the device's peak (`utilization`), all other operations and
the copies of memory at another of what the memory can do (`MEMORY_SHARE`), exchanges and copies at `LINK_SHARE` of
their link. Attention is counted whole, as if nothing were hidden: kernels skip half of a causal mask, at about half
the rate of a matrix product. A collective goes in a ring over all ranks; what leaves a host is spread over the network
cards of all its ranks. Where each rank sends messages to each other one, it sends what leaves the host through its own
card, and nothing on a host is added up before. What computes does not become slower while an exchange runs beside it.
"""

from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

import torch
import yaml

from hf_zero.errors import ConfigError


DEVICES = Path(__file__).with_name("devices.yaml")
# Of what a memory, and what a link, can do by its data sheet.
MEMORY_SHARE = 0.8
LINK_SHARE = 0.8
GIGA, TERA = 10**9, 10**12
# Of accelerators, where nothing is said of hosts.
RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Device:
    """One accelerator, or the processor of one rank, with its links. Rates are of one direction."""

    name: str
    bf16_tflops: float  # peak of dense bf16 and fp16 matrix products
    fp32_tflops: float  # of those in fp32
    utilization: float  # which share of the peak matrix products reach
    memory_gib: float
    memory_gbytes_per_s: float
    peer_gbytes_per_s: float  # to the other devices of its host
    host_gbytes_per_s: float  # to the host's memory
    host_memory_gbytes_per_s: float  # how fast the host's memory is, for each device
    network_gbits_per_s: float  # of the network card of one device
    latency_us: float  # of one exchange, whatever its size
    sources: tuple[str, ...] = ()  # where the numbers are from
    gpus_per_host: int = RANKS_PER_HOST  # unless something else is said
    on_cpu: bool = False  # whether it is a processor, whose ranks share the memory of their host

    @property
    def memory_nbytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products of a dtype."""
        return (self.fp32_tflops if dtype is torch.float32 else self.bf16_tflops) * TERA


def known_devices() -> dict[str, Device]:
    """The devices that the package knows, by name."""
    return {name: _checked(str(DEVICES), name, values) for name, values in _shipped().items()}


def device_named(name: str) -> Device:
    """Returns a device that the package knows, such as "h100", or that of a YAML file with the fields of [`Device`].
    Raises [`ConfigError`] where there is no such device, or its file is not valid."""
    known = known_devices()
    if name in known:
        return known[name]
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(f"--gpu {name}: expected {', '.join(known)}, or a YAML file with the fields of one of them")
    try:
        values = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--gpu {name}: {' '.join(str(error).split())}") from error
    return _checked(f"--gpu {name}", Path(name).stem, values)


@cache
def _shipped() -> dict[str, dict]:
    return yaml.safe_load(DEVICES.read_text(encoding="utf-8"))


def _checked(where: str, name: str, values: object) -> Device:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: found {type(values).__name__}, expected the fields of a device")
    given = {"name": name, **values}
    numbers = [each.name for each in fields(Device) if each.default is MISSING and each.name != "name"]
    unknown = [key for key in given if key not in {each.name for each in fields(Device)}]
    missing = [key for key in numbers if key not in given]
    if unknown or missing:
        found = f"unknown {', '.join(map(str, unknown))}" if unknown else f"no {', '.join(missing)}"
        raise ConfigError(
            f"{where}: {name}: {found}; expected {', '.join(numbers)}, and perhaps gpus_per_host and on_cpu"
        )
    for key in (*numbers, "gpus_per_host"):
        value, kind = given.get(key, RANKS_PER_HOST), int if key == "gpus_per_host" else int | float
        least_is_open = key != "latency_us"
        if isinstance(value, bool) or not isinstance(value, kind) or value < 0 or (least_is_open and not value):
            expected = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{where}: {name}: {key} is {value!r}; expected {expected} above 0")
    if not isinstance(given.get("on_cpu", False), bool):
        raise ConfigError(f"{where}: {name}: on_cpu is {given['on_cpu']!r}; expected true or false")
    if given["utilization"] > 1:
        raise ConfigError(f"{where}: {name}: utilization is {given['utilization']}; expected a share of 1")
    return Device(**{**given, "sources": tuple(given.get("sources") or ())})


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal devices."""

    device: Device
    num_hosts: int
    gpus_per_host: int  # that take part
    dtype: torch.dtype = torch.bfloat16  # in which matrix products are computed

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.gpus_per_host

    @property
    def peak_flops(self) -> float:
        """FLOP/s that one device can do at most."""
        return self.device.peak_flops(self.dtype)

    def compute_seconds(self, flops: int, nbytes: int) -> float:
        """Seconds of matrix products of so many FLOPs, and of other operations that move so many bytes."""
        memory = self.device.memory_gbytes_per_s * GIGA * MEMORY_SHARE
        return flops / (self.peak_flops * self.device.utilization) + nbytes / memory

    def host_seconds(self, nbytes: int) -> float:
        """Seconds of jobs on the host that read and write so many bytes."""
        return nbytes / (self.device.host_memory_gbytes_per_s * GIGA * MEMORY_SHARE)

    def is_within_hosts(self, num_ranks: int, stride: int = 1) -> bool:
        """Whether each group of so many ranks, `stride` apart, is on one host."""
        return self.num_hosts == 1 or self.gpus_per_host % (num_ranks * stride) == 0

    def exchange_seconds(self, nbytes: int, num_ranks: int, stride: int = 1, *, by_messages: bool = False) -> float:
        """Seconds of an all-gather, a reduce-scatter or an all-to-all, which all groups of ranks do at a time.

        The arguments are those of `hf_zero.planner.timeline.Begin`. Between ranks that are further apart than
        neighbours are those of other groups, which share the network cards of a host with them."""
        if num_ranks == 1:
            return 0.0
        sent, latency = nbytes * (num_ranks - 1) / num_ranks, self.device.latency_us * 1e-6
        peer_rate = self.device.peer_gbytes_per_s * GIGA * LINK_SHARE
        if self.is_within_hosts(num_ranks, stride):
            return sent / peer_rate + latency
        card_rate = self.device.network_gbits_per_s * GIGA / 8 * LINK_SHARE
        if not by_messages:
            cards = self.gpus_per_host / min(stride, self.gpus_per_host)
            return sent / min(peer_rate, cards * card_rate) + latency
        num_near = max(1, self.gpus_per_host // stride)  # of the ranks, those of one host
        num_near = num_near if num_ranks % num_near == 0 else 1
        within, across = num_near - 1, num_ranks - num_near
        return nbytes / num_ranks * max(within / peer_rate, across / card_rate) + latency

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds of a copy between a device and its host."""
        return nbytes / (self.device.host_gbytes_per_s * GIGA * LINK_SHARE)
