"""Several shard groups: flat buffers are divided within each group and replicated across the groups (MiCS, arXiv
2205.00119; FSDP's hybrid sharding, arXiv 2304.11277, section 3.2.2). With four ranks and groups of two, (0, 1) and
(2, 3) are the shard groups, (0, 2) and (1, 3) the replicate groups."""

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import ranks
from hf_zero.comm.base import Bucket, Comm, Pending
from hf_zero.comm.blockwise import PackedGather
from hf_zero.comm.streams import Streams
from hf_zero.errors import ConfigError


logger = logging.getLogger(__name__)


def shard_size_of(
    comm: Comm, group: dist.ProcessGroup, shard_size: int | str | None, fits: Callable[[int], bool]
) -> int:
    """Returns how many of the data-parallel ranks each shard group has: all, where no size is given. With "auto", see
    `fitting_size`, all of them call it; where they find different sizes, the largest is taken by all."""
    if shard_size != "auto":
        return comm.num_ranks if shard_size is None else int(shard_size)
    per_host = ranks_of_a_host(ranks.hosts(group))
    if per_host == comm.num_ranks:
        return per_host
    size = fitting_size(per_host, comm.num_ranks, fits)
    sizes = comm.all_gather_object((size, size < comm.num_ranks or fits(size)), what="choosing shard groups")
    found = max(size for size, _ in sizes)
    if comm.rank == 0 and found != per_host:
        do = all(does for size, does in sizes if size == found)
        logger.warning(
            "hf_zero: shard_size auto: the model's states do not fit devices when the %s ranks of one host divide "
            "them; %s of %s ranks do%s",
            *(per_host, found, comm.num_ranks, "" if do else " not, either: see hf-zero plan for what makes them fit"),
        )
    return found


def fitting_size(per_host: int, num_ranks: int, fits: Callable[[int], bool]) -> int:
    """Returns of how few ranks a shard group may be: those of one host, or of as many hosts as can form equal groups;
    all ranks, where fewer do not fit. `per_host`: how many ranks each host has; `fits`: whether a device can hold its
    part, where so many ranks divide the model."""
    sizes = (size for size in range(per_host, num_ranks, per_host) if num_ranks % size == 0)
    return next(filter(fits, sizes), num_ranks)


def ranks_of_a_host(hosts: list) -> int:
    """Returns how many ranks each host has; all ranks, where a host has one alone, or the hosts have not equally many,
    one behind the other. `hosts` has the host of each rank."""
    size = hosts.count(hosts[0])
    parts = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    is_even = all(len(part) == size and len(set(part)) == 1 for part in parts) and len(parts) == len(set(hosts))
    return size if is_even and size > 1 else len(hosts)


def refuse_uneven(shard_size: int | str | None, num_ranks: int, name: str = "shard_size") -> None:
    """Refuses a number of data-parallel ranks that form no equal shard groups. Raises [`ConfigError`] with the sizes
    that fit. A size that is `None` or "auto" always does."""
    if shard_size not in (None, "auto"):
        refuse_no_divisor(
            int(shard_size), num_ranks, name, "auto for the ranks of one host, or leave it out to shard over all"
        )


def refuse_no_divisor(size: int, num_ranks: int, name: str, otherwise: str) -> None:
    """Refuses a size of groups that does not divide the data-parallel ranks. Raises [`ConfigError`] with the name of
    the setting, the sizes that fit, and what to do `otherwise`."""
    if num_ranks % size:
        fitting = ", ".join(str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0)
        raise ConfigError(
            f"{name}: {num_ranks} rank{'s' if num_ranks > 1 else ''} cannot form groups of {size}; give a divisor of "
            f"{num_ranks} ({fitting}), {otherwise}"
        )


def groups_of(group: dist.ProcessGroup, shard_size: int, timeout_seconds: float) -> dict[str, dist.ProcessGroup]:
    """Returns this rank's shard group and replicate group, as "shard" and "replicate". The first call for a size is
    collective."""
    every, rank = range(dist.get_world_size(group)), dist.get_rank(group)
    first = rank // shard_size * shard_size
    parts = {"shard": every[first : first + shard_size], "replicate": every[rank % shard_size :: shard_size]}
    return {name: ranks.part_of(group, part, timeout_seconds, name) for name, part in parts.items()}


class Average:
    """Averages over the ranks of several shard groups: a reduce-scatter within each, then an all-reduce of every shard
    among the ranks that hold it.

    Each group sums in one order, then the sums of the groups are added in the order of the groups: a run repeats bit
    for bit. With groups of one rank, or one group of all, the order is that of one reduce-scatter over all ranks.
    """

    def __init__(self, shard_group: Comm, replicate_group: Comm):
        self._shard_group = shard_group
        self._replicate_group = replicate_group
        self._packed = PackedGather(replicate_group)
        self._last = Pending()
        self._streams = Streams(shard_group.device)
        self._stream = self._streams.new() if shard_group.runs_ahead else None
        self._shard = Bucket(0, shard_group.device, replicate_group.empty)  # as large as what goes through it

    @property
    def memory(self) -> Tensor | None:
        """The memory for shards that cannot be summed where they rest; `None` while there is none."""
        return self._shard.memory

    def __call__(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, packs: bool = False
    ) -> Pending:
        if self._stream is None:
            self._last.wait()  # one at a time: they share memory
            self._last = self._begin(full, out, dtype, accumulate, what, packs)
            return self._last
        # queued at once, on a stream of its own: neither the host nor what computes meanwhile waits for it
        with self._streams.behind(self._stream):
            self._begin(full, out, dtype, accumulate, what, packs).wait()
            done = self._streams.record(self._stream)
        return Pending(partial(self._streams.wait, done))

    def _begin(
        self, full: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool, what: str, packs: bool
    ) -> Pending:
        # sums of a group go on in the dtype of the sum, and where the other groups can read them
        is_in_place = not accumulate and out.dtype is dtype and self._replicate_group.shared_memory is None
        total = out if is_in_place else self._shard.rows(1, out.numel(), dtype)[0]
        within = self._shard_group.reduce_scatter(full, total, dtype=dtype, accumulate=False, what=what, packs=packs)

        def finish() -> None:
            within.wait()
            part = total.chunk(self._replicate_group.num_ranks)[self._replicate_group.rank]
            across = self._replicate_group
            across.reduce_scatter(total, part, dtype=dtype, accumulate=False, what=what, packs=packs).wait()
            is_exact = not packs or across.shared_memory is not None  # what is not sent is not rounded
            gather = across.all_gather if is_exact else self._packed.all_gather
            gather(total, part, what=what).wait()
            if accumulate:
                out.add_(total)
            elif not is_in_place:
                out.copy_(total)

        return Pending(finish, once=True)
