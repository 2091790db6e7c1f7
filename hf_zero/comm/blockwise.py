"""Block-wise 8-bit quantization of values on the wire (ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3).

[Note: blocks] Each block of 256 consecutive values has an fp32 scale: its largest magnitude divided by 127. Values are
divided by the scale and rounded to the nearest integer, ties to even. The error is at most half a scale (1/254 of the
largest magnitude of the block) plus the rounding to the dtype of the result. A block with a non-finite value becomes
NaN. Blocks are counted from the start of a row. If parameters and shards start at multiples of 256, no block contains
values of two parameters.

[Note: sums of rounded values] For a reduction, every rank quantizes its summand for each other rank and sends it. The
receiver adds the received summands and its own, unquantized one in fp32, as a tree over the ranks. The error of an
average over N ranks is therefore at most half a scale of each of the other N - 1 ranks, divided by N.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from hf_zero.comm.base import Bucket, Comm, Pending


BLOCK_NUMEL, HIGHEST = 256, 127
# Number of values quantized at a time. On CPUs, they must stay in the cache between the passes.
CACHED_NUMEL, DEVICE_NUMEL = 2**18, 2**24


def packed_nbytes(numel: int) -> int:
    """Returns the packed size of a row of values in bytes: full blocks, followed by their scales."""
    num_blocks = -(-numel // BLOCK_NUMEL)
    return num_blocks * (BLOCK_NUMEL + torch.float32.itemsize)


def pack_rows(values: Tensor, packed: Tensor) -> None:
    """Quantizes rows of values to integers and scales, see [Note: blocks].

    Args:
            values (`Tensor`): `(rows, numel)`, floating point.
            packed (`Tensor`): `(rows, packed_nbytes(numel))`, uint8, overwritten.
    """
    for part, codes, scales in _parts(values, packed):
        blocks = part.to(torch.float32)
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = torch.where(largest.isfinite(), largest / HIGHEST, torch.nan)
        scales.copy_(scale.squeeze(-1))
        # the scale is zero for blocks of zeros, and underflows to zero for blocks of tiny values
        rounded = torch.where(scale > 0, blocks / scale, 0.0).round_().clamp_(-HIGHEST, HIGHEST)
        codes.copy_(rounded.to(torch.int8).view(torch.uint8))


def unpack_rows(packed: Tensor, values: Tensor) -> None:
    """Dequantizes rows. `packed` is the result of `pack_rows`; `values` is `(rows, numel)`, floating point,
    overwritten."""
    for part, codes, scales in _parts(values, packed, writes=True):
        part.copy_(_multiplied(codes, scales))


def average_rows(packed: Tensor, own: Tensor, place: int, out: Tensor, *, accumulate: bool) -> None:
    """Averages rows of values, all but one of which are packed; see [Note: sums of rounded values].

    Args:
        packed (`Tensor`): `(rows - 1, packed_nbytes(numel))`, the result of `pack_rows`.
        own (`Tensor`): `(numel,)`, floating point: the row that is not packed.
        place (`int`): the index of `own` among the rows.
        out (`Tensor`): `(numel,)`, receives the average. It may be `own`.
    """
    low = 0
    for part, codes, scales in _parts(own.expand(len(packed), -1), packed):
        came, exact = _multiplied(codes, scales), part[:1].to(torch.float32)
        rows = torch.cat([came[:place], exact, came[place:]])
        distance = 1
        while distance < len(rows):  # neighbors first, then neighboring sums
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
    """Yields parts of rows: values `(rows, blocks, 256)`, their integers and their scales. The last, incomplete block
    is padded with zeros in a temporary buffer; with `writes`, the buffer is copied back."""
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
        tail = values[:, num_full * BLOCK_NUMEL :]
        block = values.new_zeros(rows, 1, BLOCK_NUMEL)
        block[:, 0, : tail.shape[1]] = tail
        yield block, codes[:, num_full:], scales[:, num_full:]
        if writes:
            tail.copy_(block[:, 0, : tail.shape[1]])


class Packed:
    """Collectives with 8 bits per value on the wire, over any ranks."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._free: dict[int, list[Bucket]] = defaultdict(list)  # by size; one for each gather in progress

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        """Fills `full` with the quantized shards of all ranks. All ranks, including the owner of a shard, get the
        quantized values, so that every rank computes with the same ones.

        Args:
            full (`Tensor`): 1-D, as for `Comm.all_gather`, overwritten.
            shard (`Tensor`): 1-D, this rank's range of `full`, or separate memory.
        """
        nbytes = packed_nbytes(shard.numel())
        bucket = self._take(nbytes * self._comm.num_ranks)
        rows = bucket.rows(self._comm.num_ranks, nbytes, torch.uint8)
        own = rows[self._comm.rank]
        pack_rows(shard.view(1, -1), own.view(1, -1))
        gathering = self._comm.all_gather(rows.view(-1), own, what=what)

        def finish() -> None:
            gathering.wait()
            unpack_rows(rows, full.view(self._comm.num_ranks, -1))
            if bucket not in self._free[bucket.nbytes]:  # it may be if an earlier wait was interrupted after this line
                self._free[bucket.nbytes].append(bucket)

        return Pending(finish)

    def round_(self, full: Tensor) -> None:
        """Rounds gathered values as a quantized gather does, without communication."""
        rows = full.view(self._comm.num_ranks, -1)
        for row in rows.split(1):
            packed = torch.empty(1, packed_nbytes(row.numel()), dtype=torch.uint8, device=full.device)
            pack_rows(row, packed)
            unpack_rows(packed, row)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        """Averages like `Comm.reduce_scatter`, with `dtype` fp32. Values that are read from another rank's memory are
        not quantized."""
        comm = self._comm
        if comm.num_ranks == 1 or comm.shared_memory is not None:
            return comm.reduce_scatter(full, out, dtype=dtype, accumulate=accumulate, what=what)
        return comm.in_turn(partial(self._begin_reduction, full, out, accumulate, what), full, what=what)

    def _begin_reduction(self, full: Tensor, out: Tensor, accumulate: bool, what: str) -> Callable[[], None]:
        """Starts a reduction, see [Note: sums of rounded values], with up to two pieces on the wire, and returns the
        function that finishes it; on an accelerator, that function queues the computation."""
        rank, num_ranks = self._comm.rank, self._comm.num_ranks
        ranges, others = full.view(num_ranks, -1), [other for other in range(num_ranks) if other != rank]
        free = deque(self._pieces.rows(2, self._pieces.nbytes // 2, torch.uint8))
        step = free[0].numel() // least_nbytes(num_ranks) * BLOCK_NUMEL
        left = deque(slice(start, min(start + step, out.numel())) for start in range(0, out.numel(), step))
        under_way: deque[tuple[slice, Tensor, Tensor, Pending]] = deque()

        def begin() -> None:
            while free and left:
                part, memory = left.popleft(), free.popleft()
                nbytes = packed_nbytes(part.stop - part.start)
                going, came = memory[: 2 * len(others) * nbytes].view(2, len(others), nbytes)
                values = ranges[:, part]
                for summands, rows in ((values[:rank], going[:rank]), (values[rank + 1 :], going[rank:])):
                    if len(summands):
                        pack_rows(summands, rows)
                sends, receives = list(zip(going, others)), list(zip(came, others))
                exchanging = self._comm.exchange(sends, receives, what=what, verb="reduce")
                under_way.append((part, memory, came, exchanging))

        def finish() -> None:
            while under_way:
                part, memory, came, exchanging = under_way.popleft()
                exchanging.wait()
                average_rows(came, ranges[rank, part], rank, out[part], accumulate=accumulate)
                free.append(memory)
                begin()

        begin()
        return finish

    @cached_property
    def _pieces(self) -> Bucket:
        """The memory of the two pieces of a reduction."""
        least = least_nbytes(self._comm.num_ranks)
        return self._bucket(2 * max(self._comm.bucket_nbytes // 4 * 4, least))  # the scales are fp32

    def _take(self, nbytes: int) -> Bucket:
        return self._free[nbytes].pop() if self._free[nbytes] else self._bucket(nbytes)

    def _bucket(self, nbytes: int) -> Bucket:
        self._comm.packing.append(Bucket(nbytes, self._comm.device, self._comm.empty))
        return self._comm.packing[-1]


def least_nbytes(num_ranks: int) -> int:
    """Returns the minimum memory of a piece of a reduction: a block to and a block from each other rank."""
    return 2 * (num_ranks - 1) * packed_nbytes(BLOCK_NUMEL)
