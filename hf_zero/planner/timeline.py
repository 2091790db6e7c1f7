"""The events of a step in the order in which the engine issues them, and the time that they take on given links.

[Note: lanes] A lane executes its work sequentially. "compute" has the device's kernels, "exchange" the collectives of
a shard group, "across" those among replicas, "average" the stream that combines these two, "sequence" those among
ranks that share sequences, "up" and "down" the copies between device and host, and "host" the jobs on the host. Work
starts when its lane is free and the preceding work of the issuing lane is done, like kernels on streams. A lane that
waits for work of another lane is blocked until that work ends. Kernels on other streams also occupy "compute", since
they run on the same device. Issuing work takes no time.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hf_zero.comm import Pending
from hf_zero.planner.topology import Cluster


COMPUTE, EXCHANGE, ACROSS, AVERAGE, SEQUENCE = "compute", "exchange", "across", "average", "sequence"
UP, DOWN, HOST = "up", "down", "host"
# All-reduces of averages over several shard groups, among the ranks that hold the same shard.
ALL_REDUCE = "all_reduce"
# Exchanges of attention heads among the ranks that share each sequence.
HEADS = "heads"
# The lane of each kind of work, if it has a different name.
LANES = {"gather": EXCHANGE, "reduce": EXCHANGE, ALL_REDUCE: ACROSS, HEADS: SEQUENCE}
NANO = 10**9


@dataclass
class Work:
    """Work of a lane between two other events."""

    lane: str
    flops: int = 0  # of matrix products
    nbytes: int = 0  # read and written by all other operations
    again_flops: int = 0  # the part of `flops` for recomputation of checkpointed blocks


@dataclass(frozen=True)
class Begin:
    """The start of an exchange or a copy. An exchange of one rank takes no time: a point in the issuing lane."""

    number: int  # identifies it in `Wait`
    kind: str  # "gather", "reduce", "all_reduce" (for each half of it), "heads", "up", "down"
    nbytes: int  # full size of a collective; size of a copy; size of all heads on this rank
    num_ranks: int  # participating ranks
    lane: str  # the issuing lane
    stride: int = 1  # distance between the ranks
    by_messages: bool = False  # each rank sends a part to every other rank, instead of a ring


@dataclass(frozen=True)
class Wait:
    """A lane waits for the event with this number."""

    number: int
    lane: str


@dataclass(frozen=True)
class Ended:
    """The end of a micro-batch's backward. With `is_last`, this backward also ran the reductions that earlier
    micro-batches had deferred."""

    is_last: bool = False


Event = Work | Begin | Wait | Ended


class Timeline:
    """Records events while its `record` context is active. Entering the context discards earlier events."""

    def __init__(self):
        self.events: list[Event] = []
        self.recording = False
        self._lane = COMPUTE
        self._number = 0
        self._times = 1

    @contextmanager
    def record(self) -> Iterator[None]:
        """Records the events inside the context, in place of earlier ones."""
        self.recording, self.events, self._number = True, [], 0
        try:
            yield
        finally:
            self.recording = False

    @contextmanager
    def inside(self, lane: str | None) -> Iterator[None]:
        """Attributes work inside the context to a lane. `None`: the work is part of an exchange and is not counted."""
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Counts work inside the context `times` times."""
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    @contextmanager
    def behind(self, lane: str) -> Iterator[None]:
        """Issues work inside the context to a lane, as to a side stream: it starts after all work that was issued to
        the current lane."""
        if self._lane is None or self._lane == lane:  # part of an exchange, or already issued to this lane
            yield
            return
        issued = self.mark(lane)
        with self.inside(lane):
            issued.wait()
            yield

    def compute(self, flops: int, nbytes: int, *, again: bool = False) -> None:
        """Records an operation: the FLOPs of a matrix product, or the bytes that another operation reads and writes.
        `again`: a checkpointed block is recomputing its forward."""
        if not self.recording or self._lane is None:
            return
        last = self.events[-1] if self.events else None
        if not isinstance(last, Work) or last.lane != self._lane:
            last = Work(self._lane)
            self.events.append(last)
        last.flops += flops * self._times
        last.nbytes += nbytes * self._times
        last.again_flops += flops * self._times if again else 0

    def begin(
        self,
        kind: str,
        nbytes: int,
        num_ranks: int,
        done: Pending,
        stride: int = 1,
        *,
        by_messages: bool = False,
    ) -> Pending:
        """Records the start of an exchange or a copy, see [`Begin`]. `wait` of the result also waits for `done`."""
        if not self.recording:
            return done
        self._number += 1
        number, events = self._number, self.events
        events.append(Begin(number, kind, nbytes, num_ranks, self._lane or COMPUTE, stride, by_messages))

        def finish():
            self._wait(number, events)
            done.wait()

        return Pending(finish)

    def mark(self, kind: str) -> Pending:
        """Records a point in the current lane for which others can wait. `kind` is the kind of work for which they
        wait."""
        return Pending() if self._lane is None else self.begin(kind, 0, 1, Pending())

    def _wait(self, number: int, events: list[Event]) -> None:
        if self.recording and events is self.events:  # events of earlier steps are over
            events.append(Wait(number, self._lane or COMPUTE))

    def end_pass(self, *, is_last: bool = False) -> None:
        """Records the end of a backward, see [`Ended`]."""
        self.events.append(Ended(is_last))


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in integer nanoseconds, so that it can be extrapolated to more blocks."""

    pass_ns: int  # until the end of backward
    update_ns: int  # after backward: the norm, the optimizer, and transfers that are still in progress
    compute_ns: int  # kernels of the device
    busy_ns: dict[str, int]  # by kind of exchange or copy, and for the host
    exposed_ns: dict[str, int]  # how long the device waits for each kind
    flops: int  # of all matrix products in forward and backward
    model_flops: int  # the same without recomputation

    def step_seconds(self, num_passes: int = 1) -> float:
        """Returns the seconds of a step with `num_passes` micro-batches."""
        return (self.pass_ns * num_passes + self.update_ns) / NANO


def played(events: list[Event], cluster: Cluster) -> StepTime:
    """Simulates the events of one micro-batch and the update on a cluster, and returns their times."""
    play = _Play(cluster)
    for event in events:
        play.take(event)
    return play.end([event for event in events if isinstance(event, Work)])


class _Play:
    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._now: Counter[str] = Counter()  # when each lane becomes free, in nanoseconds
        self._ends: dict[int, tuple[int, str]] = {}  # the end and the kind of each started event
        self._busy: Counter[str] = Counter()
        self._exposed: Counter[str] = Counter({kind: 0 for kind in (*LANES, UP, DOWN, HOST)})
        self._passed = 0

    def take(self, event: Event) -> None:
        if isinstance(event, Work):
            if event.lane == HOST:
                self._occupy(HOST, round(self._cluster.host_seconds(event.nbytes) * NANO), HOST)
                return
            nanoseconds = round(self._cluster.compute_seconds(event.flops, event.nbytes) * NANO)
            for lane in dict.fromkeys((event.lane, COMPUTE)):  # kernels of all streams share the device
                self._occupy(lane, nanoseconds, COMPUTE)
        elif isinstance(event, Begin):
            self._begin(event)
        elif isinstance(event, Wait):
            self._wait(*self._ends[event.number], event.lane)
        else:
            self._passed = self._now[COMPUTE]
            if event.is_last:  # earlier micro-batches do not wait for reductions
                self._passed -= sum(self._exposed.values())

    def _begin(self, event: Begin) -> None:
        if event.num_ranks == 1:
            self._ends[event.number] = (self._now[event.lane], event.kind)
            return
        lane = LANES.get(event.kind, event.kind)
        if event.kind in LANES:
            seconds = self._cluster.exchange_seconds(
                event.nbytes, event.num_ranks, event.stride, by_messages=event.by_messages
            )
        else:
            seconds = self._cluster.copy_seconds(event.nbytes)
        self._now[lane] = max(self._now[lane], self._now[event.lane])
        self._occupy(lane, round(seconds * NANO), event.kind)
        self._ends[event.number] = (self._now[lane], event.kind)

    def _occupy(self, lane: str, nanoseconds: int, kind: str) -> None:
        self._now[lane] += nanoseconds
        if kind != COMPUTE or lane == COMPUTE:  # kernels of other streams are already counted in the device's lane
            self._busy[kind] += nanoseconds

    def _wait(self, end: int, kind: str, lane: str) -> None:
        late = end - self._now[lane]
        if late > 0:
            self._now[lane] = end
            if lane == COMPUTE:
                self._exposed[kind] += late

    def end(self, work: list[Work]) -> StepTime:
        """Ends the step when all lanes are done, because the next forward waits for them."""
        for end, kind in sorted(self._ends.values()):
            self._wait(end, kind, COMPUTE)
        self._wait(self._now[HOST], HOST, COMPUTE)
        compute = self._busy.pop(COMPUTE, 0)
        return StepTime(
            pass_ns=self._passed,
            update_ns=self._now[COMPUTE] - self._passed,
            compute_ns=compute,
            busy_ns={kind: self._busy[kind] for kind in self._exposed},
            exposed_ns=dict(self._exposed),
            flops=sum(each.flops for each in work),
            model_flops=sum(each.flops - each.again_flops for each in work),
        )
