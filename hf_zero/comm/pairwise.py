"""Point-to-point exchange in place, for gloo, which implements reduce-scatter by an all-reduce and all-gather through
copies. Here every rank sends each peer exactly the range that the peer needs, directly from and to the final
memory."""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import count
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_zero.comm.base import DONE, Bucket, Messages, Pending
from hf_zero.comm.distributed import DistributedComm, bytes_of


# Bytes summed at a time: the scratch buffer must stay in the CPU cache between the passes.
SUM_NBYTES = 2**18
# Counts the sharded models over each process group; every model has its own number in message tags.
_NUMBERS: WeakKeyDictionary[ProcessGroup, count] = WeakKeyDictionary()


class PairwiseComm(DistributedComm):
    """Collectives for gloo, built from sends and receives. `bucket_nbytes` is the size of the staging buffer for
    received summands, shared by all reductions."""

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_seconds: float, bucket_nbytes: int):
        super().__init__(group, device, timeout_seconds)
        self._staging = Bucket(bucket_nbytes, device)  # for the summands of all peers
        self._scratch = Bucket(SUM_NBYTES, device)
        self._reducing = Pending()
        self._number = next(_NUMBERS.setdefault(group, count()))  # the same on all ranks

    @property
    def bucket_nbytes(self) -> int:
        return self._staging.nbytes

    @property
    def buckets(self) -> list[Bucket]:
        return [self._scratch] if self._staging.memory is None else [self._staging, self._scratch]

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        numel = shard.numel()
        receives = [(full[rank * numel : (rank + 1) * numel], rank) for rank in reversed(self._others)]
        pending = self._begin_messages("gather", what, receives, [(shard, rank) for rank in self._others])
        own = full[self.rank * numel : (self.rank + 1) * numel]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return pending

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        return self.in_turn(partial(self._begin_reduction, full, out, dtype, accumulate, what), what=what)

    def in_turn(self, begin: Callable[[], Callable[[], None]], *held: Tensor, what: str) -> Pending:
        self._reducing.wait()
        self._reducing = Pending(begin(), once=True)
        return self._reducing

    def _begin_reduction(
        self, full: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool, what: str
    ) -> Callable[[], None]:
        """Starts a reduction and returns the function that finishes it.

        [Note: pieces of a reduction] All ranks split messages in the same way and send all pieces at once. How a rank
        stores what it receives is local: `accumulate` and `out` may differ between ranks, for example on a rank that
        has dropped its gradients. If `out` has room, one peer's summand is received there in full while the caller
        computes. The others use the staging buffer: the first piece while the caller computes, the remaining ones when
        it waits."""
        ranges = full.view(self.num_ranks, out.numel())
        sources = self._others[::-1]
        summands, room = {self.rank: ranges[self.rank]}, None if accumulate else _room_in(out, full)
        if room is not None:
            summands[sources.pop(0)] = room
        pieces = self._staging.pieces(out.numel(), self.num_ranks - 1, full.dtype)

        def begin(start: int, stop: int) -> Pending:
            receives = [] if room is None else [(room[start:stop], (self.rank - 1) % self.num_ranks)]
            sends = [(ranges[rank][start:stop], rank) for rank in self._others]
            return self._begin_messages("reduce", what, receives, sends)

        def stage(start: int, stop: int) -> tuple[Pending, dict[int, Tensor]]:
            rows = self._staging.rows(len(sources), stop - start, full.dtype) if sources else ()
            staged = dict(zip(sources, rows))
            return self._begin_messages("reduce", what, [(row, rank) for rank, row in staged.items()], []), staged

        begun = [begin(*piece) for piece in pieces]
        first = stage(*pieces[0]) if pieces else (DONE, {})

        def finish() -> None:
            for (start, stop), direct in zip(pieces, begun):
                indirect, staged = first if start == 0 else stage(start, stop)
                for coming in (indirect, direct):
                    coming.wait()
                parts = staged | {rank: summand[start:stop] for rank, summand in summands.items()}
                in_order = [parts[rank] for rank in range(self.num_ranks)]
                average(in_order, out[start:stop], self._scratch_of(dtype), accumulate)

        return finish

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        return self._begin_messages(verb, what, receives, sends)

    def _scratch_of(self, dtype: torch.dtype) -> Tensor:
        return self._scratch.rows(1, SUM_NBYTES // dtype.itemsize, dtype)[0]

    def _begin_messages(self, verb: str, what: str, receives: Messages, sends: Messages) -> Pending:
        under_way = f"{verb} of unit {what!r}"
        # units of several models in one loss may have the same name
        works = self._post(receives, sends, tag_of(f"{verb} of {self._number} {what}"), under_way)
        self.counters.add(verb, sum(tensor.nbytes for tensor, _ in sends), what)
        return Pending(lambda: self._wait(works, under_way))


def _room_in(out: Tensor, full: Tensor) -> Tensor | None:
    """Returns the end of `out` as a buffer for a summand in the dtype of `full`; `None` if it does not fit, or if
    `out` is part of `full`. It can be averaged into `out` from there, because elements are read before they are
    overwritten.
    """
    numel, unused = out.numel(), out.element_size() - full.element_size()
    if unused < 0 or out.untyped_storage()._cdata == full.untyped_storage()._cdata:
        return None
    return bytes_of(out)[numel * unused :].view(full.dtype)


def average(summands: list[Tensor], out: Tensor, scratch: Tensor, accumulate: bool) -> None:
    """Averages two or more 1-D summands and writes the result to `out`, which may be one of them, or adds it to `out`.

    Summands are added as a tree: first neighbors, then neighboring sums. `scratch` is 1-D, in the dtype of the sum;
    its size limits the number of elements summed at a time.
    """
    dtype = scratch.dtype
    # two summands in the dtype of `out` can be added directly into `out`
    in_place = len(summands) == 2 and not accumulate and dtype is out.dtype is summands[0].dtype
    step = scratch.numel() // (len(summands).bit_length() - 1)  # one row for each level of the tree
    for low in range(0, out.numel(), step):
        part = slice(low, min(low + step, out.numel()))
        target, parts = out[part], [summand[part] for summand in summands]
        if in_place:
            total = torch.add(*parts, out=target)
        else:
            total = _added(parts, [row[: target.numel()] for row in scratch.split(step)])
        total.div_(len(summands))
        if accumulate:
            target.add_(total)
        elif total is not target:
            target.copy_(total)


def _added(summands: list[Tensor], rows: list[Tensor]) -> Tensor:
    """Adds summands up in the first row, using the other rows as scratch."""
    half = 1 << (len(summands) - 1).bit_length() - 1
    total, others = rows[0], summands[half:]
    if half == 1:
        total.copy_(summands[0])
    else:
        _added(summands[:half], rows)
    return total.add_(others[0] if len(others) == 1 else _added(others, rows[1:]))


@lru_cache(maxsize=4096)
def tag_of(text: str) -> int:
    """Returns a message tag for a collective of a unit, so that ranks that are out of step fail with an error instead
    of mixing up units."""
    return crc32(text.encode()) & 0x3FFFFFFF
