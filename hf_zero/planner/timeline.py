"""The events of a step in the order in which the engine issues them, and what they take on given links.

[Note: lanes] A lane does one thing after another: "compute" has the device's kernels, "exchange" the collectives of a
shard group, "across" those among replicas, "average" the stream on which these follow one another, "sequence" those
among ranks that share sequences, "up" and "down" the copies between device and host, "host" the jobs on what has
arrived there. Work of a lane begins when the lane is free and what the issuing lane had to do before is done, as
kernels on streams do. A lane that waits for work of another stands still until that has ended. Kernels on other
streams take their time from those of "compute", since they run on one device. The process that issues takes no time.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hf_zero.comm import Pending
from hf_zero.planner.topology import Cluster


COMPUTE, EXCHANGE, ACROSS, AVERAGE, SEQUENCE = "compute", "exchange", "across", "average", "sequence"
UP, DOWN, HOST = "up", "down", "host"
# Of averages over several shard groups: what goes among the ranks that hold the same shard.
ALL_REDUCE = "all_reduce"
# Around attention, among the ranks that share each sequence.
HEADS = "heads"
# In which lane work of a kind is done, where that has another name.
LANES = {"gather": EXCHANGE, "reduce": EXCHANGE, ALL_REDUCE: ACROSS, HEADS: SEQUENCE}
NANO = 10**9


@dataclass
class Work:
    """What a lane does between two other events."""

    lane: str
    flops: int = 0  # of matrix products
    nbytes: int = 0  # that all other operations read and write
    again_flops: int = 0  # of `flops`, those of checkpointed blocks that compute their forward once more


@dataclass(frozen=True)
class Begin:
    """An exchange or a copy begins."""

    number: int  # by which it is waited for
    kind: str  # "gather", "reduce", "all_reduce" (for each half of it), "heads", "up", "down"
    nbytes: int  # of the whole of a collective; of what is copied; of all heads that this rank has
    num_ranks: int  # that take part
    lane: str  # that issues it
    stride: int = 1  # how far the ranks are apart
    by_messages: bool = False  # each rank sends a part to each other one, and not in a ring


@dataclass(frozen=True)
class Mark:
    """A lane has come here: an event of a stream."""

    number: int  # by which it is waited for
    kind: str  # of the work that a wait for it is exposed to
    lane: str


@dataclass(frozen=True)
class Wait:
    """A lane waits for what has begun under this number."""

    number: int
    lane: str


@dataclass(frozen=True)
class Ended:
    """A part of the step has ended: the backward of a micro-batch. One that `is_last` has reduced while it ran what
    those before it leave for it."""

    is_last: bool = False


@dataclass(frozen=True)
class Follow:
    """What a lane is given from now on begins after what another one has had so far."""

    lane: str
    leader: str


Event = Work | Begin | Mark | Wait | Ended | Follow


class Timeline:
    """Records events inside of `record`, each time anew."""

    def __init__(self):
        self.events: list[Event] = []
        self.recording = False
        self._lane = COMPUTE
        self._number = 0
        self._times = 1

    @contextmanager
    def record(self) -> Iterator[None]:
        """Records what happens inside, in place of what was recorded before."""
        self.recording, self.events, self._number = True, [], 0
        try:
            yield
        finally:
            self.recording = False

    @contextmanager
    def inside(self, lane: str | None) -> Iterator[None]:
        """Counts what is computed inside to a lane; to none for what is a part of an exchange."""
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Counts what is computed inside so many times."""
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    @contextmanager
    def behind(self, lane: str) -> Iterator[None]:
        """Issues what is done inside from a lane, behind what this one has done so far, as a side stream does."""
        if self._lane is None or self._lane == lane:  # it is a part of an exchange, or issued from there already
            yield
            return
        if self.recording:
            self.events.append(Follow(lane, self._lane))
        with self.inside(lane):
            yield

    def compute(self, flops: int, nbytes: int, *, again: bool = False) -> None:
        """Records an operation: the FLOPs of a matrix product, or the bytes that another one reads and writes. `again`
        says that a checkpointed block computes its forward once more."""
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
        """Records that an exchange or a copy begins, see [`Begin`]. `done` is waited for when the result is."""
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
        """Records that the lane has come here, for others to wait for."""
        if not self.recording:
            return Pending()
        self._number += 1
        self.events.append(Mark(self._number, kind, self._lane or COMPUTE))
        return Pending(partial(self._wait, self._number, self.events))

    def _wait(self, number: int, events: list[Event]) -> None:
        if self.recording and events is self.events:  # what has begun in an earlier step is over
            events.append(Wait(number, self._lane or COMPUTE))

    def end_pass(self, *, is_last: bool = False) -> None:
        """Records that backward has ended, see [`Ended`]."""
        self.events.append(Ended(is_last))


