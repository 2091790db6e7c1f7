"""Finds settings with which a run fits a device: the cheapest way to shard it, the flags to add, the longest rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import Any

from tqdm import tqdm

from hf_zero.config import REDUCE_DTYPES, ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError, size_text
from hf_zero.planner.prediction import Prediction
from hf_zero.planner.throughput import Throughput


# Predicts a run, given its settings and whether blocks are checkpointed. Raises `HfZeroError` if that is not possible.
Predict = Callable[[ZeroConfig, bool], Prediction]

# Fields of `ZeroConfig` that are set by other flags or by none, and the stage, which is always included.
NO_FLAG_OF_ZERO = {"stage", "compute_dtype", "timeout_seconds", "strict"}
# Defaults of flags that differ from those of the fields.
DEFAULTS_OF_FLAGS = {"chunked_loss": "auto"}
CHECKPOINTING = "gradient_checkpointing"  # beside the fields of `ZeroConfig`

# Share of a device's memory that tensors may take. The remainder is for libraries and fragmentation.
USABLE_SHARE = 0.9
GIB = 2**30
# (stage, offload), in order of increasing communication, copies or computation.
WAYS = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "params"))
MAX_SHOWN = 20  # rows of a table by speed
# Candidate numbers of ranks that share each sequence.
GROUP_SIZES = (2, 4, 8)
# The longest rows are a multiple of this number of tokens.
STEP = 64
# Upper limit for models without a maximum position.
MOST_TOKENS = 2**24
GROWTH = 8


def usable(memory_nbytes: int) -> int:
    """Returns the memory of a device that tensors may take."""
    return int(USABLE_SHARE * memory_nbytes)


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


def flags_of(prediction: Prediction) -> str:
    """Returns the flags of a predicted run: the stage, all `--zero_*` flags that differ from their defaults, and
    `--gradient_checkpointing`."""
    config, settings = prediction.config, {"stage": prediction.config.stage}
    for each in fields(config):
        default = DEFAULTS_OF_FLAGS.get(each.name, each.default)
        if each.name not in NO_FLAG_OF_ZERO and (value := getattr(config, each.name)) != default:
            settings[each.name] = value
    return _flags(settings | ({CHECKPOINTING: True} if prediction.gradient_checkpointing else {}))


def _flags(settings: Mapping[str, Any]) -> str:
    return " ".join(_flag(name, value) for name, value in settings.items())


def _flag(name: str, value: object) -> str:
    """Returns the flag for a field of `ZeroConfig`, or for checkpointing."""
    if name == "bucket_nbytes" and isinstance(value, int):
        return f"--zero_bucket_mb {value // 2**20}"
    flag = f"--{name}" if name == CHECKPOINTING else f"--zero_{name}"
    if value is True:
        return flag
    names = {dtype: text for text, dtype in REDUCE_DTYPES.items()}  # those of gathers are among them
    return f"{flag} {quote(str(names.get(value, value)))}"


def nothing_fits(least: str, *, tried_rows: bool = False) -> str:
    """Returns the message for the case that no way fits. `least` is the requirement of the smallest way; `tried_rows`:
    smaller micro-batches were tried as well."""
    fewer_rows = "" if tried_rows else "a smaller micro-batch, "
    return f"nothing fits: {least}; use more ranks, shorter sequences, {fewer_rows}or LoRA with a frozen base"


# All ways


@dataclass(frozen=True)
class Refused:
    """A way that is not possible, or for which the prediction is incomplete."""

    config: ZeroConfig
    gradient_checkpointing: bool
    reason: str  # the error message

    def row(self) -> str:
        """Returns its row of the table, with the reason in place of numbers."""
        size = self.config.shard_size
        groups = "" if size is None else f" in shard groups of {size}"
        return f"{_way(self.config, self.gradient_checkpointing)}  skipped{groups}: {self.reason}"


@dataclass(frozen=True)
class Table:
    """Ways to train a model, and which one to use."""

    rows: list[Prediction | Throughput]  # predictions, the cheapest first, or throughputs, the fastest first
    by_speed: bool  # which of them
    memory_nbytes: int  # of one device
    refused: list[Refused]

    @property
    def best(self) -> Prediction | Throughput | None:
        """The first row that fits, or `None`."""
        return next(filter(self.fits, self.rows), None)

    def fits(self, row: Prediction | Throughput) -> bool:
        """Whether the tensors of a step fit."""
        return row.needed_nbytes <= usable(self.memory_nbytes)

    def render(self, verdict: str = "") -> str:
        """Returns a table of all ways, or of the fastest that fit, followed by the recommendation with its reason. A
        `verdict` replaces the recommendation; then no row is marked."""
        available = f"tensors may take {USABLE_SHARE:.0%} of {self.memory_nbytes / GIB:.1f} GiB"
        head = f"  {'stage':5}  {'offload':9}  {'checkpointing':13}  "
        if self.by_speed:
            fitting = [*filter(self.fits, self.rows)]
            lines = [
                f"{len(fitting)} of {len(self.rows)} ways fit: {available}; per device, the fastest first:",
                f"{head}{'group':>6}  {'rows':>5}  {'peak GiB':>9}  "
                f"{'ms':>10}  {'exposed':>10}  {'per second':>11}  {'MFU':>6}",
                *map(_row, fitting[:MAX_SHOWN]),
            ]
            num_slower = len(fitting) - MAX_SHOWN
            lines += [f"  and {num_slower} slower ones"] if num_slower > 0 else []
        else:
            marked = None if verdict else self.best
            lines = [f"GiB per device; {available}", f"{head}{'between steps':>13}  {'peak':>9}  {'host':>9}  fits"]
            for row in self.rows:
                mark = "no" if not self.fits(row) else "yes  <-" if row is marked else "yes"
                lines.append(f"{_row(row)}  {mark}")
        return "\n".join([*lines, *(each.row() for each in self.refused), verdict or self.verdict()])

    def verdict(self) -> str:
        """Returns a line with the recommended way and the reason."""
        best = self.best
        if best is None:
            least = min(row.needed_nbytes for row in self.rows) / GIB
            return nothing_fits(f"the least needs {least:.2f} GiB", tried_rows=self.by_speed)
        nearest = min((row.needed_nbytes / GIB for row in self.rows[: self.rows.index(best)]), default=None)
        if isinstance(best, Throughput):
            flags = f"{flags_of(best.prediction)} --per_device_train_batch_size {best.num_rows}"
            reason = f"{best.items_per_second:,.0f} {best.unit} per second per device, the highest that fits"
            reason += "" if nearest is None else f"; faster settings need {nearest:.1f} GiB or more"
        else:
            flags, reason = flags_of(best), "nothing needs to be sharded"
            if nearest is not None:
                reason = f"the least sharding that fits; cheaper settings need {nearest:.2f} GiB or more"
            reason += "; activations are not included" if best.step is None else ""
        return f"recommended: {flags} ({reason})"


def _row(row: Prediction | Throughput) -> str:
    if isinstance(row, Prediction):
        peak = "" if row.peak_nbytes is None else f"{row.peak_nbytes / GIB:.2f}"
        return (
            f"{_way(row.config, row.gradient_checkpointing)}  "
            f"{row.kept_nbytes / GIB:>13.2f}  {peak:>9}  {row.host_nbytes / GIB:>9.2f}"
        )
    prediction, time = row.prediction, row.time
    group = f"{prediction.shard_size}" if prediction.config.stage else "-"
    return (
        f"{_way(prediction.config, prediction.gradient_checkpointing)}  {group:>6}  {row.num_rows:>5}  "
        f"{row.needed_nbytes / GIB:>9.1f}  {time.step_seconds() * 1e3:>10.1f}  "
        f"{sum(time.exposed_ns.values()) / 1e6:>10.1f}  {row.items_per_second:>11,.0f}  {row.mfu:>6.1%}"
    )


def _way(config: ZeroConfig, gradient_checkpointing: bool) -> str:
    return f"  {config.stage:<5}  {config.offload:9}  {'yes' if gradient_checkpointing else 'no':13}"


def compare(
    predict: Callable[[ZeroConfig, bool], Sequence[Prediction | Throughput]],
    config: ZeroConfig,
    memory_nbytes: int,
    *,
    by_speed: bool = False,
    gradient_checkpointing: bool = False,
    shard_sizes: Sequence[int | str | None] | None = None,
) -> Table:
    """Predicts all `ways` to shard and offload for devices with `memory_nbytes` of memory. If none is possible, raises
    the [`HfZeroError`] of the first.

    Args:
        predict (`Callable`): returns the prediction in a list, or the throughput for each micro-batch size, given the
            settings and whether gradient checkpointing is on.
        by_speed (`bool`): `predict` returns throughputs, to be sorted by speed.
    """
    rows: list[Any] = []
    refused: list[Refused] = []
    first: HfZeroError | None = None
    every = list(ways(config, gradient_checkpointing, shard_sizes))
    for way, switch in tqdm(every, desc="ways", unit="way", leave=False, disable=None):  # only in terminals
        try:
            rows += predict(way, switch)
        except HfZeroError as error:
            refused.append(Refused(way, switch, " ".join(str(error).split())))
            first = first or error
    if first is not None and len(refused) == len(every):
        raise first
    if by_speed:  # if equally fast, prefer less memory
        rows.sort(key=lambda each: (-round(each.items_per_second, 1), each.needed_nbytes))
    return Table(rows, by_speed, memory_nbytes, refused)


# The flags to add


@dataclass(frozen=True)
class Remedy:
    """Flags with which a run fits, or with which it still does not fit."""

    settings: dict[str, Any]  # fields of `ZeroConfig` and checkpointing; if the run fits, all of them are necessary
    before: Prediction  # the run without the flags
    after: Prediction  # the run with the flags
    limit: int  # memory available to tensors, in bytes

    @property
    def fits(self) -> bool:
        """Whether the run fits with the flags."""
        return self.after.needed_nbytes <= self.limit

    @property
    def text(self) -> str:
        """The flags as on the command line."""
        return _flags(self.settings)

    def render(self) -> str:
        """Returns two lines: the use of memory, and the flags to add."""
        step, after = self.before.step, size_text(self.after.needed_nbytes)
        taken = {"model states": self.before.resting_nbytes}
        if step is not None:
            taken |= {"activations": step.activation_nbytes, "logits": step.head_nbytes}
        largest_first = sorted(taken.items(), key=lambda pair: -pair[1])
        parts = ", ".join(f"{name} take {size_text(max(0, nbytes))}" for name, nbytes in largest_first)
        needed = size_text(self.before.needed_nbytes)
        lines = [f"it does not fit: it needs {needed}, and tensors may take {size_text(self.limit)}; {parts}"]
        if self.fits:
            return "\n".join([*lines, f"it fits with {self.text}: {after}"])
        least = f"with {self.text} it takes {after}" if self.settings else "no flags take less"
        return "\n".join([*lines, nothing_fits(least)])


def further_settings(prediction: Prediction) -> Iterator[dict[str, Any]]:
    """Yields the settings that may be added to a run in order of increasing cost: none, then communication of
    parameters, computation, copies to the host, fewer sequences, and updates on the host."""
    config, num_ranks = prediction.config, prediction.num_ranks
    for stage in range(config.stage + 1, 4):
        yield {"stage": stage}
    if config.chunked_loss == "off":  # not "on", which trainers with their own loss reject
        yield {"chunked_loss": "auto"}
    if config.tiled_mlp == 1:
        yield {"tiled_mlp": "auto"}
    if not prediction.gradient_checkpointing:
        yield {CHECKPOINTING: True}
    if not config.offload_activations:
        yield {"offload_activations": True}
    for parts in GROUP_SIZES:
        if parts > config.sequence_parallel and num_ranks % parts == 0:
            yield {"sequence_parallel": parts}
    if config.offload == "none":
        yield {"offload": "optimizer"}
    if config.offload != "params":
        yield {"offload": "params"}


def remedy(predict: Predict, asked: Prediction, memory_nbytes: int) -> Remedy | None:
    """Finds the cheapest flags with which a run fits: adds one after the other until it does, and then removes those
    that are not necessary, the most expensive first. Returns `None` if the run already fits, or its memory is not
    known. `asked` is the run without further flags."""
    limit = usable(memory_nbytes)
    if asked.needed_nbytes <= limit or asked.step is None:
        return None

    def predicted(added: list[dict[str, Any]]) -> Prediction | None:
        """Returns `None` if the settings are not possible, or the memory is not known."""
        settings = {name: value for each in added for name, value in each.items()}
        switch = settings.pop(CHECKPOINTING, asked.gradient_checkpointing)
        try:
            found = predict(replace(asked.config, **settings), switch)
        except HfZeroError:
            return None
        return found if found.step is not None else None

    added: list[dict[str, Any]] = []
    after = asked
    for each in further_settings(asked):
        if after.needed_nbytes > limit and (found := predicted([*added, each])) is not None:
            added, after = [*added, each], found
    for each in added[-2::-1] if after.needed_nbytes <= limit else ():
        fewer = [other for other in added if other is not each]
        if (found := predicted(fewer)) is not None and found.needed_nbytes <= limit:
            added, after = fewer, found
    return Remedy({name: value for each in added for name, value in each.items()}, asked, after, limit)


# The longest rows


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits."""

    num_tokens: int
    prediction: Prediction  # with this length
    more: Prediction | None  # with `STEP` more tokens, which do not fit; None if the model has no more positions
    limit: int  # memory available to tensors, in bytes

    def render(self) -> str:
        """Returns a line with the length and what limits it."""
        line = f"max_length auto: {self.num_tokens} tokens take {size_text(self.prediction.needed_nbytes)}"
        if self.more is None:
            return f"{line}, and the model has no more positions"
        limit = size_text(self.limit)
        return f"{line} of the {limit} that tensors may take, and {self.num_tokens + STEP} tokens do not fit"


