"""What the user chooses, validated once: the stage as data, the dtypes, the buffer sizes."""

import difflib
from dataclasses import dataclass
from enum import Enum

import torch

from hf_zero.errors import ConfigError


class Residency(Enum):
    """How a tensor class rests on the data-parallel ranks between uses."""

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
    """

    compute: Residency
    grad: Residency
    master: Residency


_R, _P, _S = Residency.REPLICATED, Residency.PARTIAL, Residency.SHARDED

STAGES = {
    0: StagePlan(compute=_R, grad=_R, master=_R),
    1: StagePlan(compute=_R, grad=_P, master=_S),
    2: StagePlan(compute=_R, grad=_S, master=_S),
    3: StagePlan(compute=_S, grad=_S, master=_S),
}

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose(setting: str, value, choices: dict):
    """Looks `value` up among `choices`; an unknown one is refused with the nearest that exists.

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
    valid = ", ".join(names)
    numeric = all(isinstance(key, int) for key in choices) and isinstance(value, (int, float))
    if numeric:
        nearest = str(min(choices, key=lambda key: abs(key - value)))
    else:
        nearest = next(iter(difflib.get_close_matches(str(value), list(names), n=1, cutoff=0.0)), next(iter(names)))
    raise ConfigError(f"{setting}: {value!r} is not one of {valid}; the nearest is {nearest!r}")


@dataclass(frozen=True)
class ZeroConfig:
    """The engine's settings.

    Args:
        stage (`int`): 0 (plain data parallel), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).
        compute_dtype (`torch.dtype`, *optional*): dtype of the compute copy; `None` keeps every parameter's own.
            Parameters that are cast keep a master in `master_dtype`.
        reduce_dtype (`torch.dtype`): dtype in which gradients are summed over the ranks and accumulated.
        bucket_nbytes (`int`): size in bytes of the staging buffer through which gradients are exchanged.
        prefetch_units (`int`): how many units are gathered ahead of use at stage 3.
        keep_gathered (`int` or `str`): how many further blocks stay gathered from forward to backward at stage 3, the
            last ones first; "auto" takes as many as fit half of the memory that is free beside gradients and state.
        timeout_seconds (`float`): how long a collective may take before it is an error.
        shared_memory (`bool`): lets CPU ranks that are all on one host share memory instead of sending messages.
    """

    stage: int = 3
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    bucket_nbytes: int = 8 * 2**20
    prefetch_units: int = 1
    keep_gathered: int | str = 0
    timeout_seconds: float = 1800.0
    shared_memory: bool = True

    def __post_init__(self):
        choose("stage", self.stage, STAGES)
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise ConfigError(
                f"compute_dtype: {self.compute_dtype} is not a floating dtype; give torch.bfloat16, float16 or None"
            )
        if self.reduce_dtype not in REDUCE_DTYPES.values():
            raise ConfigError(f"reduce_dtype: {self.reduce_dtype} is not one of torch.float32, torch.bfloat16")
        if self.bucket_nbytes < 4096:
            raise ConfigError(f"bucket_nbytes: {self.bucket_nbytes} is too small; give at least 4096 bytes")
        if self.prefetch_units < 0:
            raise ConfigError(f"prefetch_units: {self.prefetch_units} is negative; give 0 or more")
        if self.keep_gathered != "auto" and (not isinstance(self.keep_gathered, int) or self.keep_gathered < 0):
            raise ConfigError(f"keep_gathered: {self.keep_gathered!r} is no number of blocks; give 0 or more, or auto")

    def plan(self, num_ranks: int) -> StagePlan:
        """The stage plan for so many ranks: over one rank every partition is the whole."""
        return STAGES[0 if num_ranks == 1 else self.stage]
