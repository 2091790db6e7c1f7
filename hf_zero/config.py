"""The settings that users choose, checked once: stage, dtypes, buffer sizes, offload."""

import os
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import TypedDict

import torch

from hf_zero.errors import ConfigError, nearest
from hf_zero.removed import refuse_removed


def is_floating_dtype(dtype: object) -> bool:
    """Whether something is a floating-point dtype, such as `torch.bfloat16`, and not its name."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


class MemoryTier(Enum):
    """The memory in which the tensors of a class rest between uses."""

    DEVICE = "device"
    HOST = "host"  # main memory, page-locked where it is copied to and from a device
    DISK = "disk"  # files, brought into main memory for each use


class Residency(Enum):
    """How the tensors of a class rest on the data-parallel ranks between uses."""

    REPLICATED = "replicated"  # whole and equal on every rank
    PARTIAL = "partial"  # whole on every rank, each holding its own summand until it is reduced
    SHARDED = "sharded"  # each rank holds its own range


@dataclass(frozen=True)
class StagePlan:
    """Residency of the three tensor classes of ZeRO (arXiv 1910.02054, section 5).

    Args:
        compute (`Residency`): the parameters as the modules use them.
        grad (`Residency`): the gradients between a backward and the optimizer step.
        master (`Residency`): the values that the optimizer updates, and its state.
        compute_at (`MemoryTier`): where the parameters rest.
        master_at (`MemoryTier`): where the masters, their state and the reduced gradients rest; of gradients never
            the disk.
    """

    compute: Residency
    grad: Residency
    master: Residency
    compute_at: MemoryTier = MemoryTier.DEVICE
    master_at: MemoryTier = MemoryTier.DEVICE

    @property
    def is_offloaded(self) -> bool:
        """Whether masters and reduced gradients rest elsewhere than on the device."""
        return self.master_at is not MemoryTier.DEVICE

    @property
    def here(self) -> "StagePlan":
        """The plan for the units that stay on the device."""
        return replace(self, compute_at=MemoryTier.DEVICE, master_at=MemoryTier.DEVICE)


_R, _P, _S = Residency.REPLICATED, Residency.PARTIAL, Residency.SHARDED

STAGES = {
    0: StagePlan(compute=_R, grad=_R, master=_R),
    1: StagePlan(compute=_R, grad=_P, master=_S),
    2: StagePlan(compute=_R, grad=_S, master=_S),
    3: StagePlan(compute=_S, grad=_S, master=_S),
}

# What of a model's tensors goes to the host.
OFFLOADS = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "params")}

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

# In how many bits parameters may be gathered.
GATHER_DTYPES = {"int8": torch.int8}

# Whether a loss is computed for a part of the vocabulary at a time.
CHUNKED_LOSS = {name: name for name in ("auto", "on", "off")}
# What is done about gradients that are not finite.
NONFINITE = {name: name for name in ("stop", "skip", "ignore")}


def choose(setting: str, value, choices: dict):
    """Looks `value` up among `choices`, and refuses an unknown one with a list of them.

    Args:
        setting (`str`): the name of the setting, for the message.
        value: what the user gave.
        choices (`dict`): the valid values and what they stand for.

    Raises:
        `ConfigError`: when `value` is not a key of `choices`.
    """
    if value in choices:
        return choices[value]
    names = {str(key): key for key in choices}
    if str(value) in names:
        return choices[names[str(value)]]
    refuse_removed([f"{setting}={value}"])
    valid = ", ".join(names)
    numeric = all(isinstance(key, int) for key in choices) and isinstance(value, (int, float))
    near = str(min(choices, key=lambda key: abs(key - value))) if numeric else nearest(str(value), names)
    hint = f"; the nearest is {near!r}" if near else ""
    raise ConfigError(f"{setting}: {value!r} is not one of {valid}{hint}")


def is_count(value, least: int = 1) -> bool:
    """Says whether a setting is a whole number from `least` on, or `"auto"`."""
    return value == "auto" or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least)


# The kinds of the settings whose values are not looked up among a few, and how a message asks for them.
_KINDS = {
    "stage": (Integral, "0, 1, 2 or 3"),
    **dict.fromkeys(("prefetch_units", "sequence_parallel"), (Integral, "a whole number")),
    "offload_fraction": (Real, "a number"),
    "timeout_seconds": (Real | None, "a number, or None"),
    "shard_size": (Integral | str | None, "a whole number, auto, or None"),
    "tiled_mlp": (Integral | str, "a whole number, or auto"),
    "offload_dir": (str | os.PathLike | None, "the path of a folder, or None"),
    **dict.fromkeys(
        (
            "shared_memory",
            *("partition_activations", "offload_activations", "strict"),
        ),
        (bool, "True or False"),
    ),
}


def _is_strict() -> bool:
    value = os.environ.get("HF_ZERO_STRICT", "0")
    return choose("HF_ZERO_STRICT", value, {"0": False, "1": True, "": False})


@dataclass(frozen=True)
class ZeroConfig:
    """The engine's settings.

    Args:
        stage (`int`): 0 (plain data parallel), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).
        compute_dtype (`torch.dtype`, *optional*): dtype of the compute copy; `None` keeps every parameter's own.
            Trained parameters that are cast keep an fp32 master.
        reduce_dtype (`torch.dtype`): dtype in which gradients are summed over the ranks and accumulated. `torch.int8`:
            ranks send them in 8 bits, with a scale for each 256 values, and they are summed and accumulated in fp32
            (ZeRO++, arXiv 2306.10209, section 3.3).
        gather_dtype (`torch.dtype`, *optional*): `torch.int8`: at stage 3 parameters are gathered in 8 bits, with a
            scale for each 256 values (ZeRO++, arXiv 2306.10209, section 3.1), and all ranks compute with the rounded
            values; `None`: as they are.
        bucket_nbytes (`int` or `str`): size in bytes of each buffer through which ranks that send messages exchange
            values, in pieces; "auto" makes a piece long enough that its latency counts for little. With gloo no bit
            depends on it.
        prefetch_units (`int`): how many units are gathered ahead of use at stage 3.
        keep_gathered (`int` or `str`): how many further blocks stay gathered from forward to backward at stage 3, the
            last ones first; "auto" takes as many as fit half of the memory that is free beside gradients and state.
        timeout_seconds (`float`, *optional*): how long a collective may take before it is an error; by default as long
            as the process group gives its own.
        shared_memory (`bool`): lets CPU ranks that are on one host share memory instead of sending messages.
        shard_size (`int` or `str`, *optional*): over how many neighbouring ranks the model is sharded. The groups of
            so many hold the same (MiCS, arXiv 2205.00119): gathers stay within them, at the cost of memory. "auto":
            the ranks of one host, or of as few hosts as hold the model's states in three quarters of their devices'
            memory (of one, where that is not known, as on CPUs); `None`: all ranks. On NCCL it needs
            `NCCL_LAUNCH_ORDER_IMPLICIT=1`.
        offload (`str`): what rests in the host's memory: "none"; "optimizer": masters, optimizer state and reduced
            gradients (ZeRO-Offload, arXiv 2101.06840); "params": at stage 3 the parameters too (ZeRO-Infinity,
            arXiv 2104.07857).
        offload_fraction (`float`): of how much of the model that holds, in whole blocks, the last ones first, whose
            gradients come first; the rest stays on the device.
        offload_dir (`str`, *optional*): what is offloaded, gradients excepted, rests in files under this folder.
        partition_activations (`bool`): inputs of checkpointed blocks that are replicated over tensor-parallel ranks
            are divided among them until the recomputation (ZeRO-R P_a, arXiv 1910.02054, section 6.1).
        offload_activations (`bool`): inputs of checkpointed blocks rest in the host's memory (P_a+cpu), and of other
            blocks all that autograd saves, in storages of 1 MiB and more.
        chunked_loss (`str`): whether a language model's loss is computed for a part of the vocabulary at a time, where
            its forward has labels: "on", where what else needs the logits is refused; "auto", only where they would
            take more than the largest block, and all at once where something else needs them; "off". With "on" and
            "auto" the forward's logits cannot be read when it has ended.
        tiled_mlp (`int` or `str`): number of tiles into which the MLPs of blocks split the tokens of a micro-batch.
            Tiles are computed one at a time, and again in the backward (Arctic Long Sequence Training, arXiv
            2506.13996, section 3.1). "auto" limits a tile to as many tokens as their inputs have features; 1 disables
            tiling.
        sequence_parallel (`int`): how many neighbouring ranks share each sequence, of which each computes a part
            (DeepSpeed-Ulysses, arXiv 2309.14509); they are given the same batches. 1: every rank has whole sequences.
        nonfinite (`str`): what a step does whose gradients hold an infinity or a NaN: "stop" raises on all ranks,
            "skip" leaves the step out on all ranks, "ignore" takes it.
        strict (`bool`): one process alone behaves as one of several at its stage: at stage 3 with placeholders, slots
            and every guard. It is for tests and debugging, and costs time. By default what the environment variable
            `HF_ZERO_STRICT` says: 1 for yes.
    """

    stage: int = 3
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    gather_dtype: torch.dtype | None = None
    bucket_nbytes: int | str = "auto"
    prefetch_units: int = 1
    keep_gathered: int | str = 0
    timeout_seconds: float | None = None
    shared_memory: bool = True
    shard_size: int | str | None = None
    offload: str = "none"
    offload_fraction: float = 1.0
    offload_dir: str | None = None
    partition_activations: bool = False
    offload_activations: bool = False
    chunked_loss: str = "off"
    tiled_mlp: int | str = 1
    sequence_parallel: int = 1
    nonfinite: str = "stop"
    strict: bool = field(default_factory=_is_strict)

    def __post_init__(self):
        self._check_kinds()
        choose("stage", self.stage, STAGES)
        choose("nonfinite", self.nonfinite, NONFINITE)
        choose("chunked_loss", self.chunked_loss, CHUNKED_LOSS)
        if self.compute_dtype is not None and not is_floating_dtype(self.compute_dtype):
            raise ConfigError(
                f"compute_dtype: {self.compute_dtype!r} is not a floating dtype; give torch.bfloat16, float16 or None"
            )
        if self.reduce_dtype not in REDUCE_DTYPES.values():
            valid = ", ".join(map(str, REDUCE_DTYPES.values()))
            raise ConfigError(f"reduce_dtype: {self.reduce_dtype} is not one of {valid}")
        if not is_count(self.bucket_nbytes, least=4096):
            raise ConfigError(f"bucket_nbytes: {self.bucket_nbytes!r} is no size; give 4096 bytes or more, or auto")
        if self.prefetch_units < 0:
            raise ConfigError(f"prefetch_units: {self.prefetch_units} is negative; give 0 or more")
        if not is_count(self.keep_gathered, least=0):
            raise ConfigError(f"keep_gathered: {self.keep_gathered!r} is no number of blocks; give 0 or more, or auto")
        if not is_count(self.tiled_mlp):
            raise ConfigError(f"tiled_mlp: {self.tiled_mlp!r} is no number of tiles; give 1 or more, or auto")
        if self.sequence_parallel < 1:
            raise ConfigError(f"sequence_parallel: {self.sequence_parallel} is no number of ranks; give 1 or more")
        if self.sequence_parallel > 1 and self.partition_activations:
            raise ConfigError(
                "sequence_parallel: ranks that share sequences are not those of a model's tensor parallelism, which "
                "partition_activations needs; leave one of them out"
            )
        self._check_shard_size()
        self._check_gather_dtype()
        self._check_offload()

    def _check_kinds(self) -> None:
        for name, (kind, expected) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"{name}: {value!r} is of type {type(value).__name__}; give {expected}")

    def _check_shard_size(self) -> None:
        if self.shard_size is None:
            return
        if not is_count(self.shard_size):
            raise ConfigError(f"shard_size: {self.shard_size!r} is no number of ranks; give 1 or more, or auto")
        if self.stage == 0:
            raise ConfigError(
                "shard_size: says over how many ranks to shard, and stage 0 shards nothing; use stage 1, 2 or 3, or "
                "leave it out"
            )

    def _check_gather_dtype(self) -> None:
        if self.gather_dtype is None:
            return
        if self.gather_dtype not in GATHER_DTYPES.values():
            raise ConfigError(f"gather_dtype: {self.gather_dtype!r} is not torch.int8; give that, or None")
        if self.stage != 3 or self.shard_size == 1:
            found = "shard_size 1" if self.stage == 3 else f"stage {self.stage}"
            raise ConfigError(
                f"gather_dtype: says how parameters are gathered for each use, and with {found} they are not; use "
                "stage 3 over several ranks, or leave it out"
            )

    def _check_offload(self) -> None:
        choose("offload", self.offload, OFFLOADS)
        if self.offload == "params" and self.stage != 3:
            raise ConfigError(
                f"offload: 'params' needs stage 3, which gathers parameters for each use, and not {self.stage}; "
                "use stage 3, or offload 'optimizer'"
            )
        ways = {
            "offload_dir": self.offload_dir,
            "offload_fraction": self.offload_fraction != 1,
        }
        given = next((name for name, value in ways.items() if value), None)
        if self.offload == "none" and given:
            raise ConfigError(f"{given}: says how to offload, and offload is 'none'; give 'optimizer' or 'params'")
        if not 0 < self.offload_fraction <= 1:
            raise ConfigError(f"offload_fraction: {self.offload_fraction} is no share; give more than 0 and at most 1")

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over the ranks and accumulated."""
        return torch.float32 if self.packs_reductions else self.reduce_dtype

    @property
    def packs_reductions(self) -> bool:
        """Whether a gradient's values go between ranks in 8 bits."""
        return self.reduce_dtype is torch.int8

    def plan(self, num_ranks: int) -> StagePlan:
        """Returns the stage plan for a number of ranks. With one rank all stages are the same, unless `strict`, since
        every partition is the whole; with offload it is 2 or 3, which move each unit between host and device."""
        away = OFFLOADS[self.offload]
        alone = 3 if "params" in away else 2 if away else 0
        tier = MemoryTier.DISK if self.offload_dir else MemoryTier.HOST
        return replace(
            STAGES[alone if num_ranks == 1 and not self.strict else self.stage],
            compute_at=tier if "params" in away else MemoryTier.DEVICE,
            master_at=tier if away else MemoryTier.DEVICE,
        )


class ZeroSettings(TypedDict, total=False):
    """The fields of `ZeroConfig` that `hf_zero.shard` takes by name, beside `stage` and `compute_dtype`."""

    reduce_dtype: torch.dtype
    gather_dtype: torch.dtype | None
    bucket_nbytes: int | str
    prefetch_units: int
    keep_gathered: int | str
    timeout_seconds: float | None
    shared_memory: bool
    shard_size: int | str | None
    offload: str
    offload_fraction: float
    offload_dir: str | None
    partition_activations: bool
    offload_activations: bool
    chunked_loss: str
    tiled_mlp: int | str
    sequence_parallel: int
    nonfinite: str
    strict: bool