def longest_sequence(
    predict: Callable[[int], Prediction], memory_nbytes: int, num_positions: int | None = None
) -> Longest:
    """Finds the longest sequence, a multiple of `STEP` tokens, with which a run fits. Memory is nearly linear in the
    length, so few predictions are needed.

    Args:
        predict (`Callable`): predicts the run with sequences of the given length.
        memory_nbytes (`int`): memory of one device, of which tensors may take `USABLE_SHARE`.
        num_positions (`int`, *optional*): maximum length of the model; unlimited by default.

    Raises:
        `ConfigError`: if the shortest length does not fit, or the memory of a step cannot be predicted.
    """
    limit, found = usable(memory_nbytes), {}
    most = min(num_positions or MOST_TOKENS, MOST_TOKENS)
    most = most // STEP * STEP or most

    def fits(num_tokens: int) -> bool:
        if num_tokens not in found:
            found[num_tokens] = prediction = predict(num_tokens)
            if prediction.step is None:
                raise ConfigError(f"max_length auto: {prediction.note}; give a number of tokens")
        return found[num_tokens].needed_nbytes <= limit

    low = high = min(STEP, most)
    if not fits(low):
        raise ConfigError(
            f"max_length auto: {low} tokens take {size_text(found[low].needed_nbytes)}, and tensors may take "
            f"{size_text(limit)}; use more ranks, a higher stage, offload or a smaller micro-batch"
        )
    while high < most and fits(high):
        low, high = high, min(GROWTH * high, most)
    if fits(high):
        return Longest(high, found[high], None, limit)
    while high - low > STEP:
        slope = (found[high].needed_nbytes - found[low].needed_nbytes) / (high - low)
        guess = low + int((limit - found[low].needed_nbytes) / slope) // STEP * STEP
        for length in (guess, guess + STEP, (low + high) // (2 * STEP) * STEP):
            if low < length < high:
                low, high = (length, high) if fits(length) else (low, length)
    return Longest(low, found[low], found[high], limit)
