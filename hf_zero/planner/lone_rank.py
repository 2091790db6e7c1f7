"""One rank of any number of ranks, alone in its process. It uses the package's own collectives and copies, which take
memory and count bytes like real ones but send nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.comm.base import DONE, MESSAGES_NBYTES, SHARED_NBYTES, Bucket, Counters, Messages, native_bucket_nbytes
from hf_zero.comm.bus import Transfer
from hf_zero.comm.distributed import NativeComm
from hf_zero.comm.groups import Average, refuse_uneven
from hf_zero.comm.pairwise import SUM_NBYTES, PairwiseComm
from hf_zero.comm.shared import SharedComm
from hf_zero.comm.streams import Streams
from hf_zero.config import MemoryTier, ZeroConfig
from hf_zero.planner.meter import Meter
from hf_zero.planner.timeline import ALL_REDUCE, AVERAGE, HEADS, HOST, Timeline


META = torch.device("meta")


class _Alone(Comm):
    """The collectives of a lone rank. All ranks are assumed to be in the same state as this one."""

    is_on_cpu = False  # independent of the meta device
    stride: int | None = None  # distance between ranks that hold the same shard; None for other groups

    def __init__(self, num_ranks: int, timeline: Timeline, *, on_cpu: bool = False):
        Comm.__init__(self, META, timeout_seconds=1.0)  # not those of the subclasses, which connect
        self.num_ranks = num_ranks
        self.is_on_cpu = on_cpu
        self.timeline = timeline

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for bucket in super().buckets if bucket.memory is not None]  # only those in use

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        with self.timeline.inside(None):
            done = super().all_gather(full, shard, what=what)
        return self._begin_exchange("gather", full.nbytes, done)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        with self.timeline.inside(None):
            done = super().reduce_scatter(full, out, dtype=dtype, accumulate=accumulate, what=what)
        # CPUs send summands in their own dtype, backends in the dtype of the sum
        nbytes = full.numel() * (full.dtype if self.is_on_cpu else dtype).itemsize
        return self._begin_exchange("reduce", nbytes, done)

    def _begin_exchange(self, kind: str, nbytes: int, done: Pending) -> Pending:
        return self.timeline.begin(self.across(kind), nbytes, self.num_ranks, done, self.stride or 1)

    def across(self, kind: str) -> str:
        """Returns the kind of a collective. Among ranks that hold the same shard it is one half of an all-reduce."""
        return kind if self.stride is None else ALL_REDUCE

    def all_gather_rows(self, vector: Tensor, *, what: str = "") -> Tensor:
        self.counters.add("scalar", vector.nbytes * (self.num_ranks - 1))
        # flags may be set on another rank, for example for blocks that did not run here; numbers are equal on all
        # ranks
        is_unknown = vector.is_meta or vector.dtype is torch.uint8
        row = torch.ones(vector.numel(), dtype=vector.dtype) if is_unknown else vector.detach().reshape(-1)
        return row.expand(self.num_ranks, -1)

    def all_gather_object(self, obj, *, what: str = "") -> list:
        return [obj] * self.num_ranks

    def broadcast_(self, tensor: Tensor) -> None:
        pass

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        nbytes = sum(tensor.nbytes for tensor, _ in sends)
        self.counters.add(verb, nbytes, what)
        kind = self._kind_of_messages(verb)
        if kind is None:
            return DONE
        whole = nbytes * self.num_ranks // (self.num_ranks - 1)
        return self.timeline.begin(kind, whole, self.num_ranks, DONE, self.stride or 1, by_messages=True)

    def _kind_of_messages(self, verb: str) -> str | None:
        """Returns the kind of exchange of messages to all ranks, by the verb that counts them; `None` if they take no
        time of their own."""
        return self.across(verb) if verb == "reduce" else None

    def side_group(self, purpose: str) -> Comm:
        return self


class _SideStreams(Streams):
    """The streams on which an accelerator quantizes the values to send, and adds up the received ones: one lane."""

    def __init__(self, comm: _Alone):
        super().__init__(torch.device("cpu"))  # with no-op streams
        self._comm = comm

    @contextmanager
    def behind(self, stream: object) -> Iterator[None]:
        with self._comm.timeline.behind(AVERAGE):
            yield

    def record(self, stream: object = None, *, is_timed: bool = False) -> Pending:
        return self._comm.timeline.mark(self._comm.across("reduce"))

    def wait(self, event: Pending, *_held: Tensor) -> None:
        event.wait()


class _Native(_Alone, NativeComm):
    """Ranks with one accelerator each."""

    def __init__(self, num_ranks: int, timeline: Timeline, bucket_nbytes: int):
        super().__init__(num_ranks, timeline)
        self._streams = _SideStreams(self)
        self._stream = self._streams.new()
        self._buckets = [Bucket(bucket_nbytes, META) for _ in range(2)]

    def _collect(self, full: Tensor, shard: Tensor) -> Pending:
        return DONE

    def _sum(self, full: Tensor, out: Tensor) -> Pending:
        return DONE


class _Pairwise(_Alone, PairwiseComm):
    """Ranks on CPUs that send messages."""

    def __init__(self, num_ranks: int, timeline: Timeline, bucket_nbytes: int):
        super().__init__(num_ranks, timeline, on_cpu=True)
        self._staging = Bucket(bucket_nbytes, META)
        self._scratch = Bucket(SUM_NBYTES, META)
        self._reducing = Pending()
        self._number = 0  # for tags of messages, which are not sent

    def _post(self, receives: list, sends: list, tag: int, what: str) -> list:
        return []

    def _wait(self, works: list, what: str) -> None:
        pass


class _Shared(_Pairwise, SharedComm):
    """Ranks on the CPUs of one host."""

    def __init__(self, num_ranks: int, bucket_nbytes: int, meter: Meter):
        super().__init__(num_ranks, meter.timeline, bucket_nbytes)
        self._meter = meter

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=META)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._meter.at(MemoryTier.DEVICE, share=self.num_ranks):
            return self.empty(numel, dtype)

    def barrier(self, what: str = "") -> None:
        pass

    def progress(self) -> None:
        pass

    def _maps(self, tensor: Tensor) -> bool:
        return True

    def _begin(self, verb: str, what: str, own: Tensor, numel: int, take: Callable) -> Pending:
        self.counters.add(verb, numel * own.element_size() * (self.num_ranks - 1), what)
        take([own] * self.num_ranks)
        return DONE


class LoneNeighbours(_Alone):
    """The ranks that share each sequence, with separate connections."""

    def __init__(self, comm: Comm, timeline: Timeline, num_ranks: int):
        super().__init__(num_ranks, timeline, on_cpu=comm.is_on_cpu)
        self.counters.counted_by = comm.counters

    def all_gather_rows(self, vector: Tensor, *, what: str = "") -> Tensor:
        return super().all_gather_rows(vector, what=what).to(vector.device)  # a loss stays on its device

    def _kind_of_messages(self, verb: str) -> str | None:
        return HEADS


def lone_rank(
    meter: Meter, num_ranks: int, per_host: int, config: ZeroConfig, *, on_cpu: bool, device_nbytes: int = 0
) -> Comm:
    """Creates the collectives of one of several ranks, without the others.

    Args:
        config (`ZeroConfig`): how the ranks are connected. `shard_size` must not be "auto".
        device_nbytes (`int`): memory of each device, or 0 if unknown.

    Raises:
        `ConfigError`: if the ranks do not form equal shard groups.
    """
    refuse_uneven(config.shard_size, num_ranks)
    make = partial(_lone_rank, meter, config=config, on_cpu=on_cpu, device_nbytes=device_nbytes)
    comm, size = make(num_ranks, per_host), num_ranks if config.shard_size is None else int(config.shard_size)
    if size < num_ranks:
        # each host has one or several ranks of a replicate group
        across = max(1, per_host // size) if per_host % size == 0 or size % per_host == 0 else 1
        shard_group, replicate_group = make(size, min(per_host, size)), make(num_ranks // size, across)
        replicate_group.stride, average = size, Average(shard_group, replicate_group)
        if not on_cpu:
            average._streams = _SideStreams(replicate_group)
            average._stream = average._streams.new()
        comm.divide(shard_group, replicate_group, average)
    return comm


def _lone_rank(
    meter: Meter, num_ranks: int, per_host: int, *, config: ZeroConfig, on_cpu: bool, device_nbytes: int
) -> _Alone:
    if num_ranks == 1:
        return _Alone(1, meter.timeline, on_cpu=on_cpu)
    num_hosts, timeline = -(-num_ranks // per_host), meter.timeline

    def chosen(nbytes: int) -> int:
        return nbytes if config.bucket_nbytes == "auto" else int(config.bucket_nbytes)

    if not on_cpu:
        return _Native(num_ranks, timeline, chosen(native_bucket_nbytes(num_ranks, num_hosts, device_nbytes)))
    if config.shared_memory and num_hosts == 1:
        return _Shared(num_ranks, chosen(SHARED_NBYTES), meter)
    return _Pairwise(num_ranks, timeline, chosen(MESSAGES_NBYTES))


class LoneBus(Bus):
    """The bus to a host whose memory has no data. Jobs run immediately."""

    def __init__(self, counters: Counters, meter: Meter):
        super().__init__(torch.device("cpu"), counters)  # with no-op streams
        self.device = self.host = META
        self._meter = meter

    def empty(self, numel: int, dtype: torch.dtype, *, locked: bool = True) -> Tensor:
        # allocated once, so not part of a steady-state step
        with self._meter.at(MemoryTier.HOST), self._meter.timeline.inside(None):
            return torch.zeros(numel, dtype=dtype, device=META)

    @contextmanager
    def on_side_stream(self, way: str) -> Iterator[None]:
        with super().on_side_stream(way), self._meter.timeline.behind(way):
            yield

    def _copy(self, way: str, target: Tensor, source: Tensor) -> Transfer:
        timeline = self._meter.timeline
        with timeline.inside(None):
            done = super()._copy(way, target, source)
        return _Copy(timeline.begin(way, source.nbytes, 2, done), source)

    def later(self, work: Callable[[], object], lane: str = "arrivals", *, always: bool = False) -> Pending:
        with self._meter.at(MemoryTier.HOST), self._meter.timeline.inside(HOST), torch.no_grad():
            work()
        return DONE


class _Copy(Transfer):
    """A copy that completes when it is waited for. `copied` is its handle in the timeline."""

    def __init__(self, copied: Pending, source: Tensor):
        Pending.__init__(self, copied.wait)
        self.source = source

    def synchronize(self) -> None:
        self.wait()

    def is_done(self) -> bool:
        return True
