"""Devices and the links between them: the time that each kind of work takes.

[Note: assumptions] Matrix products run at a fixed share of the device's peak (`utilization`), all other operations and
memory copies at `MEMORY_SHARE` of the memory bandwidth, exchanges and copies at `LINK_SHARE` of their link's
bandwidth. Attention is counted without masking: kernels skip half of a causal mask, but at about half the rate of a
matrix product. Collectives use a ring over all ranks, and their traffic between hosts is spread over the network cards
of all ranks of a host. If each rank sends messages to every other one, its traffic between hosts uses its own card,
and values are not summed within a host first. Exchanges do not slow down concurrent computation.
"""

from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

import torch
import yaml

from hf_zero.errors import ConfigError


DEVICES = Path(__file__).with_name("devices.yaml")
# Achieved shares of the memory and link bandwidth in the data sheet.
MEMORY_SHARE = 0.8
LINK_SHARE = 0.8
GIGA, TERA = 10**9, 10**12
# Default number of accelerators per host.
RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Device:
    """An accelerator, or the processor of one rank, with its links. Rates are for one direction."""

    name: str
    bf16_tflops: float  # peak of dense bf16 and fp16 matrix products
    fp32_tflops: float  # peak of fp32 matrix products
    utilization: float  # share of the peak that matrix products reach
    memory_gib: float
    memory_gbytes_per_s: float
    peer_gbytes_per_s: float  # to other devices of the same host
    host_gbytes_per_s: float  # to host memory
    host_memory_gbytes_per_s: float  # bandwidth of host memory per device
    network_gbits_per_s: float  # network card of one device
    latency_us: float  # of one exchange, independent of its size
    sources: tuple[str, ...] = ()  # sources of the numbers
    gpus_per_host: int = RANKS_PER_HOST  # default
    on_cpu: bool = False  # a processor, whose ranks share the memory of their host

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the peak FLOP/s of matrix products in a dtype."""
        return (self.fp32_tflops if dtype is torch.float32 else self.bf16_tflops) * TERA


@cache
def known_devices() -> dict[str, Device]:
    """Returns the devices in `devices.yaml`, by name."""
    values = yaml.safe_load(DEVICES.read_text(encoding="utf-8"))
    return {name: _checked(str(DEVICES), name, each) for name, each in values.items()}


def device_named(name: str) -> Device:
    """Returns a known device, such as "h100", or reads a YAML file with the fields of [`Device`]. Raises
    [`ConfigError`] if there is no such device or the file is not valid."""
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
            f"{where}: {name}: {found}; expected {', '.join(numbers)}, and optionally gpus_per_host and on_cpu"
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
        raise ConfigError(f"{where}: {name}: utilization is {given['utilization']}; expected at most 1")
    return Device(**{**given, "sources": tuple(given.get("sources") or ())})


@dataclass(frozen=True)
class Cluster:
    """Hosts with identical devices."""

    device: Device
    num_hosts: int
    gpus_per_host: int  # that are used
    dtype: torch.dtype = torch.bfloat16  # dtype of matrix products

    @property
    def peak_flops(self) -> float:
        """The peak FLOP/s of one device."""
        return self.device.peak_flops(self.dtype)

    def compute_seconds(self, flops: int, nbytes: int) -> float:
        """Returns the time of matrix products with `flops` FLOPs and of other operations that move `nbytes` bytes."""
        memory = self.device.memory_gbytes_per_s * GIGA * MEMORY_SHARE
        return flops / (self.peak_flops * self.device.utilization) + nbytes / memory

    def host_seconds(self, nbytes: int) -> float:
        """Returns the time of host jobs that read and write `nbytes` bytes."""
        return nbytes / (self.device.host_memory_gbytes_per_s * GIGA * MEMORY_SHARE)

    def is_within_hosts(self, num_ranks: int, stride: int = 1) -> bool:
        """Whether each group of `num_ranks` ranks with distance `stride` is on one host."""
        return self.num_hosts == 1 or self.gpus_per_host % (num_ranks * stride) == 0

    def exchange_seconds(self, nbytes: int, num_ranks: int, stride: int = 1, *, by_messages: bool = False) -> float:
        """Returns the time of an all-gather, reduce-scatter or all-to-all that all groups of ranks execute
        concurrently.

        The arguments are those of `hf_zero.planner.timeline.Begin`. With a `stride` above 1, several groups share the
        network cards of a host."""
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
        num_near = max(1, self.gpus_per_host // stride)  # ranks of the group on one host
        num_near = num_near if num_ranks % num_near == 0 else 1
        within, across = num_near - 1, num_ranks - num_near
        return nbytes / num_ranks * max(within / peer_rate, across / card_rate) + latency

    def copy_seconds(self, nbytes: int) -> float:
        """Returns the time of a copy between a device and its host."""
        return nbytes / (self.device.host_gbytes_per_s * GIGA * LINK_SHARE)
