"""Values in few bits for the way between ranks, block by block (ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3).

[Note: blocks] 256 neighbouring values have one fp32 scale, the largest magnitude among them divided by 127 (7 for
4 bits). Each value is divided by it and rounded to the nearest integer, ties to even. So what comes back is off by
half a scale at most: 1/254 (1/14) of the largest magnitude of its block, and by what rounding to the dtype of the
result adds. A block in which a value is not finite comes back as NaN. Blocks are counted from where a row begins.
A layout whose parameters and shards begin at multiples of 256 has no block in which two parameters lie.

[Note: sums of rounded values] For a reduction every rank rounds what it has for another one, and sends it there. The
other one adds up what has come, and what it has itself, which nobody has rounded, in fp32 and as a tree over the
ranks. So an average over N ranks is off by half a scale of each of the other N - 1, divided by N, at most.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_zero.comm.base import Bucket, Comm, Messages, Pending


BLOCK_NUMEL = 256
# Rounded at a time: on CPUs so few that they stay in the processor's cache between the passes.
CACHED_NUMEL, DEVICE_NUMEL = 2**18, 2**24


def packed_nbytes(numel: int, bits: int) -> int:
    """Returns the bytes that a row of values takes on its way: whole blocks, and their scales behind them."""
    num_blocks = -(-numel // BLOCK_NUMEL)
    return num_blocks * (BLOCK_NUMEL * bits // 8 + torch.float32.itemsize)


def pack_rows(values: Tensor, packed: Tensor, bits: int) -> None:
    """Rounds rows of values to integers and scales, see [Note: blocks].

    Args:
        values (`Tensor`): `(rows, numel)`, floating.
        packed (`Tensor`): `(rows, packed_nbytes(numel, bits))`, uint8, overwritten.
        bits (`int`): 8 or 4.
    """
    for part, codes, scales in _parts(values, packed, bits):
        blocks = part.to(torch.float32)
        largest = blocks.abs().amax(-1, keepdim=True)
        highest = 2 ** (bits - 1) - 1
        scale = torch.where(largest.isfinite(), largest / highest, torch.nan)
        scales.copy_(scale.squeeze(-1))
        # a scale of zero is that of zeros, and of values next to the smallest that there are
        rounded = torch.where(scale > 0, blocks / scale, 0.0).round_().clamp_(-highest, highest)
        if bits == 8:
            codes.copy_(rounded.to(torch.int8).view(torch.uint8))
        else:
            low, high = (rounded + 8).to(torch.uint8).chunk(2, -1)
            codes.copy_(low | high << 4)


def unpack_rows(packed: Tensor, values: Tensor, bits: int) -> None:
    """Multiplies integers by their scales again. `packed`: as `pack_rows` has written it; `values`: `(rows, numel)`,
    floating, overwritten."""
    for part, codes, scales in _parts(values, packed, bits, writes=True):
        part.copy_(_multiplied(codes, scales, bits))


def average_rows(
    packed: Tensor, own: Tensor, place: int, out: Tensor, bits: int, *, count: int, accumulate: bool
) -> None:
    """Averages rows of values of which all but one were packed, see [Note: sums of rounded values].

    Args:
        packed (`Tensor`): `(rows - 1, packed_nbytes(numel, bits))`, as `pack_rows` has written it.
        own (`Tensor`): `(numel,)`, floating: the row that was not packed.
        place (`int`): which of the rows that is.
        out (`Tensor`): `(numel,)`, receives the average; it may be `own`.
        count (`int`): by what the sum is divided.
    """
    low = 0
    for part, codes, scales in _parts(own.expand(len(packed), -1), packed, bits):
        came, exact = _multiplied(codes, scales, bits), part[:1].to(torch.float32)
        rows = torch.cat([came[:place], exact, came[place:]])
        distance = 1
        while distance < len(rows):  # neighbours first, then neighbours of these sums
            rows[: len(rows) - distance : 2 * distance].add_(rows[distance :: 2 * distance])
            distance *= 2
        target = out[low : low + rows[0].numel()]
        average, low = rows[0].view(-1)[: target.numel()].div_(count), low + target.numel()
        if accumulate:
            target.add_(average)
        else:
            target.copy_(average)


def _multiplied(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    if bits == 8:
        integers = codes.view(torch.int8)
    else:
        integers = torch.cat([codes & 15, codes >> 4], -1).to(torch.int8) - 8
    return integers.to(torch.float32).mul_(scales.unsqueeze(-1))


def _parts(
    values: Tensor, packed: Tensor, bits: int, *, writes: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields parts of rows: values `(rows, blocks, 256)`, their integers and their scales. A block that is not full
    is filled up with zeros, in memory of its own; with `writes`, what was written there is copied back."""
    rows, numel = values.shape
    num_full, num_blocks = numel // BLOCK_NUMEL, -(-numel // BLOCK_NUMEL)
    codes_nbytes = num_blocks * BLOCK_NUMEL * bits // 8
    codes = packed[:, :codes_nbytes].unflatten(1, (num_blocks, -1))
    scales = packed[:, codes_nbytes : packed_nbytes(numel, bits)].view(torch.float32)
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

    BITS = 8

    def __init__(self, comm: Comm):
        self._comm = comm
        self._free: dict[int, list[Bucket]] = defaultdict(list)  # by size; of one size as many as are under way

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        """Fills `full` from the rounded shards of all ranks. `full`: 1-D, as for `Comm.all_gather`; all of it is
        overwritten. `shard`: 1-D, this rank's range of it, or apart."""
        nbytes = packed_nbytes(shard.numel(), self.BITS)
        bucket = self._take(nbytes * self._comm.num_ranks)
        rows = bucket.rows(self._comm.num_ranks, nbytes, torch.uint8)
        own = rows[self._comm.rank]
        pack_rows(shard.view(1, -1), own.view(1, -1), self.BITS)
        gathering = self._comm.all_gather(rows.view(-1), own, what=what)

        def finish() -> None:
            gathering.wait()
            unpack_rows(rows, full.view(self._comm.num_ranks, -1), self.BITS)
            if bucket not in self._free[bucket.nbytes]:  # it is there when this was broken off behind it
                self._free[bucket.nbytes].append(bucket)

        return Pending(finish)

    def round_(self, full: Tensor) -> None:
        """Rounds whole values as a gather does, without one."""
        rows = full.view(self._comm.num_ranks, -1)
        for row in rows.split(1):
            packed = torch.empty(1, packed_nbytes(row.numel(), self.BITS), dtype=torch.uint8, device=full.device)
            pack_rows(row, packed, self.BITS)
            unpack_rows(packed, row, self.BITS)

    def _take(self, nbytes: int) -> Bucket:
        if not self._free[nbytes]:
            self._free[nbytes].append(Bucket(nbytes, self._comm.device, self._comm.empty))
            self._comm.packing.append(self._free[nbytes][-1])
        return self._free[nbytes].pop()