@dataclass(frozen=True)
class StepTime:
    """What a step takes, in whole nanoseconds, so that it can be extended to further blocks."""

    pass_ns: int  # until backward has ended
    update_ns: int  # from then on: the norm, the optimizer, and what is still on its way
    compute_ns: int  # the device's kernels
    busy_ns: dict[str, int]  # of each kind of exchange and copy, and of the host
    exposed_ns: dict[str, int]  # for how long the device waits for each of them
    flops: int  # of all matrix products of a forward and backward
    model_flops: int  # without those that checkpointed blocks compute once more

    def step_seconds(self, num_passes: int = 1) -> float:
        """Seconds of a step with so many micro-batches."""
        return (self.pass_ns * num_passes + self.update_ns) / NANO


def played(events: list[Event], cluster: Cluster) -> StepTime:
    """Plays the events of one micro-batch and the update on a cluster, and returns how long they take."""
    play = _Play(cluster)
    for event in events:
        play.take(event)
    return play.end([event for event in events if isinstance(event, Work)])


class _Play:
    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._now: Counter[str] = Counter()  # when each lane is free, in nanoseconds
        self._ends: dict[int, tuple[int, str]] = {}  # of what has begun, with its kind
        self._busy: Counter[str] = Counter()
        self._exposed: Counter[str] = Counter({kind: 0 for kind in (*LANES, UP, DOWN, HOST)})
        self._passed = 0

    def take(self, event: Event) -> None:
        if isinstance(event, Work):
            if event.lane == HOST:
                self._occupy(HOST, round(self._cluster.host_seconds(event.nbytes) * NANO), HOST)
                return
            nanoseconds = round(self._cluster.compute_seconds(event.flops, event.nbytes) * NANO)
            for lane in dict.fromkeys((event.lane, COMPUTE)):  # whichever stream they are on, kernels share the device
                self._occupy(lane, nanoseconds, COMPUTE)
        elif isinstance(event, Begin):
            self._begin(event)
        elif isinstance(event, Mark):
            self._ends[event.number] = (self._now[event.lane], event.kind)
        elif isinstance(event, Wait):
            self._wait(*self._ends[event.number], event.lane)
        elif isinstance(event, Follow):
            self._now[event.lane] = max(self._now[event.lane], self._now[event.leader])
        else:
            self._passed = self._now[COMPUTE]
            if event.is_last:  # another micro-batch does not wait for reductions
                self._passed -= sum(self._exposed.values())

    def _begin(self, event: Begin) -> None:
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
        if kind != COMPUTE or lane == COMPUTE:  # kernels of other streams are among those of the device
            self._busy[kind] += nanoseconds

    def _wait(self, end: int, kind: str, lane: str) -> None:
        late = end - self._now[lane]
        if late > 0:
            self._now[lane] = end
            if lane == COMPUTE:
                self._exposed[kind] += late

    def end(self, work: list[Work]) -> StepTime:
        """The step is over when all lanes are done: the next forward waits for them."""
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
