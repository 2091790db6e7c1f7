"""The settings of the engine: stage, dtypes, buffer sizes, offload. They are validated once."""

import os
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import TypedDict

import torch

from hf_zero.errors import ConfigError, nearest
from hf_zero.removed import refuse_removed


def is_floating_dtype(dtype: object) -> bool:
    """Whether an object is a floating-point dtype, such as `torch.bfloat16` (not its name)."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


class MemoryTier(Enum):
    """The memory that stores the tensors of a class between uses."""

    DEVICE = "device"
    HOST = "host"  # main memory, page-locked if it is copied to and from a device
    DISK = "disk"  # files, loaded into main memory for each use


class Residency(Enum):
    """How the tensors of a class are distributed over the data-parallel ranks between uses."""

    REPLICATED = "replicated"  # complete and equal on every rank
    PARTIAL = "partial"  # complete on every rank, which holds its own summand until they are reduced
    SHARDED = "sharded"  # each rank holds a range


@dataclass(frozen=True)
class StagePlan:
    """Residency of the three tensor classes of ZeRO (arXiv 1910.02054, section 5).

    Args:
        compute (`Residency`): the parameters that modules use.
        grad (`Residency`): the gradients between backward and optimizer step.
        master (`Residency`): the master weights, which the optimizer updates, and the optimizer state.
        compute_at (`MemoryTier`): where the parameters are stored.
        master_at (`MemoryTier`): where masters, optimizer state and reduced gradients are stored. Gradients are never
            stored on disk.
    """

    compute: Residency
    grad: Residency
    master: Residency
    compute_at: MemoryTier = MemoryTier.DEVICE
    master_at: MemoryTier = MemoryTier.DEVICE

    @property
    def is_offloaded(self) -> bool:
        """Whether masters and reduced gradients are stored off the device."""
        return self.master_at is not MemoryTier.DEVICE

    @property
    def here(self) -> "StagePlan":
        """The plan for units that stay on the device."""
        return replace(self, compute_at=MemoryTier.DEVICE, master_at=MemoryTier.DEVICE)


_R, _P, _S = Residency.REPLICATED, Residency.PARTIAL, Residency.SHARDED

STAGES = {
    0: StagePlan(compute=_R, grad=_R, master=_R),
    1: StagePlan(compute=_R, grad=_P, master=_S),
    2: StagePlan(compute=_R, grad=_S, master=_S),
    3: StagePlan(compute=_S, grad=_S, master=_S),
}

# The classes of tensors that each setting offloads.
OFFLOADS = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "params")}

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

# Dtypes in which parameters can be gathered.
GATHER_DTYPES = {"int8": torch.int8}

# Whether to compute the loss over one part of the vocabulary at a time.
CHUNKED_LOSS = {name: name for name in ("auto", "on", "off")}
# What to do about non-finite gradients.
NONFINITE = {name: name for name in ("stop", "skip", "ignore")}


def choose(setting: str, value, choices: dict):
    """Returns the entry of `choices` for `value`.

    Args:
        setting (`str`): name of the setting, for the message.
        value: the value given by the user.
        choices (`dict`): the valid values and their meanings.

    Raises:
        `ConfigError`: if `value` is not a key of `choices`. Lists the valid values.
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
    """Whether a setting is an integer of at least `least`, or `"auto"`."""
    return value == "auto" or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least)


