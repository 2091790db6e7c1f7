"""Values in 8 bits for the way between ranks, block by block (ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3).

[Note: blocks] 256 neighbouring values have one fp32 scale, the largest magnitude among them divided by 127. Each value
is divided by it and rounded to the nearest integer, ties to even. So what comes back is off by half a scale at most:
1/254 of the largest magnitude of its block, and by what rounding to the dtype of the result adds. A block in which a
value is not finite comes back as NaN. Blocks are counted from where a row begins. A layout whose parameters and shards
begin at multiples of 256 has no block in which two parameters lie.

[Note: sums of rounded values] For a reduction every rank rounds what it has for another one, and sends it there. The
other one adds up what has come, and what it has itself, which nobody has rounded, in fp32 and as a tree over the
ranks. So an average over N ranks is off by half a scale of each of the other N - 1, divided by N, at most.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_zero.comm.base import Bucket, Comm, Messages, Pending


BLOCK_NUMEL, HIGHEST = 256, 127
# Rounded at a time: on CPUs so few that they stay in the processor's cache between the passes.
CACHED_NUMEL, DEVICE_NUMEL = 2**18, 2**24


def packed_nbytes(numel: int) -> int:
    """Returns the bytes that a row of values takes on its way: whole blocks, and their scales behind them."""
    num_blocks = -(-numel // BLOCK_NUMEL)
    return num_blocks * (BLOCK_NUMEL + torch.float32.itemsize)


def pack_rows(values: Tensor, packed: Tensor) -> None:
    """Rounds rows of values to integers and scales, see [Note: blocks].

    Args:
        values (`Tensor`): `(rows, numel)`, floating.
        packed (`Tensor`): `(rows, packed_nbytes(numel))`, uint8, overwritten.
    """
    for part, codes, scales in _parts(values, packed):
        blocks = part.to(torch.float32)
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = torch.where(largest.isfinite(), largest / HIGHEST, torch.nan)
        scales.copy_(scale.squeeze(-1))
        # a scale of zero is that of zeros, and of values next to the smallest that there are
        rounded = torch.where(scale > 0, blocks / scale, 0.0).round_().clamp_(-HIGHEST, HIGHEST)
        codes.copy_(rounded.to(torch.int8).view(torch.uint8))


def unpack_rows(packed: Tensor, values: Tensor) -> None:
    """Multiplies integers by their scales again. `packed`: as `pack_rows` has written it; `values`: `(rows, numel)`,
    floating, overwritten."""
    for part, codes, scales in _parts(values, packed, writes=True):
        part.copy_(_multiplied(codes, scales))


def average_rows(packed: Tensor, own: Tensor, place: int, out: Tensor, *, accumulate: bool) -> None:
    """Averages rows of values of which all but one were packed, see [Note: sums of rounded values].

    Args:
        packed (`Tensor`): `(rows - 1, packed_nbytes(numel))`, as `pack_rows` has written it.
        own (`Tensor`): `(numel,)`, floating: the row that was not packed.
        place (`int`): which of the rows that is.
        out (`Tensor`): `(numel,)`, receives the average; it may be `own`.
    """
    low = 0
    for part, codes, scales in _parts(own.expand(len(packed), -1), packed):
        came, exact = _multiplied(codes, scales), part[:1].to(torch.float32)
        rows = torch.cat([came[:place], exact, came[place:]])
        distance = 1
        while distance < len(rows):  # neighbours first, then neighbours of these sums
            rows[: len(rows) - distance : 2 * distance].add_(rows[distance :: 2 * distance])
            distance *= 2
        target = out[low : low + rows[0].numel()]
        average, low = rows[0].view(-1)[: target.numel()].div_(len(rows)), low + target.numel()
        if accumulate:
            target.add_(average)
        else:
            target.copy_(average)


def _multiplied(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.view(torch.int8).to(torch.float32).mul_(scales.unsqueeze(-1))


def _parts(values: Tensor, packed: Tensor, *, writes: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields parts of rows: values `(rows, blocks, 256)`, their integers and their scales. A block that is not full
    is filled up with zeros, in memory of its own; with `writes`, what was written there is copied back."""
    rows, numel = values.shape
    num_full, num_blocks = numel // BLOCK_NUMEL, -(-numel // BLOCK_NUMEL)
    codes_nbytes = num_blocks * BLOCK_NUMEL
    codes = packed[:, :codes_nbytes].unflatten(1, (num_blocks, -1))
    scales = packed[:, codes_nbytes : packed_nbytes(numel)].view(torch.float32)
    full = values[:, : num_full * BLOCK_NUMEL].unflatten(1, (num_full, BLOCK_NUMEL))
    step = max(1, (CACHED_NUMEL if values.device.type == "cpu" else DEVICE_NUMEL) // BLOCK_NUMEL // rows)
    for low in range(0, num_full, step):
        part = slice(low, min(low + step, num_full))
        yield full[:, part], codes[:, part], scales[:, part]
    if num_full < num_blocks:
        rest = values[:, num_full * BLOCK_NUMEL :]
        block = values.new_zeros(rows, 1, BLOCK_NUMEL)
        block[:, 0, : rest.shape[1]] = rest
        yield block, codes[:, num_full:], scales[:, num_full:]
        if writes:
            rest.copy_(block[:, 0, : rest.shape[1]])


class PackedGather:
    """Gathers values in 8 bits: a rank rounds its range, and all ranks, this one included, take what was rounded. So
    every rank computes with the same values, whichever way they have come."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._free: dict[int, list[Bucket]] = defaultdict(list)  # by size; of one size as many as are under way

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        """Fills `full` from the rounded shards of all ranks. `full`: 1-D, as for `Comm.all_gather`; all of it is
        overwritten. `shard`: 1-D, this rank's range of it, or apart."""
        nbytes = packed_nbytes(shard.numel())
        bucket = self._take(nbytes * self._comm.num_ranks)
        rows = bucket.rows(self._comm.num_ranks, nbytes, torch.uint8)
        own = rows[self._comm.rank]
        pack_rows(shard.view(1, -1), own.view(1, -1))
        gathering = self._comm.all_gather(rows.view(-1), own, what=what)

        def finish() -> None:
            gathering.wait()
            unpack_rows(rows, full.view(self._comm.num_ranks, -1))
            if bucket not in self._free[bucket.nbytes]:  # it is there when this was broken off behind it
                self._free[bucket.nbytes].append(bucket)

        return Pending(finish)

    def round_(self, full: Tensor) -> None:
        """Rounds whole values as a gather does, without one."""
        rows = full.view(self._comm.num_ranks, -1)
        for row in rows.split(1):
            packed = torch.empty(1, packed_nbytes(row.numel()), dtype=torch.uint8, device=full.device)
            pack_rows(row, packed)
            unpack_rows(packed, row)

    def _take(self, nbytes: int) -> Bucket:
        if not self._free[nbytes]:
            self._free[nbytes].append(Bucket(nbytes, self._comm.device, self._comm.empty))
            self._comm.packing.append(self._free[nbytes][-1])
        return self._free[nbytes].pop()


# Begins to send bytes to other ranks, and to receive bytes from them: the arguments are those of `Comm.exchange`.
Exchange = Callable[[Messages, Messages], Pending]


class PackedReduction:
    """A reduce-scatter under way whose values go in 8 bits, in pieces, see [Note: sums of rounded values].
    `memory` is bytes, 1-D tensors of one length: as many pieces are under way at a time.
    """

    def __init__(
        self,
        full: Tensor,
        out: Tensor,
        *,
        rank: int,
        accumulate: bool,
        exchange: Exchange,
        memory: list[Tensor],
    ):
        self._ranges, self._out, self._place, self._accumulate = full.view(-1, out.numel()), out, rank, accumulate
        self._exchange = exchange
        self._others = [other for other in range(len(self._ranges)) if other != rank]
        num_blocks = memory[0].numel() // least_nbytes(len(self._ranges))
        starts = range(0, out.numel(), num_blocks * BLOCK_NUMEL)
        self._to_begin = deque(slice(start, min(start + starts.step, out.numel())) for start in starts)
        self._free = deque(memory)
        self._under_way: deque[tuple[slice, Tensor, Tensor, Pending]] = deque()
        self._begin()

    def finish(self) -> None:
        """Returns when the average is in place; on an accelerator, when that has been queued."""
        while self._under_way:
            part, memory, came, exchanging = self._under_way.popleft()
            exchanging.wait()
            own, out = self._ranges[self._place, part], self._out[part]
            average_rows(came, own, self._place, out, accumulate=self._accumulate)
            self._free.append(memory)
            self._begin()

    def _begin(self) -> None:
        while self._free and self._to_begin:
            part, memory = self._to_begin.popleft(), self._free.popleft()
            nbytes = packed_nbytes(part.stop - part.start)
            going, came = memory[: 2 * len(self._others) * nbytes].view(2, len(self._others), nbytes)
            values, place = self._ranges[:, part], self._place
            for others, rows in ((values[:place], going[:place]), (values[place + 1 :], going[place:])):
                if len(others):
                    pack_rows(others, rows)
            sends, receives = list(zip(going, self._others)), list(zip(came, self._others))
            self._under_way.append((part, memory, came, self._exchange(sends, receives)))


def least_nbytes(num_ranks: int) -> int:
    """Returns how much memory a piece of a `PackedReduction` takes: a block for each other rank, and one from each."""
    return 2 * (num_ranks - 1) * packed_nbytes(BLOCK_NUMEL)
