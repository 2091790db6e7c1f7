"""Several shard groups: flat buffers are sharded within each group and replicated across groups (MiCS, arXiv
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
from hf_zero.comm.blockwise import Packed
from hf_zero.comm.streams import Streams
from hf_zero.errors import ConfigError


logger = logging.getLogger(__name__)


def shard_size_of(
    comm: Comm, group: dist.ProcessGroup, shard_size: int | str | None, fits: Callable[[int], bool]
) -> int:
    """Returns the number of ranks of each shard group; all ranks if `shard_size` is `None`. "auto" calls
    `fitting_size`, is collective, and returns the largest size found by any rank."""
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
            "hf_zero: shard_size auto: the model states do not fit on the devices when sharded over the %s ranks of "
            "one host; sharded over %s of %s ranks, they %s",
            *(per_host, found, comm.num_ranks, "fit" if do else "do not fit either: hf-zero plan suggests changes"),
        )
    return found


def fitting_size(per_host: int, num_ranks: int, fits: Callable[[int], bool]) -> int:
    """Returns the size of the smallest shard group that fits: the ranks of one host, or of several hosts if they form
    equal groups; all ranks if no smaller group fits.

    Args:
        per_host (`int`): number of ranks of each host.
        num_ranks (`int`): number of all ranks.
        fits (`Callable`): whether a device can hold its shard if the given number of ranks divide the model.
    """
    sizes = (size for size in range(per_host, num_ranks, per_host) if num_ranks % size == 0)
    return next(filter(fits, sizes), num_ranks)


def ranks_of_a_host(hosts: list) -> int:
    """Returns the number of ranks of each host. Returns the number of all ranks if hosts have one rank each, have
    different numbers of ranks, or do not have consecutive ranks. `hosts` contains the host of each rank."""
    size = hosts.count(hosts[0])
    parts = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    is_even = all(len(part) == size and len(set(part)) == 1 for part in parts) and len(parts) == len(set(hosts))
    return size if is_even and size > 1 else len(hosts)


def refuse_uneven(shard_size: int | str | None, num_ranks: int, name: str = "shard_size") -> None:
    """Raises [`ConfigError`] with the valid sizes if `num_ranks` cannot form equal shard groups. `None` and "auto" are
    always valid."""
    if shard_size not in (None, "auto"):
        refuse_no_divisor(
            int(shard_size), num_ranks, name, "auto for the ranks of one host, or omit it to shard over all ranks"
        )


def refuse_no_divisor(size: int, num_ranks: int, name: str, otherwise: str) -> None:
    """Raises [`ConfigError`] with the name of the setting, the valid sizes and the alternative (`otherwise`) if the
    group size does not divide the number of data-parallel ranks."""
    if num_ranks % size:
        fitting = ", ".join(str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0)
        raise ConfigError(
            f"{name}: {num_ranks} rank{'s' if num_ranks > 1 else ''} cannot form groups of {size}; give a divisor of "
            f"{num_ranks} ({fitting}), {otherwise}"
        )


def groups_of(
    group: dist.ProcessGroup, shard_size: int, device: torch.device, timeout_seconds: float
) -> dict[str, dist.ProcessGroup]:
    """Returns this rank's shard group and replicate group, as "shard" and "replicate". The first call for each size is
    collective."""
    every, rank = range(dist.get_world_size(group)), dist.get_rank(group)
    first = rank // shard_size * shard_size
    parts = {"shard": every[first : first + shard_size], "replicate": every[rank % shard_size :: shard_size]}
    return {name: ranks.communicator(group, part, device, timeout_seconds, name) for name, part in parts.items()}


def averaging(comm: Comm, *, packs: bool) -> Callable[..., Pending]:
    """Returns the function that averages over all data-parallel ranks and leaves each rank its range of the shard
    group. It takes the arguments of `Comm.reduce_scatter` over the shard group. With `packs`, values are quantized on
    the wire, see [`Packed`]."""
    if comm.average_of_groups is not None:
        return partial(comm.average_of_groups, packs=packs)
    return (Packed(comm) if packs else comm).reduce_scatter


class Average:
    """Averages over all ranks of several shard groups: a reduce-scatter within each group, then an all-reduce of each
    shard among the ranks that hold it.

    Sums within a group are computed in a fixed order, and the group sums are added in group order, so results are
    reproducible bit for bit. With groups of one rank, or a single group, the order is that of one reduce-scatter over
    all ranks.
    """

    def __init__(self, shard_group: Comm, replicate_group: Comm):
        self._groups = shard_group, replicate_group
        self._packed = Packed(shard_group), Packed(replicate_group)
        self._last = Pending()
        self._streams = Streams(shard_group.device)
        self._stream = self._streams.new() if shard_group.runs_ahead else None
        self._shard = Bucket(0, shard_group.device, replicate_group.empty)  # grows to the largest shard

    @property
    def memory(self) -> Tensor | None:
        """The buffer for shards that cannot be summed in place; `None` until it is allocated."""
        return self._shard.memory

    def __call__(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, packs: bool
    ) -> Pending:
        begin = partial(self._begin, full, out, dtype, accumulate, what, packs)
        if self._stream is None:
            self._last.wait()  # one at a time: they share the buffer
            self._last = begin()
            return self._last
        # queued on a separate stream, so neither the host nor the computation waits
        return Pending(self._streams.issue(self._stream, lambda: begin().wait(), full))

    def _begin(
        self, full: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool, what: str, packs: bool
    ) -> Pending:
        _, across = self._groups
        # group sums stay in the dtype of the sum, in memory that the other groups can read
        is_in_place = not accumulate and out.dtype is dtype and across.shared_memory is None
        total = out if is_in_place else self._shard.rows(1, out.numel(), dtype)[0]
        part = total.chunk(across.num_ranks)[across.rank]
        reduce, reduce_across = (group.reduce_scatter for group in (self._packed if packs else self._groups))
        # values that are read from another rank's memory are not quantized
        gather = (self._packed[1] if packs and across.shared_memory is None else across).all_gather
        within = reduce(full, total, dtype=dtype, accumulate=False, what=what)

        def finish() -> None:
            within.wait()
            reduce_across(total, part, dtype=dtype, accumulate=False, what=what).wait()
            gather(total, part, what=what).wait()
            if accumulate:
                out.add_(total)
            elif not is_in_place:
                out.copy_(total)

        return Pending(finish, once=True)
