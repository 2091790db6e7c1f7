"""Converts predicted steps to tokens per second and MFU, and ranks ways to train by speed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.planner.prediction import Prediction
from hf_zero.planner.search import GIB, USABLE_SHARE, Refused, flags_of, nothing_fits, row_of, tried, usable, ways
from hf_zero.planner.timeline import ALL_REDUCE, HEADS, LANES, NANO, StepTime
from hf_zero.planner.topology import LINK_SHARE, MEMORY_SHARE, Cluster


# Names of the kinds of work in the output.
NAMES = {
    "gather": "all-gathers",
    "reduce": "reduce-scatters",
    "all_reduce": "all-reduces across groups",
    "heads": "exchanges of heads",
    "up": "copies to the device",
    "down": "copies to the host",
    "host": "work on the host",
}
NOT_MODELED = (
    "not modeled: kernel launches and Python between them, compiled or fused kernels, data loading, slower kernels "
    "during exchanges, contention between jobs and hosts, files on disk"
)
MAX_SHOWN = 20


@dataclass(frozen=True)
class Throughput:
    """A prediction for a micro-batch."""

    prediction: Prediction  # with the time of a step
    cluster: Cluster
    num_rows: int  # of a micro-batch
    # tokens of a micro-batch, or rows for models without tokens; this rank's part if several ranks share sequences
    num_items: int
    unit: str = "tokens"  # "tokens" or "rows"

    @property
    def time(self) -> StepTime:
        assert self.prediction.time is not None
        return self.prediction.time

    @property
    def items_per_second(self) -> float:
        """Tokens or rows per second per device."""
        return self.num_items / self.time.step_seconds()

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B), which excludes recomputation."""
        return self.time.model_flops / self.time.step_seconds() / self.cluster.peak_flops

    @property
    def peak_nbytes(self) -> int:
        return self.prediction.needed_nbytes

    def fits(self, memory_nbytes: int) -> bool:
        """Whether the tensors of a step fit into a device's memory."""
        return self.peak_nbytes <= usable(memory_nbytes)

    def render(self) -> str:
        """Returns a line for each kind of work, and the totals."""
        time, cluster = self.time, self.cluster
        share, peak = cluster.device.utilization, cluster.peak_flops / 1e12
        lines = [
            f"time of a step on {cluster.num_hosts} x {cluster.gpus_per_host} {cluster.device.name}; matrix products "
            f"at {share:.0%} of {peak:,.1f} TFLOP/s, memory at {MEMORY_SHARE:.0%}, links at {LINK_SHARE:.0%}:",
            f"  {'kernels':<32}  {time.compute_ns / 1e6:>12.2f} ms",
        ]
        for kind, name in NAMES.items():
            busy, exposed = time.busy_ns[kind], time.exposed_ns[kind]
            if busy:
                link = f" {self._link(kind)}" if kind in LANES else ""
                lines.append(f"  {name:<32}  {busy / 1e6:>12.2f} ms{link}, {exposed / 1e6:.2f} ms exposed")
        lines += [
            f"  {'a step':<32}  {time.step_seconds() * 1e3:>12.2f} ms, {time.update_ns / 1e6:.2f} ms for the update",
            f"  {f'{self.unit} per second per device':<32}  {self.items_per_second:>12,.0f}",
            f"  {'MFU':<32}  {self.mfu:>12.1%}",
            f"  {NOT_MODELED}",
        ]
        return "\n".join(lines)

    def _link(self, kind: str) -> str:
        size, num_ranks, stride = self.prediction.shard_size, self.prediction.num_ranks, 1
        if kind == ALL_REDUCE:
            size, stride = num_ranks // size, size
        elif kind == HEADS:
            size = self.prediction.config.sequence_parallel
        return "within the host" if self.cluster.is_within_hosts(size, stride) else "between hosts"

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary."""
        prediction, time = self.prediction, self.time
        return {
            **prediction.as_dict(),
            "per_device_train_batch_size": self.num_rows,
            "step_seconds": time.step_seconds(),
            "update_seconds": time.update_ns / NANO,
            "compute_seconds": time.compute_ns / NANO,
            "busy_seconds": {kind: value / NANO for kind, value in time.busy_ns.items()},
            "exposed_seconds": {kind: value / NANO for kind, value in time.exposed_ns.items()},
            f"{self.unit}_per_second_and_device": self.items_per_second,
            "mfu": self.mfu,
        }


@dataclass(frozen=True)
class Ranking:
    """Ways to train a model, ranked by speed."""

    ways: list[Throughput]  # the fastest first
    memory_nbytes: int  # of one device
    refused: list[Refused]
    # model states of the ways that were not predicted because these alone do not fit
    without_room: list[int]

    @property
    def fitting(self) -> list[Throughput]:
        """The ways that fit, the fastest first."""
        return [way for way in self.ways if way.fits(self.memory_nbytes)]

    @property
    def best(self) -> Throughput | None:
        """The fastest way that fits, or `None`."""
        return next(iter(self.fitting), None)

    def render(self, verdict: str = "") -> str:
        """Returns a table of the fastest ways that fit and the recommendation, or a `verdict` in its place."""
        fitting = self.fitting
        lines = [
            f"{len(fitting)} of {len(self.ways)} ways fit: tensors may take {USABLE_SHARE:.0%} of "
            f"{self.memory_nbytes / GIB:.1f} GiB; per device, the fastest first:",
            f"  {'stage':5}  {'offload':9}  {'checkpointing':13}  {'group':>6}  {'rows':>5}  {'peak GiB':>9}  "
            f"{'ms':>10}  {'exposed':>10}  {'per second':>11}  {'MFU':>6}",
            *map(self._row, fitting[:MAX_SHOWN]),
        ]
        num_slower = len(fitting) - MAX_SHOWN
        lines += [f"  and {num_slower} slower ones"] if num_slower > 0 else []
        if self.without_room:
            least = f"{min(self.without_room) / GIB:.1f} GiB or more"
            lines.append(f"  {len(self.without_room)} ways whose model states alone take {least} are not compared")
        return "\n".join([*lines, *(each.row() for each in self.refused), verdict or self.verdict()])

    def _row(self, way: Throughput) -> str:
        config, time = way.prediction.config, way.time
        group = f"{way.prediction.shard_size}" if config.stage else "-"
        return (
            f"{row_of(config, way.prediction.gradient_checkpointing)}  {group:>6}  {way.num_rows:>5}  "
            f"{way.peak_nbytes / GIB:>9.1f}  {time.step_seconds() * 1e3:>10.1f}  "
            f"{sum(time.exposed_ns.values()) / 1e6:>10.1f}  {way.items_per_second:>11,.0f}  {way.mfu:>6.1%}"
        )

    def verdict(self) -> str:
        """Returns a line with the recommended way and the reason."""
        best = self.best
        if best is None:
            least = min([*(way.peak_nbytes for way in self.ways), *self.without_room]) / GIB
            return nothing_fits(f"the least needs {least:.2f} GiB", tried_rows=True)
        too_large = next((way for way in self.ways if way.items_per_second > best.items_per_second), None)
        reason = f"{best.items_per_second:,.0f} {best.unit} per second per device, the highest that fits"
        if too_large is not None:
            reason += f"; faster settings need {too_large.peak_nbytes / GIB:.1f} GiB or more"
        return f"recommended: {flags_of(best.prediction)} --per_device_train_batch_size {best.num_rows} ({reason})"


def rank_ways(
    predict_sizes: Callable[[ZeroConfig, bool], Iterable[Throughput]],
    config: ZeroConfig,
    memory_nbytes: int,
    *,
    gradient_checkpointing: bool = False,
    shard_sizes: Sequence[int | str | None] | None = None,
    states_nbytes: Callable[[ZeroConfig], int] = lambda _: 0,
    watch: Callable[[list], Iterable] = iter,
) -> Ranking:
    """Predicts the throughput of all `ways` to shard and offload, with several micro-batch sizes each, on devices with
    `memory_nbytes` of memory.

    Args:
        predict_sizes (`Callable`): returns the predicted throughput for each micro-batch size, given the settings and
            whether gradient checkpointing is on.
        states_nbytes (`Callable`): returns the memory of the model states on a device, given the settings. Ways whose
            states alone do not fit are not predicted.
        watch (`Callable`): wraps the list of ways, to show progress.
    """
    without_room: list[int] = []

    def predict_fitting(way: ZeroConfig, switch: bool) -> Iterable[Throughput]:
        if (needed := states_nbytes(way)) <= usable(memory_nbytes):
            return predict_sizes(way, switch)
        without_room.append(needed)
        return []

    every = watch(list(ways(replace(config, offload_dir=None), gradient_checkpointing, shard_sizes)))
    each_way, refused = tried(predict_fitting, every)
    found = [each for sizes in each_way for each in sizes]
    # if equally fast, prefer less memory
    found.sort(key=lambda each: (-round(each.items_per_second, 1), each.peak_nbytes))
    return Ranking(found, memory_nbytes, refused, without_room)
