"""The interface of the collectives that the engine uses, and the counters of the bytes that they send."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor


if TYPE_CHECKING:
    from hf_zero.comm.groups import Average
    from hf_zero.comm.shared import SharedComm


# Default bucket sizes. Each piece costs one latency whatever its size; a larger bucket takes more memory.
MESSAGES_NBYTES = 4 * 2**20
ONE_HOST_NBYTES, SEVERAL_HOSTS_NBYTES = 32 * 2**20, 64 * 2**20  # the backend's own collectives
LARGE_DEVICE_NBYTES = 40 * 10**9  # devices with at least this much memory use pieces that saturate their links:
LARGE_PIECE_NBYTES = 128 * 2**20
RANK_NBYTES = 2**19  # minimum per rank; smaller messages are dominated by latency
# Ranks that read one another's memory only stage tensors that were not allocated by `Comm.empty`.
SHARED_NBYTES = 8 * 2**20

Messages = list[tuple[Tensor, int]]  # contiguous tensors, each with its destination or source rank

MAX_ITEMSIZE = 8
# Pieces start at multiples of this, like shards (see `hf_zero.sharding.layout`).
ALIGN_NUMEL = 16


@dataclass
class Counters:
    """Counts the bytes that this rank has sent since the start, by collective and by unit. Counts can be forwarded to
    a parent counter (`counted_by`), optionally under another verb."""

    sent_nbytes: dict[str, int] = field(default_factory=dict)
    unit_nbytes: dict[str, int] = field(default_factory=dict)
    counted_by: "Counters | None" = None
    counted_as: str | None = None  # None: under the same verb
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, verb: str, nbytes: int, what: str | None = None) -> None:
        """Adds bytes to the count of a verb and, if `what` is given, to the count of that unit."""
        with self._lock:  # the threads of a bus count as well
            self.sent_nbytes[verb] = self.sent_nbytes.get(verb, 0) + nbytes
            if what is not None:
                self.unit_nbytes[what] = self.unit_nbytes.get(what, 0) + nbytes
        if self.counted_by is not None:
            self.counted_by.add(self.counted_as or verb, nbytes, what)

    @property
    def total_sent_nbytes(self) -> int:
        return sum(self.sent_nbytes.values())


class Pending:
    """A collective in progress. `wait` returns when its result is in place; further calls return immediately.

    If an exception (for example Ctrl-C) interrupts a `wait`, the next `wait` waits again. With `once` it does not,
    because part of the result may already have been accumulated; the caller must then discard the result.
    """

    def __init__(self, finish: Callable[[], None] | None = None, *, once: bool = False):
        self._finish = finish
        self._once = once

    def wait(self) -> None:
        finish = self._finish
        if self._once:
            self._finish = None
        if finish is not None:
            finish()
            self._finish = None


DONE = Pending()


class Waits(Protocol):
    """An object with work in progress that can be waited for."""

    def wait(self) -> object: ...


def native_bucket_nbytes(num_ranks: int, num_hosts: int, device_nbytes: int) -> int:
    """Returns the bucket size for the backend's own collectives. `device_nbytes` is the memory of the smallest
    device, or 0 if unknown."""
    least = ONE_HOST_NBYTES if num_hosts == 1 else SEVERAL_HOSTS_NBYTES
    return max(LARGE_PIECE_NBYTES if device_nbytes >= LARGE_DEVICE_NBYTES else least, num_ranks * RANK_NBYTES)


class Bucket:
    """A constant-size buffer through which larger tensors are moved in pieces (ZeRO-R C_B, arXiv 1910.02054 section
    6.2). It is allocated by `make` (such as `Comm.empty`) on first use and then kept."""

    memory: Tensor | None = None  # None until the first use

    def __init__(self, nbytes: int, device: torch.device, make: Callable[[int, torch.dtype], Tensor] | None = None):
        self.nbytes = nbytes
        self._make = make or partial(_empty, device)

    def pieces(
        self, numel: int, num_rows: int, dtype: torch.dtype, *, align_to: int = ALIGN_NUMEL
    ) -> list[tuple[int, int]]:
        """Splits `num_rows` ranges of `numel` elements each into (start, stop) pieces such that one piece of every
        range fits in the buffer. Pieces start at multiples of `align_to` if the buffer has room for that many
        elements."""
        step = self.nbytes // dtype.itemsize // num_rows
        step = step // align_to * align_to or max(1, step)
        return [(start, min(start + step, numel)) for start in range(0, numel, step)]

    def rows(self, num_rows: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the start of the buffer as a contiguous matrix of shape `(num_rows, numel)`."""
        needed = num_rows * numel * dtype.itemsize
        if self.memory is None or self.memory.numel() < needed:
            # with very many ranks, one element of each row (or one quantized block) must still fit
            nbytes = max(self.nbytes, num_rows * MAX_ITEMSIZE, needed)
            self.memory = self._make(nbytes, torch.uint8)
        return self.memory[:needed].view(dtype).view(num_rows, numel)


