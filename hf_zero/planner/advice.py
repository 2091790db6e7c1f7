"""Advice on the settings that fit a device: all ways to shard, to offload and to checkpoint, the cheapest first."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hf_zero.config import ZeroConfig
from hf_zero.errors import HfZeroError
from hf_zero.planner.prediction import Prediction


T = TypeVar("T")

# Of a device's memory, what tensors may take: the rest is for libraries, and for what allocators cannot use.
USABLE_SHARE = 0.9
GIB = 2**30
# Each sends, copies or computes more than the one before it: (stage, offload).
WAYS = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "params"))


@dataclass(frozen=True)
class Refused:
    """A way that is not possible, or of which too little is known.

    Args:
        config (`ZeroConfig`): its settings.
        gradient_checkpointing (`bool`): whether blocks are checkpointed.
        reason (`str`): what was refused.
    """

    config: ZeroConfig
    gradient_checkpointing: bool
    reason: str

    def row(self) -> str:
        """Returns its row of a table: what it is, and why there are no numbers."""
        checkpointing = "yes" if self.gradient_checkpointing else "no"
        return f"  {self.config.stage:<5}  {self.config.offload:9}  {checkpointing:13}  left out: {self.reason}"


@dataclass(frozen=True)
class Advice:
    """Ways to train a model, and which one to take.

    Args:
        predictions (`list[Prediction]`): the ways, the cheapest first.
        memory_nbytes (`int`): what one device has.
        refused (`list[Refused]`): ways that are not possible.
    """

    predictions: list[Prediction]
    memory_nbytes: int
    refused: list[Refused] = field(default_factory=list)

    @property
    def best(self) -> Prediction | None:
        """The cheapest that fits; `None` when none does."""
        return next((each for each in self.predictions if self.fits(each)), None)

    def fits(self, prediction: Prediction) -> bool:
        """Whether the tensors of a step take no more than may be taken."""
        return prediction.needed_nbytes <= USABLE_SHARE * self.memory_nbytes

    def render(self) -> str:
        """Returns a table of the ways, and the advice with its reason."""
        head = f"  {'stage':5}  {'offload':9}  {'checkpointing':13}  {'at rest':>9}  {'peak':>9}  {'host':>9}  fits"
        unit = f"GiB of each device; tensors may take {USABLE_SHARE:.0%} of {self.memory_nbytes / GIB:.1f}"
        left_out = [each.row() for each in self.refused]
        return "\n".join([unit, head, *map(self._row, self.predictions), *left_out, self._verdict()])

    def _row(self, prediction: Prediction) -> str:
        peak = "" if prediction.peak_nbytes is None else f"{prediction.peak_nbytes / GIB:.2f}"
        checkpointing = "yes" if prediction.gradient_checkpointing else "no"
        mark = ("yes  <-" if prediction is self.best else "yes") if self.fits(prediction) else "no"
        return (
            f"  {prediction.config.stage:<5}  {prediction.config.offload:9}  {checkpointing:13}  "
            f"{prediction.resting_nbytes / GIB:>9.2f}  {peak:>9}  {prediction.host_nbytes / GIB:>9.2f}  {mark}"
        )

    def _verdict(self) -> str:
        best = self.best
        if best is None:
            least = min(each.needed_nbytes for each in self.predictions)
            return (
                f"nothing fits: the least needs {least / GIB:.2f} GiB; use more ranks, shorter sequences, a smaller "
                "micro-batch, or LoRA"
            )
        before = self.predictions[: self.predictions.index(best)]
        reason = "nothing needs to be sharded"
        if before:
            nearest = min(each.needed_nbytes for each in before)
            reason = f"the least sharding that fits; what is cheaper needs {nearest / GIB:.2f} GiB or more"
        return f"recommended: {flags_of(best)} ({reason})"


def flags_of(prediction: Prediction) -> str:
    """Returns the flags of a run that was predicted."""
    flags = [f"--zero_stage {prediction.config.stage}"]
    if prediction.config.offload != "none":
        flags.append(f"--zero_offload {prediction.config.offload}")
    if prediction.config.shard_size is not None:
        flags.append(f"--zero_shard_size {prediction.config.shard_size}")
    if prediction.config.gather_dtype is not None:
        flags.append("--zero_gather_dtype int8")
    if prediction.config.secondary_shard:
        flags.append("--zero_secondary_shard")
    if prediction.config.reduce_bits is not None:
        flags.append(f"--zero_reduce_dtype int{prediction.config.reduce_bits}")
    if prediction.config.sequence_parallel > 1:
        flags.append(f"--zero_sequence_parallel {prediction.config.sequence_parallel}")
    return " ".join([*flags, *(["--gradient_checkpointing"] if prediction.gradient_checkpointing else [])])


def ways(config: ZeroConfig, gradient_checkpointing: bool) -> Iterator[tuple[ZeroConfig, bool]]:
    """Yields all ways to shard and to offload, the cheapest first, each with whether blocks are checkpointed.

    Args:
        config (`ZeroConfig`): of whose stage and offload others are tried; the rest is kept.
        gradient_checkpointing (`bool`): blocks are checkpointed in any case.
    """
    plain = replace(
        config, offload="none", offload_dir=None, offload_fraction=1.0, delayed_update=0, secondary_shard=False
    )
    for switch in (True,) if gradient_checkpointing else (False, True):
        for stage, offload in WAYS:
            shard_size = config.shard_size if stage else None  # stage 0 has no shard groups
            offload_dir = None if offload == "none" else config.offload_dir
            gather_dtype = config.gather_dtype if stage == 3 else None  # where parameters are gathered for each use
            secondary = config.secondary_shard and stage == 3 and offload != "params"
            way = replace(plain, stage=stage, shard_size=shard_size, gather_dtype=gather_dtype)
            yield replace(way, offload=offload, offload_dir=offload_dir, secondary_shard=secondary), switch


def advise(
    predict: Callable[[ZeroConfig, bool], Prediction],
    config: ZeroConfig,
    memory_nbytes: int,
    *,
    gradient_checkpointing: bool = False,
) -> Advice:
    """Predicts all ways to shard and to offload, without checkpointing and with it.

    Args:
        predict (`Callable`): predicts one way, given its settings and whether blocks are checkpointed.
        config (`ZeroConfig`): of whose stage and offload others are tried; the rest is kept.
        memory_nbytes (`int`): what one device has.
        gradient_checkpointing (`bool`): blocks are checkpointed in any case.
    """
    found, refused = tried(predict, ways(config, gradient_checkpointing))
    return Advice(found, memory_nbytes, refused)


def tried(
    predict: Callable[[ZeroConfig, bool], T], ways: Iterable[tuple[ZeroConfig, bool]]
) -> tuple[list[T], list[Refused]]:
    """Predicts ways, and returns what was found, with those that are not possible.

    Args:
        predict (`Callable`): as for `advise`.
        ways (iterable): the settings of each, and whether blocks are checkpointed.

    Raises:
        `HfZeroError`: as the first of them was refused, where all are.
    """
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
