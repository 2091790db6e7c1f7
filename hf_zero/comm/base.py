"""The collectives that the engine needs, and what they count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor


if TYPE_CHECKING:
    from hf_zero.comm.groups import Average
    from hf_zero.comm.shared import HostMemory


# Of a bucket whose size nobody has chosen. A piece costs a latency whatever its size, and what is staged takes memory.
MESSAGES_NBYTES = 4 * 2**20
ONE_HOST_NBYTES, SEVERAL_HOSTS_NBYTES = 32 * 2**20, 64 * 2**20  # the backend's own collectives
LARGE_DEVICE_NBYTES = 40 * 10**9  # with that much memory, pieces are so large that links run at full speed:
LARGE_PIECE_NBYTES = 128 * 2**20
RANK_NBYTES = 2**19  # of those at least so many for each rank: what goes to one of many would be all latency
# Where ranks read one another's memory nothing is staged, but for tensors that a caller made elsewhere.
SHARED_NBYTES = 8 * 2**20

Messages = list[tuple[Tensor, int]]  # contiguous tensors, each with the rank that it goes to or comes from

MAX_ITEMSIZE = 8
# Pieces begin at multiples of so many elements, as shards do, see `hf_zero.sharding.layout`.
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
        """Adds bytes to the counts: under the verb for what was done with them, and for the unit to which they
        belong."""
        with self._lock:  # the threads of a bus count too
            self.sent_nbytes[verb] = self.sent_nbytes.get(verb, 0) + nbytes
            if what is not None:
                self.unit_nbytes[what] = self.unit_nbytes.get(what, 0) + nbytes
        if self.counted_by is not None:
            self.counted_by.add(self.counted_as or verb, nbytes, what)

    @property
    def total_sent_nbytes(self) -> int:
        return sum(self.sent_nbytes.values())


class Pending:
    """A collective under way. `wait` returns when its result is in place; a second `wait` costs nothing.

    An exception may break a `wait` off, Ctrl-C among others. The next `wait` then waits again; with `once` it does
    not, as a part of the result may have been added already, and who waits must drop that.
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
    """An object whose work is under way and can be waited for."""

    def wait(self) -> object: ...


def native_bucket_nbytes(num_ranks: int, num_hosts: int, device_nbytes: int) -> int:
    """Returns the size of a bucket for the backend's own collectives. `device_nbytes`: the memory of the smallest of
    their devices; 0 if it is not known."""
    least = ONE_HOST_NBYTES if num_hosts == 1 else SEVERAL_HOSTS_NBYTES
    return max(LARGE_PIECE_NBYTES if device_nbytes >= LARGE_DEVICE_NBYTES else least, num_ranks * RANK_NBYTES)