# Begins to send bytes to other ranks, and to receive bytes from them: the arguments are those of `Comm.exchange`.
Exchange = Callable[[Messages, Messages], Pending]


class PackedReduction:
    """A reduce-scatter under way whose values go in few bits, in pieces, see [Note: sums of rounded values].

    `members` are the ranks in the order of their ranges in `full`; the sum is divided by `count`. `memory` is bytes,
    1-D tensors of one length: as many pieces are under way at a time.
    """

    def __init__(
        self,
        full: Tensor,
        out: Tensor,
        *,
        bits: int,
        rank: int,
        members: Sequence[int],
        count: int,
        accumulate: bool,
        exchange: Exchange,
        memory: list[Tensor],
    ):
        self._ranges, self._out, self._bits = full.view(-1, out.numel()), out, bits
        self._place, self._count, self._accumulate = members.index(rank), count, accumulate
        self._exchange = exchange
        self._others = [other for other in members if other != rank]
        num_blocks = memory[0].numel() // least_nbytes(len(self._ranges), bits)
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
            average_rows(came, own, self._place, out, self._bits, count=self._count, accumulate=self._accumulate)
            self._free.append(memory)
            self._begin()

    def _begin(self) -> None:
        while self._free and self._to_begin:
            part, memory = self._to_begin.popleft(), self._free.popleft()
            nbytes = packed_nbytes(part.stop - part.start, self._bits)
            going, came = memory[: 2 * len(self._others) * nbytes].view(2, len(self._others), nbytes)
            values, place = self._ranges[:, part], self._place
            for others, rows in ((values[:place], going[:place]), (values[place + 1 :], going[place:])):
                if len(others):
                    pack_rows(others, rows, self._bits)
            sends, receives = list(zip(going, self._others)), list(zip(came, self._others))
            self._under_way.append((part, memory, came, self._exchange(sends, receives)))


def least_nbytes(num_ranks: int, bits: int) -> int:
    """Returns how much memory a piece of a `PackedReduction` takes: a block for each other rank, and one from each."""
    return 2 * (num_ranks - 1) * packed_nbytes(BLOCK_NUMEL, bits)