class Comm:
    """The collectives among the data-parallel ranks. This base class implements them for a single rank.

    All ranks call the same methods in the same order. Sums are computed in a fixed order, so runs are reproducible bit
    for bit.

    [Note: shard groups] Decisions that involve all data-parallel ranks, and data that exists once (votes, norms,
    broadcasts, checkpoints), use the collectives of this object. Flat buffers are sharded over the ranks of
    `shard_group`, which also gathers them. The two are identical unless the model is replicated over several shard
    groups (MiCS, arXiv 2205.00119; FSDP's hybrid sharding, arXiv 2304.11277, section 3.2.2).

    `timeout_seconds` is the time limit of one exchange."""

    rank: int = 0
    num_ranks: int = 1
    user: Waits | None = None  # work on another thread that uses these connections, until it has been waited for
    replicate_group: "Comm | None" = None  # the ranks that hold the same shard; None if each shard exists once
    _shard_group: "Comm | None" = None  # None if it is all ranks
    average_of_groups: "Average | None" = None  # averages over all shard groups; None if the shard group is all ranks

    def __init__(self, device: torch.device, timeout_seconds: float):
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.counters = Counters()
        self.packing: list[Bucket] = []  # buckets for quantized values, see `hf_zero.comm.blockwise`

    def divide(self, shard_group: "Comm", replicate_group: "Comm", average: "Average") -> None:
        """Divides the ranks into shard groups. `shard_group` and `replicate_group` are those of this rank; `average`
        averages over all ranks."""
        self._shard_group, self.replicate_group, self.average_of_groups = shard_group, replicate_group, average
        shard_group.counters.counted_by = replicate_group.counters.counted_by = self.counters
        replicate_group.counters.counted_as = "all_reduce"

    @property
    def shared_memory(self) -> "SharedComm | None":
        """These ranks if they share memory, `None` if they send messages."""
        return None

    @property
    def shard_group(self) -> "Comm":
        """The ranks over which this rank's flat buffers are sharded."""
        return self if self._shard_group is None else self._shard_group

    @property
    def num_replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return 1 if self.replicate_group is None else self.replicate_group.num_ranks

    @property
    def replica(self) -> int:
        """The index of this rank among the ranks that hold the same shard."""
        return 0 if self.replicate_group is None else self.replicate_group.rank

    @property
    def is_on_cpu(self) -> bool:
        """Whether the tensors are in host memory."""
        return self.device.type == "cpu"

    @property
    def runs_ahead(self) -> bool:
        """Whether the device executes work asynchronously to the host."""
        return not self.is_on_cpu and self.device.type != "meta"  # the meta device computes nothing

    @property
    def on_host(self) -> "Comm":
        """The same ranks, for values that are known on the host: exchanging them does not wait for a device. The first
        access is collective."""
        return self if self.is_on_cpu else self.side_group("hosts")

    @property
    def bucket_nbytes(self) -> int:
        """The size of each constant-size buffer, in bytes."""
        return 0

    @property
    def buckets(self) -> list[Bucket]:
        """The constant-size buffers of these collectives. They are allocated on first use."""
        return []

    @property
    def sum_buckets(self) -> list[Bucket]:
        """The buckets used by reductions whose summands are already in the dtype of the sum."""
        return self.buckets

    @property
    def buffer_nbytes(self) -> int:
        """The size of all communication buffers once they are allocated, including those of the groups."""
        average = self.average_of_groups
        own = 0 if average is None or average.memory is None else average.memory.nbytes
        return own + sum(bucket.nbytes for bucket in self._all_buckets())

    @property
    def exchanging(self) -> list[Tensor]:
        """The communication buffers that are allocated now, including those of the groups."""
        found = [bucket.memory for bucket in self._all_buckets()]
        found.append(None if self.average_of_groups is None else self.average_of_groups.memory)
        return [memory for memory in found if memory is not None]

    def _all_buckets(self) -> list[Bucket]:
        own = [*self.shard_group.buckets, *self.shard_group.packing]
        if self.replicate_group is None:
            return own
        # with several groups, nothing is averaged over all ranks at once
        return [*own, *self.replicate_group.sum_buckets, *self.replicate_group.packing]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates a 1-D tensor that other ranks can read directly, for tensors that are gathered or reduced. The
        memory lives as long as the ranks are connected."""
        return _empty(self.device, numel, dtype)

    def progress(self) -> None:
        """Advances the collectives in progress as far as possible without waiting. Called periodically."""

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        """Fills `full` with the shards of all ranks.

        Args:
            full (`Tensor`): 1-D, `num_ranks * shard.numel()` elements. Range `rank` may already be `shard` itself.
            shard (`Tensor`): 1-D, this rank's range, with the same dtype.
            what (`str`): the name of the unit, for messages.
        """
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return DONE

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        """Averages `full` over the ranks and leaves each rank its own range of the result.

        The sum is computed in `dtype` in a fixed order, then divided by the number of ranks.

        Args:
            full (`Tensor`): 1-D, `num_ranks * out.numel()` elements, this rank's summand. Its contents are unspecified
                afterwards.
            out (`Tensor`): 1-D, receives the average of range `rank`. It may be that range of `full`.
            dtype (`torch.dtype`): dtype of the sum, independent of the dtypes of the tensors.
            accumulate (`bool`): add to `out` instead of overwriting it. `out` must then not be part of `full`.
            what (`str`): the name of the unit, for messages.
        """
        if full.data_ptr() != out.data_ptr():
            if accumulate:
                out.add_(full)
            else:
                out.copy_(full)
        return DONE

    def in_turn(self, begin: Callable[[], Callable[[], None]], *held: Tensor, what: str) -> Pending:
        """Runs a reduction after the previous one, with which it may share memory and names of messages.

        Args:
            begin (`Callable`): starts the reduction, and returns the function that finishes it.
            held (`Tensor`): tensors whose memory is kept until the reduction is waited for.
            what (`str`): the name of the unit, for messages.
        """
        begin()()
        return DONE

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        """Sends tensors to other ranks and receives tensors from them. Messages between two ranks are received in the
        order in which they are sent. All ranks call it, including ranks that send and receive nothing. `what` is the
        name of the unit, for messages; the bytes are counted under `verb`."""
        return DONE

    def all_to_all(self, out: Tensor, given: Tensor, *, what: str) -> Pending:
        """Sends each rank its row of `given`, and receives the rows of all ranks for this one into `out`. Both are
        contiguous, `(num_ranks, ...)`, of equal shape and dtype. `what` is for messages."""
        others = [(self.rank + distance) % self.num_ranks for distance in range(1, self.num_ranks)]
        pending = self.exchange(
            [(given[each], each) for each in others], [(out[each], each) for each in reversed(others)], what=what
        )
        out[self.rank].copy_(given[self.rank])
        return pending

    def all_gather_vector(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        """Returns the vectors of all ranks in rank order, as a CPU tensor of shape `(num_ranks, vector.numel())`.
        `what` describes the exchange in error messages. The host waits for the device; if it knows the values, use
        `on_host.all_gather_vector`."""
        return self.all_gather_rows(vector, what=what).cpu()

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        """Like `all_gather_vector`, but returns a tensor on the device, without waiting for it."""
        return vector.detach().reshape(1, -1)

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrites a contiguous `tensor`, of any dtype, with rank 0's values."""

    def barrier(self) -> None:
        """Waits until every rank has called it."""

    def side_group(self, purpose: str) -> "Comm":
        """Returns the same ranks on separate connections, for objects and CPU tensors, so that another thread can use
        them. The first call for each purpose is collective."""
        return self

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends a contiguous tensor to a rank, which calls `receive` for it. Messages between two ranks keep their
        order."""
        raise NotImplementedError("there is no other rank")

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Overwrites a contiguous tensor with the one that `rank` sends."""
        raise NotImplementedError("there is no other rank")

    def broadcast_object(self, obj):
        """Returns rank 0's `obj` on every rank. Objects are pickled, so they must be small and trusted."""
        return obj

    def all_gather_object(self, obj, *, what: str = "an exchange of objects") -> list:
        """Returns the objects of all ranks in rank order. Objects are pickled, so they must be small and trusted."""
        return [obj]


def _empty(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)