class Bucket:
    """Memory of a constant size through which larger tensors go in pieces (ZeRO-R C_B, arXiv 1910.02054 section 6.2),
    made when it is first used and kept from then on. `make`: allocates it, as `Comm.empty` does."""

    memory: Tensor | None = None  # None until the first use

    def __init__(self, nbytes: int, device: torch.device, make: Callable[[int, torch.dtype], Tensor] | None = None):
        self.nbytes = nbytes
        self._make = make or partial(_empty, device)

    def pieces(
        self, numel: int, num_rows: int, dtype: torch.dtype, *, align_to: int = ALIGN_NUMEL
    ) -> list[tuple[int, int]]:
        """Cuts `num_rows` equal ranges of `numel` elements into the pieces (start, stop) that fit together. They begin
        at multiples of `align_to`, where so many elements fit."""
        step = self.nbytes // dtype.itemsize // num_rows
        step = step // align_to * align_to or max(1, step)
        return [(start, min(start + step, numel)) for start in range(0, numel, step)]

    def rows(self, num_rows: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the first bytes of the buffer as a contiguous matrix, `(num_rows, numel)`."""
        needed = num_rows * numel * dtype.itemsize
        if self.memory is None or self.memory.numel() < needed:
            # one element of each row must fit, or one block in few bits, be the ranks ever so many
            nbytes = max(self.nbytes, num_rows * MAX_ITEMSIZE, needed)
            self.memory = self._make(nbytes, torch.uint8)
        return self.memory[:needed].view(dtype).view(num_rows, numel)


class Comm:
    """The collectives among the data-parallel ranks. This base class is for one rank, which exchanges nothing.

    All ranks call the same methods in the same order. Sums are taken in one order, so that a run repeats bit for bit.

    [Note: who shards, and who decides] What all data-parallel ranks decide, or see once, goes through their own
    collectives: votes, norms, broadcasts, checkpoints. Flat buffers are divided over the ranks of the `shard_group`:
    its ranks say who owns what, and it gathers. The two are the same ranks unless several shard groups hold the model
    (MiCS, arXiv 2205.00119; FSDP's hybrid sharding, arXiv 2304.11277, section 3.2.2). `timeout_seconds`: how long one
    exchange may take."""

    rank: int = 0
    num_ranks: int = 1
    shared_memory: "HostMemory | None" = None  # None where ranks send messages
    user: Waits | None = None  # who uses these connections from another thread, until that is waited for
    replicate_group: "Comm | None" = None  # the ranks that hold the same shard; None where no two do
    _shard_group: "Comm | None" = None  # None where it is all ranks
    _average: "Average | None" = None  # likewise

    def __init__(self, device: torch.device, timeout_seconds: float):
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.counters = Counters()
        self.packing: list[Bucket] = []  # buckets of those who send values in few bits, see `hf_zero.comm.blockwise`

    def divide(self, shard_group: "Comm", replicate_group: "Comm", average: "Average") -> None:
        """Divides the ranks into several shard groups, of which two are this rank's; `average` is over all ranks."""
        self._shard_group, self.replicate_group, self._average = shard_group, replicate_group, average
        shard_group.counters.counted_by = replicate_group.counters.counted_by = self.counters
        replicate_group.counters.counted_as = "all_reduce"

    @property
    def shard_group(self) -> "Comm":
        """The ranks over which this rank's flat buffers are divided."""
        return self if self._shard_group is None else self._shard_group

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same shard."""
        return 1 if self.replicate_group is None else self.replicate_group.num_ranks

    @property
    def replica(self) -> int:
        """Which of the ranks that hold the same shard this one is."""
        return 0 if self.replicate_group is None else self.replicate_group.rank

    @property
    def is_on_cpu(self) -> bool:
        """Whether the tensors live in the host's memory."""
        return self.device.type == "cpu"

    @property
    def runs_ahead(self) -> bool:
        """Whether the host issues work to a device that does it later."""
        return not self.is_on_cpu and self.device.type != "meta"  # which computes nothing

    @property
    def on_host(self) -> "Comm":
        """The same ranks, for what their hosts know: to exchange it, nobody waits for a device. The first use is
        collective."""
        return self if self.is_on_cpu else self.side_group("hosts")

    @property
    def buckets(self) -> list[Bucket]:
        """The buffers of constant size through which collectives go. Their memory is allocated when it is first
        needed."""
        return []

    @property
    def sum_buckets(self) -> list[Bucket]:
        """Those of the buckets through which values go that are in the dtype of their sum."""
        return self.buckets

    @property
    def buffer_nbytes(self) -> int:
        """The bytes of all memory through which values go once it is allocated, that of the groups included."""
        own = 0 if self._average is None or self._average.memory is None else self._average.memory.nbytes
        return own + sum(bucket.nbytes for bucket in self._all_buckets())

    @property
    def exchanging(self) -> list[Tensor]:
        """The memory through which values go now, that of the groups included."""
        found = [bucket.memory for bucket in self._all_buckets()]
        found.append(None if self._average is None else self._average.memory)
        return [memory for memory in found if memory is not None]

    def _all_buckets(self) -> list[Bucket]:
        own = [*self.shard_group.buckets, *self.shard_group.packing]
        if self.replicate_group is None:
            return own
        # over all ranks nothing is averaged
        return [*own, *self.replicate_group.sum_buckets, *self.replicate_group.packing]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates memory, 1-D, that other ranks can read directly, for tensors that are gathered or reduced. It
        lives as long as the ranks are connected."""
        return _empty(self.device, numel, dtype)

    def progress(self) -> None:
        """Advances the collectives under way as far as that needs no waiting. It is called now and then."""

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        """Fills `full` from the shards of all ranks.

        Args:
            full (`Tensor`): 1-D, `num_ranks * shard.numel()` elements; range `rank` may already be `shard` itself.
            shard (`Tensor`): 1-D, this rank's range, same dtype.
            what (`str`): the unit's name, for messages.
        """
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return DONE

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, packs: bool = False
    ) -> Pending:
        """Averages `full` over the ranks, and gives every rank its own range of the result.

        The sum is taken in `dtype` and in one order, then divided by the number of ranks.

        Args:
            full (`Tensor`): 1-D, `num_ranks * out.numel()` elements, this rank's summand; unspecified afterwards.
            out (`Tensor`): 1-D, receives the average of range `rank`; it may be that range of `full`.
            dtype (`torch.dtype`): of the sum, whatever the dtypes of the tensors.
            accumulate (`bool`): adds to `out` instead of overwriting it; `out` is then not a part of `full`.
            what (`str`): the unit's name, for messages.
            packs (`bool`): what is sent is rounded to 8 bits, block by block, see `hf_zero.comm.blockwise`; what is
                read in the memory of another rank is not. `dtype` is then fp32.
        """
        if full.data_ptr() != out.data_ptr():
            if accumulate:
                out.add_(full)
            else:
                out.copy_(full)
        return DONE

    def average(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, packs: bool = False
    ) -> Pending:
        """Averages `full` over all data-parallel ranks, and gives every rank its range of the shard group. The
        arguments are those of `reduce_scatter` over the shard group."""
        average = self.reduce_scatter if self._average is None else self._average
        return average(full, out, dtype=dtype, accumulate=accumulate, what=what, packs=packs)

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        """Sends tensors to some ranks and overwrites tensors with what some send, between two ranks in the order in
        which that one sends them. All ranks call it, also a rank that moves nothing. `what` is the unit's name, for
        messages; the bytes are counted under the verb."""
        return DONE

    def all_gather_vector(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        """Returns the vectors of all ranks in rank order, as a CPU tensor of shape `(num_ranks, vector.numel())`.
        `what` names them in an error. The host waits for the device; what it knows itself goes `on_host`."""
        return self.all_gather_rows(vector, what=what).cpu()

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        """Returns what `all_gather_vector` does on the device, for which the host does not wait."""
        return vector.detach().reshape(1, -1)

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrites a contiguous `tensor`, of any dtype, with rank 0's values."""

    def barrier(self) -> None:
        """Waits until every rank has called it."""

    def side_group(self, purpose: str) -> "Comm":
        """Returns the same ranks over separate connections, for objects and CPU tensors, so that another thread can
        use them. The first call for a purpose is collective."""
        return self

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends a contiguous tensor to one rank, which calls `receive` for it; messages between two ranks keep their
        order."""
        raise NotImplementedError("there is no other rank")

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Overwrites a contiguous tensor with what `rank` sends."""
        raise NotImplementedError("there is no other rank")

    def broadcast_object(self, obj):
        """Returns rank 0's `obj` on every rank (pickled: small, trusted objects only)."""
        return obj

    def all_gather_object(self, obj, *, what: str = "an exchange of objects") -> list:
        """Returns the objects of all ranks, in rank order (pickled: small, trusted objects only)."""
        return [obj]


def _empty(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)
