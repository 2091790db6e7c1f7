"""Recommends settings that fit a device: tries all ways to shard, offload and checkpoint, the cheapest first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import TypeVar

import torch

from hf_zero.config import GATHER_DTYPES, REDUCE_DTYPES, ZeroConfig
from hf_zero.errors import HfZeroError
from hf_zero.planner.prediction import Prediction


T = TypeVar("T")

# Fields of `ZeroConfig` that are set by other flags or by none, and the stage, which is always included.
NO_FLAG_OF_ZERO = {"stage", "compute_dtype", "timeout_seconds", "strict"}
# Defaults of flags that differ from those of the fields.
DEFAULTS_OF_FLAGS = {"chunked_loss": "auto"}

# Share of a device's memory that tensors may take. The remainder is for libraries and fragmentation.
USABLE_SHARE = 0.9
GIB = 2**30
# (stage, offload), in order of increasing communication, copies or computation.
WAYS = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "params"))


@dataclass(frozen=True)
class Refused:
    """A way that is not possible, or for which the prediction is incomplete."""

    config: ZeroConfig
    gradient_checkpointing: bool
    reason: str  # the error message

    def row(self) -> str:
        """Returns its row of the table, with the reason in place of numbers."""
        checkpointing = "yes" if self.gradient_checkpointing else "no"
        size = self.config.shard_size
        groups = "" if size is None else f" in shard groups of {size}"
        return f"  {self.config.stage:<5}  {self.config.offload:9}  {checkpointing:13}  skipped{groups}: {self.reason}"


@dataclass(frozen=True)
class Advice:
    """Ways to train a model, and which one to use."""

    predictions: list[Prediction]  # the cheapest first
    memory_nbytes: int  # of one device
    refused: list[Refused]

    @property
    def best(self) -> Prediction | None:
        """The cheapest way that fits, or `None`."""
        return next((each for each in self.predictions if self.fits(each)), None)

    def fits(self, prediction: Prediction) -> bool:
        """Whether the tensors of a step fit."""
        return prediction.needed_nbytes <= USABLE_SHARE * self.memory_nbytes

    def render(self, verdict: str = "") -> str:
        """Returns a table of the candidate settings, followed by the recommendation with its reason. A `verdict`
        replaces the recommendation; then no row is marked."""
        head = f"  {'stage':5}  {'offload':9}  {'checkpointing':13}  {'at rest':>9}  {'peak':>9}  {'host':>9}  fits"
        unit = f"GiB of each device; tensors may take {USABLE_SHARE:.0%} of {self.memory_nbytes / GIB:.1f}"
        skipped = [each.row() for each in self.refused]
        marked = None if verdict else self.best
        rows = [self._row(each, is_marked=each is marked) for each in self.predictions]
        return "\n".join([unit, head, *rows, *skipped, verdict or self._verdict()])

    def _row(self, prediction: Prediction, *, is_marked: bool) -> str:
        peak = "" if prediction.peak_nbytes is None else f"{prediction.peak_nbytes / GIB:.2f}"
        checkpointing = "yes" if prediction.gradient_checkpointing else "no"
        mark = ("yes  <-" if is_marked else "yes") if self.fits(prediction) else "no"
        return (
            f"  {prediction.config.stage:<5}  {prediction.config.offload:9}  {checkpointing:13}  "
            f"{prediction.kept_nbytes / GIB:>9.2f}  {peak:>9}  {prediction.host_nbytes / GIB:>9.2f}  {mark}"
        )

    def _verdict(self) -> str:
        best = self.best
        if best is None:
            least = min(each.needed_nbytes for each in self.predictions)
            return nothing_fits(f"the least needs {least / GIB:.2f} GiB")
        before = self.predictions[: self.predictions.index(best)]
        reason = "nothing needs to be sharded"
        if before:
            nearest = min(each.needed_nbytes for each in before)
            reason = f"the least sharding that fits; cheaper settings need {nearest / GIB:.2f} GiB or more"
        return f"recommended: {flags_of(best)} ({reason})"


def nothing_fits(least: str, *, tried_rows: bool = False) -> str:
    """Returns the message for the case that no way fits. `least` is the requirement of the smallest way; `tried_rows`:
    smaller micro-batches were tried as well."""
    fewer_rows = "" if tried_rows else "a smaller micro-batch, "
    return f"nothing fits: {least}; use more ranks, shorter sequences, {fewer_rows}or LoRA with a frozen base"


def flags_of(prediction: Prediction) -> str:
    """Returns the flags of a predicted run: the stage, all `--zero_*` flags that differ from their defaults, and
    `--gradient_checkpointing`."""
    config = prediction.config
    flags = [f"--zero_stage {config.stage}"]
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name not in NO_FLAG_OF_ZERO and value != DEFAULTS_OF_FLAGS.get(each.name, each.default):
            flags.append(_flag(each.name, value))
    return " ".join([*flags, *(["--gradient_checkpointing"] if prediction.gradient_checkpointing else [])])


def _flag(name: str, value: object) -> str:
    """Returns the flag for a field of `ZeroConfig`."""
    if name == "bucket_nbytes" and isinstance(value, int):
        return f"--zero_bucket_mb {value // 2**20}"
    if value is True:
        return f"--zero_{name}"
    names = {dtype: text for text, dtype in {**REDUCE_DTYPES, **GATHER_DTYPES}.items()}
    text = names.get(value) if isinstance(value, torch.dtype) else str(value)
    return f"--zero_{name} {quote(text or str(value))}"


def ways(
    config: ZeroConfig, gradient_checkpointing: bool, shard_sizes: Sequence[int | str | None] | None = None
) -> Iterator[tuple[ZeroConfig, bool]]:
    """Yields all ways to shard and offload, the cheapest first, each with whether blocks are checkpointed.

    Args:
        config (`ZeroConfig`): the settings, of which stage and offload are varied.
        gradient_checkpointing (`bool`): always checkpoint blocks.
        shard_sizes (sequence, *optional*): sizes of shard groups to try; by default that of `config`. Stage 0 has no
            shard groups.
    """
    plain = replace(config, offload="none", offload_dir=None, offload_fraction=1.0)
    shard_sizes = shard_sizes or [config.shard_size]
    for switch in (True,) if gradient_checkpointing else (False, True):
        for stage, offload in WAYS:
            offload_dir = None if offload == "none" else config.offload_dir
            gather_dtype = config.gather_dtype if stage == 3 else None  # only stage 3 gathers parameters
            for shard_size in dict.fromkeys(size if stage else None for size in shard_sizes):
                way = replace(plain, stage=stage, shard_size=shard_size, gather_dtype=gather_dtype)
                yield replace(way, offload=offload, offload_dir=offload_dir), switch


def advise(
    predict: Callable[[ZeroConfig, bool], Prediction],
    config: ZeroConfig,
    memory_nbytes: int,
    *,
    gradient_checkpointing: bool = False,
) -> Advice:
    """Predicts all `ways` to shard and offload for devices with `memory_nbytes` of memory. `predict` takes the
    settings of a way and whether blocks are checkpointed."""
    found, refused = tried(predict, ways(config, gradient_checkpointing))
    return Advice(found, memory_nbytes, refused)


def tried(
    predict: Callable[[ZeroConfig, bool], T], ways: Iterable[tuple[ZeroConfig, bool]]
) -> tuple[list[T], list[Refused]]:
    """Predicts ways like `advise`, and returns the results and the ways that are not possible. If none is possible,
    raises the [`HfZeroError`] of the first."""
    found: list[T] = []
    refused: list[Refused] = []
    first: HfZeroError | None = None
    for config, switch in ways:
        try:
            found.append(predict(config, switch))
        except HfZeroError as error:
            refused.append(Refused(config, switch, " ".join(str(error).split())))
            first = first or error
    if first is not None and not found:
        raise first
    return found, refused
