"""A loop-back: all ranks are threads of one process and share its device, so one device can try what takes several."""

import pickle
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_zero.activation.shard_model import place_and_divide_activations
from hf_zero.comm.base import ONE_HOST_NBYTES, Bucket, Comm, Messages, Pending
from hf_zero.comm.distributed import NativeComm
from hf_zero.comm.groups import Average
from hf_zero.comm.streams import Streams
from hf_zero.config import ZeroConfig
from hf_zero.engine import ZeroEngine
from hf_zero.engine.build import build
from hf_zero.errors import CommError


Result = TypeVar("Result")


def run_loopback(
    num_ranks: int,
    function: Callable[["LoopbackComm"], Result],
    device: torch.device,
    *,
    timeout_seconds: float = 60.0,
    bucket_nbytes: int = ONE_HOST_NBYTES,
    delay: Callable[[], None] | None = None,
) -> list[Result]:
    """Calls a function once for each rank, in a thread of its own and on a stream of its own. Returns what the ranks
    returned, in rank order.

    Args:
        timeout_seconds (`float`): how long a rank waits for the others in one exchange.
        delay (`Callable`, *optional*): is called before the copies of each collective, on their stream. It may issue
            work that makes them late.

    Raises:
        `CommError`: a rank did not come to an exchange in time.
        `Exception`: what the first rank raised that did not only wait for another one.
    """
    loop = _Loop(timeout_seconds)

    def run(rank: int) -> Result:
        streams = Streams(device)
        streams.set_device()
        with loop.on_own_stream(streams):
            return function(LoopbackComm(loop, rank, num_ranks, device, bucket_nbytes=bucket_nbytes, delay=delay))

    with ThreadPoolExecutor(num_ranks, thread_name_prefix="hf_zero-rank") as threads:
        futures = [threads.submit(run, rank) for rank in range(num_ranks)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, CommError))
    return [future.result() for future in futures]


class _Meeting:
    """Where the threads of all ranks hand one value to one another at a time."""

    def __init__(self, num_ranks: int, timeout_seconds: float):
        self._barrier = threading.Barrier(num_ranks, timeout=timeout_seconds)
        self._values: list = [None] * num_ranks

    def swap(self, rank: int, value: Any, what: str) -> list:
        """Returns the values of all ranks, in rank order."""
        try:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()  # before the next one is handed over
        except threading.BrokenBarrierError:
            raise CommError(f"{what}: rank {rank} waited for a rank that has failed, or that did not come") from None
        return values

    def abort(self) -> None:
        self._barrier.abort()


