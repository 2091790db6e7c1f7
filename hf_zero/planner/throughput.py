"""Converts predicted steps to tokens per second and MFU."""

from dataclasses import dataclass
from typing import Any

from hf_zero.planner.prediction import Prediction
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
    def needed_nbytes(self) -> int:
        return self.prediction.needed_nbytes

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