# Types of the settings that are not looked up in a table, and their descriptions in messages.
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
    """The settings of the engine.

    Args:
        stage (`int`): 0 (plain data parallelism), 1 (optimizer state), 2 (also gradients) or 3 (also parameters).
        compute_dtype (`torch.dtype`, *optional*): dtype of the compute copy; `None` keeps the dtype of every
            parameter. Trained parameters that are cast have an fp32 master.
        reduce_dtype (`torch.dtype`): dtype in which gradients are summed over the ranks and accumulated. With
            `torch.int8`, gradients are quantized on the wire with a scale for each 256 values, and summed and
            accumulated in fp32 (ZeRO++, arXiv 2306.10209, section 3.3).
        gather_dtype (`torch.dtype`, *optional*): with `torch.int8`, parameters are gathered in 8 bits at stage 3 with
            a scale for each 256 values (ZeRO++, arXiv 2306.10209, section 3.1), and all ranks compute with the rounded
            values. `None` gathers parameters in their own dtype.
        bucket_nbytes (`int` or `str`): size in bytes of each communication buffer for ranks that send messages; larger
            tensors are sent in pieces. "auto" chooses a size at which latency is negligible. With gloo, results do not
            depend on it, bit for bit.
        prefetch_units (`int`): number of units to gather ahead of use at stage 3.
        keep_gathered (`int` or `str`): number of additional blocks that stay gathered between forward and backward at
            stage 3, starting with the last one. "auto" uses up to half of the memory that gradients and state leave
            free.
        timeout_seconds (`float`, *optional*): time limit of a collective; defaults to that of the process group.
        shared_memory (`bool`): let CPU ranks on one host exchange values through shared memory instead of messages.
        shard_size (`int` or `str`, *optional*): number of neighboring ranks over which the model is sharded. The
            groups hold replicas (MiCS, arXiv 2205.00119), and parameters are gathered within a group, at the cost of
            memory. "auto": the ranks of one host, or of as few hosts as can hold the model states in three quarters of
            their devices' memory (of one host if that is unknown, as on CPUs). `None`: all ranks. NCCL requires
            `NCCL_LAUNCH_ORDER_IMPLICIT=1` for shard groups.
        offload (`str`): what to keep in host memory: "none"; "optimizer": masters, optimizer state and reduced
            gradients (ZeRO-Offload, arXiv 2101.06840); "params": at stage 3, also the parameters (ZeRO-Infinity, arXiv
            2104.07857).
        offload_fraction (`float`): fraction of the model to offload, in full blocks, starting with the last ones,
            whose gradients are computed first. The remaining blocks stay on the device.
        offload_dir (`str`, *optional*): folder for files that store the offloaded tensors, except gradients.
        partition_activations (`bool`): partition the inputs of checkpointed blocks, which are replicated over
            tensor-parallel ranks, until they are recomputed (ZeRO-R P_a, arXiv 1910.02054, section 6.1).
        offload_activations (`bool`): keep the inputs of checkpointed blocks in host memory (P_a+cpu), and for other
            blocks all tensors saved by autograd. Storages of less than 1 MiB stay on the device.
        chunked_loss (`str`): whether to compute the loss of a language model over one part of the vocabulary at a
            time, if its forward receives labels. "on" raises if anything else needs the logits; "auto" applies it only
            if the logits would be larger than the largest block and nothing else needs them; "off". With "on" and
            "auto", the logits of the forward's output cannot be read.
        tiled_mlp (`int` or `str`): number of tiles into which the MLPs of blocks split the tokens of a micro-batch.
            Tiles are computed one at a time, and again in the backward (Arctic Long Sequence Training, arXiv
            2506.13996, section 3.1). "auto" limits a tile to as many tokens as their inputs have features; 1 disables
            tiling.
        sequence_parallel (`int`): number of neighboring ranks that share each sequence and compute a part of it each
            (DeepSpeed-Ulysses, arXiv 2309.14509). They receive the same batches. 1 disables it.
        nonfinite (`str`): what a step does if gradients contain an infinity or a NaN: "stop" raises on all ranks,
            "skip" skips the step on all ranks, "ignore" takes it.
        strict (`bool`): make a single process behave like one of several at its stage: at stage 3 with placeholders,
            slots and all guards. For tests and debugging; slower. Defaults to the environment variable
            `HF_ZERO_STRICT` (1 enables it).
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
            raise ConfigError(f"bucket_nbytes: {self.bucket_nbytes!r} is not a size; give 4096 bytes or more, or auto")
        if self.prefetch_units < 0:
            raise ConfigError(f"prefetch_units: {self.prefetch_units} is negative; give 0 or more")
        if not is_count(self.keep_gathered, least=0):
            raise ConfigError(f"keep_gathered: {self.keep_gathered!r} is not a block count; give 0 or more, or auto")
        if not is_count(self.tiled_mlp):
            raise ConfigError(f"tiled_mlp: {self.tiled_mlp!r} is not a number of tiles; give 1 or more, or auto")
        if self.sequence_parallel < 1:
            raise ConfigError(f"sequence_parallel: {self.sequence_parallel} is not a number of ranks; give 1 or more")
        if self.sequence_parallel > 1 and self.partition_activations:
            raise ConfigError(
                "sequence_parallel: cannot be combined with partition_activations, which requires tensor parallelism; "
                "use only one of them"
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
            raise ConfigError(f"shard_size: {self.shard_size!r} is not a number of ranks; give 1 or more, or auto")
        if self.stage == 0:
            raise ConfigError(
                "shard_size: has no effect, because stage 0 shards nothing; use stage 1, 2 or 3, or omit it"
            )

    def _check_gather_dtype(self) -> None:
        if self.gather_dtype is None:
            return
        if self.gather_dtype not in GATHER_DTYPES.values():
            raise ConfigError(f"gather_dtype: {self.gather_dtype!r} is not torch.int8; give that, or None")
        if self.stage != 3 or self.shard_size == 1:
            found = "shard_size 1" if self.stage == 3 else f"stage {self.stage}"
            raise ConfigError(
                f"gather_dtype: applies to gathers at stage 3 over several ranks, but found {found}; "
                "use stage 3 over several ranks, or omit it"
            )

    def _check_offload(self) -> None:
        choose("offload", self.offload, OFFLOADS)
        if self.offload == "params" and self.stage != 3:
            raise ConfigError(
                f"offload: 'params' needs stage 3, which gathers parameters for each use, but stage is {self.stage}; "
                "use stage 3, or offload 'optimizer'"
            )
        ways = {
            "offload_dir": self.offload_dir,
            "offload_fraction": self.offload_fraction != 1,
        }
        given = next((name for name, value in ways.items() if value), None)
        if self.offload == "none" and given:
            raise ConfigError(f"{given}: requires offload, but offload is 'none'; give 'optimizer' or 'params'")
        if not 0 < self.offload_fraction <= 1:
            raise ConfigError(
                f"offload_fraction: {self.offload_fraction} is not a fraction; give more than 0 and at most 1"
            )

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over the ranks and accumulated."""
        return torch.float32 if self.packs_reductions else self.reduce_dtype

    @property
    def packs_reductions(self) -> bool:
        """Whether gradients are sent in 8 bits."""
        return self.reduce_dtype is torch.int8

    def plan(self, num_ranks: int) -> StagePlan:
        """Returns the stage plan for a number of ranks. With one rank all stages are equivalent, so stage 0 is used
        unless `strict`; with offload it is 2 or 3, which move each unit between host and device."""
        offloaded = OFFLOADS[self.offload]
        alone = 3 if "params" in offloaded else 2 if offloaded else 0
        tier = MemoryTier.DISK if self.offload_dir else MemoryTier.HOST
        return replace(
            STAGES[alone if num_ranks == 1 and not self.strict else self.stage],
            compute_at=tier if "params" in offloaded else MemoryTier.DEVICE,
            master_at=tier if offloaded else MemoryTier.DEVICE,
        )


class ZeroSettings(TypedDict, total=False):
    """The fields of `ZeroConfig` that are keyword arguments of `hf_zero.shard`, besides `stage` and
    `compute_dtype`."""

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