class _Loop:
    """What the ranks of one loop-back share: a meeting for each communicator, and queues for messages."""

    def __init__(self, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._has_failed = False
        self._meetings: dict[str, _Meeting] = {}
        self.messages: defaultdict[tuple, queue.Queue] = defaultdict(queue.Queue)

    def meeting(self, communicator: str, num_ranks: int) -> _Meeting:
        with self._lock:
            if communicator not in self._meetings:
                self._meetings[communicator] = _Meeting(num_ranks, self.timeout_seconds)
                if self._has_failed:
                    self._meetings[communicator].abort()
            return self._meetings[communicator]

    def queue(self, communicator: str, source: int, target: int) -> queue.Queue:
        with self._lock:
            return self.messages[communicator, source, target]

    @contextmanager
    def on_own_stream(self, streams: Streams) -> Iterator[None]:
        """Gives a rank's thread a stream. The context ends when the device is done."""
        # autograd has one thread for each device: there one rank's backward would wait for the other's
        with torch.autograd.set_multithreading_enabled(False), streams.behind(streams.new()):
            try:
                yield
            except BaseException:
                self.abort()
                raise
            finally:
                streams.synchronize()

    def abort(self) -> None:
        """Lets no rank wait for one that has failed."""
        with self._lock:
            self._has_failed = True
            for meeting in self._meetings.values():
                meeting.abort()


class LoopbackComm(NativeComm):
    """The collectives of a rank in a loop-back. They are those of `NativeComm`, with copies in place of the backend's.

    A collective begins on a stream of its own when the streams of all ranks have come to it. It ends when all ranks
    have read what they need. Nothing but events orders it with other work, so who forgets to wait finds old values.
    """

    def __init__(
        self,
        loop: _Loop,
        rank: int,
        num_ranks: int,
        device: torch.device,
        *,
        name: str = "",
        bucket_nbytes: int = ONE_HOST_NBYTES,
        delay: Callable[[], None] | None = None,
    ):
        Comm.__init__(self, device, loop.timeout_seconds)  # and not those that connect
        self.rank = rank
        self.num_ranks = num_ranks
        self._loop = loop
        self._name = name
        self._delay = delay
        self._side_groups: dict[str, Any] = {}
        self._streams = Streams(device)
        self._stream = self._streams.new()
        self._ways = {way: self._streams.new() for way in ("gather", "reduce", "small")}
        self._buckets = [Bucket(bucket_nbytes, device) for _ in range(2)]

    def part(self, purpose: str, members: Sequence[int]) -> Comm:
        """Returns some of the ranks, this one among them, over connections of their own. Those call it alike."""
        if len(members) == 1:
            return Comm(self.device, self.timeout_seconds)
        found = type(self)(
            self._loop,
            members.index(self.rank),
            len(members),
            self.device,
            name=f"{self._name}/{purpose} of {tuple(members)}",
            bucket_nbytes=self._buckets[0].nbytes,
            delay=self._delay,
        )
        found.counters.counted_by = self.counters
        return found

    def neighbours(self, size: int, purpose: str = "neighbours") -> Comm:
        """Returns this rank's group of neighbours, as the function of that name does for the ranks of a launcher."""
        first = self.rank // size * size
        return self if size == self.num_ranks else self.part(purpose, range(first, first + size))

    def connect_parts(self, *, shard_size: int | None = None) -> None:
        """Divides the ranks into shard groups of so many neighbours, as `connect` does for the ranks of a launcher."""
        if shard_size is not None and shard_size < self.num_ranks:
            shard_group = self.neighbours(shard_size, "shard")
            alike = range(self.rank % shard_size, self.num_ranks, shard_size)
            replicate_group = self.part("replicate", alike)
            self.divide(shard_group, replicate_group, Average(shard_group, replicate_group))

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        def act(everyones: list[Messages]) -> None:
            sent = {
                rank: iter([each for each, target in own if target == self.rank]) for rank, own in enumerate(everyones)
            }
            for tensor, rank in receives:
                tensor.copy_(next(sent[rank]))

        self.counters.add(verb, sum(tensor.nbytes for tensor, _ in sends), what)
        return self._copies("small", sends, act)

    all_to_all = Comm.all_to_all  # by `exchange`

    def broadcast_(self, tensor: Tensor) -> None:
        def act(tensors: list[Tensor]) -> None:
            if self.rank:
                tensor.copy_(tensors[0])

        self._copies("small", tensor, act).wait()
        self.counters.add("broadcast", tensor.nbytes if self.rank == 0 else 0)

    def barrier(self) -> None:
        self._swap("small", None, "a barrier")

    def side_group(self, purpose: str) -> Comm:
        if purpose not in self._side_groups:
            cpu, name = torch.device("cpu"), f"{self._name}/{purpose}"
            self._side_groups[purpose] = LoopbackComm(self._loop, self.rank, self.num_ranks, cpu, name=name)
        return self._side_groups[purpose]

    def send(self, tensor: Tensor, rank: int) -> None:
        values = tensor.detach().clone()
        self._streams.synchronize()
        self._loop.queue(self._name, self.rank, rank).put(values)
        self.counters.add("send", tensor.nbytes)

    def receive(self, tensor: Tensor, rank: int) -> None:
        try:
            tensor.copy_(self._loop.queue(self._name, rank, self.rank).get(timeout=self.timeout_seconds))
        except queue.Empty:
            raise CommError(f"receiving: rank {self.rank} waited for rank {rank}, which sent nothing") from None

    def broadcast_object(self, obj):
        return self.all_gather_object(obj if self.rank == 0 else None)[0]

    def all_gather_object(self, obj, *, what: str = "an exchange of objects") -> list:
        return [pickle.loads(each) for each in self._swap("small", pickle.dumps(obj), what)]

    def _gather_small(self, own: Tensor, what: str) -> Tensor:
        rows = own.new_empty(self.num_ranks, own.numel())

        def act(everyones: list[Tensor]) -> None:
            for target, row in zip(rows, everyones):
                target.copy_(row)

        self._copies("small", own, act).wait()
        return rows

    def _collect(self, full: Tensor, shard: Tensor):
        def act(shards: list[Tensor]) -> None:
            for place, values in zip(full.chunk(self.num_ranks), shards):
                if place.data_ptr() != values.data_ptr():
                    place.copy_(values)

        return self._copies("gather", shard, act)

    def _sum(self, full: Tensor, out: Tensor):
        def act(fulls: list[Tensor]) -> None:
            first, *others = (values.chunk(self.num_ranks)[self.rank] for values in fulls)
            total = first.clone()  # in rank order
            for summand in others:
                total.add_(summand)
            out.copy_(total)

        return self._copies("reduce", full, act)

    def _copies(self, way: str, own: Any, act: Callable[[list], None]) -> Pending:
        """Issues the copies of a collective, to which each rank brings `own`. Who waits for them lets the current
        stream wait, and not the host, as a collective of NCCL does."""
        stream, begun = self._ways[way], self._streams.record()
        posts = self._swap(way, (own, begun))
        with self._streams.on(stream), torch.no_grad():
            for _, event in posts:
                event.wait(stream)
            if self._delay is not None:
                self._delay()
            act([values for values, _ in posts])
            read = self._streams.record(stream)
            for event in self._swap(way, read):  # then what others have read here may be written again
                event.wait(stream)
            done = self._streams.record(stream)
        return Pending(partial(_wait, self._streams, done, posts))

    def _swap(self, way: str, value: Any, what: str = "a collective") -> list:
        return self._loop.meeting(f"{self._name}:{way}", self.num_ranks).swap(self.rank, value, what)

    @contextmanager
    def _reaching(self, what: str, peer: int | None = None) -> Iterator[None]:
        yield  # there is no backend that fails


def _wait(streams: Streams, done: Any, held: Any) -> None:
    """Waits for the event behind some copies. What they read is held until then."""
    streams.wait(done)


def shard_on_loopback(comm: LoopbackComm, model: nn.Module, config: ZeroConfig) -> ZeroEngine:
    """Shards a model over ranks of one process."""
    comm.connect_parts(shard_size=config.shard_size if isinstance(config.shard_size, int) else None)
    engine = build(model, config, comm)
    place_and_divide_activations(engine, comm.neighbours)
    return engine
