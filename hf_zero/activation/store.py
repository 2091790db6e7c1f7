"""Storage of checkpointed inputs from forward to backward: offloaded to the host, partitioned, or on the device."""

import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_zero.activation.arena import Arena
from hf_zero.comm import Bus, Comm, Counters, Transfer
from hf_zero.errors import UnsupportedError
from hf_zero.sharding.layout import Sample


# Number of bytes by which the pool of host memory grows.
CHUNK_NBYTES = 64 * 2**20
# Maximum number of concurrent copies to the host. Before another one starts, the computation waits for the oldest,
# whose device memory can then be reused.
MAX_FLIGHTS = 2


class Ticket:
    """The object that autograd saves instead of a tensor. When autograd releases it, the tensor is freed."""

    def __init__(self, saved: "Saved"):
        self.saved = saved


@dataclass(eq=False)
class Saved:
    """A checkpointed input: on the device, on the host, or in a transfer between them.

    Args:
        call (`int`): Index of the call of the checkpointed block.
        numel (`int`): Number of elements of the full input.
        is_divided (`bool`): Whether this rank keeps only its part.
    """

    call: int
    numel: int
    is_divided: bool = False
    values: Tensor | None = None  # on the device, also during transfers
    piece: Tensor | None = None  # on the host
    down: Transfer | None = None  # copy to the host, until `values` is released
    up: Transfer | None = None  # copy to the device, until `values` may be read
    is_taken: bool = False  # already read in backward; usually not needed again
    is_released: bool = False


class Store:
    """A stack of checkpointed inputs: forward pushes, backward pops (ZeRO, arXiv 1910.02054, section 6.1).

    Not offloaded are the inputs of the last block of a forward, which backward needs first; inputs whose copies cannot
    be overlapped with computation (see `Pace`); and inputs that several blocks share, since they exist only once.

    Args:
        bus (`Bus`, *optional*): Copies to and from the host. `None` keeps everything on the device.
        division (`Division`, *optional*): Partitions replicated inputs over tensor-parallel ranks.
        chunk_nbytes (`int`): Number of bytes by which the host memory grows.
    """

    def __init__(self, bus: Bus | None, division: "Division | None", chunk_nbytes: int = CHUNK_NBYTES):
        self._bus = bus
        self._division = division
        self.arena = Arena(lambda nbytes: bus.empty(nbytes, torch.uint8), chunk_nbytes)
        is_timed = bus is not None and bus.device.type not in ("cpu", "meta")  # neither has timed events
        self._pace = Pace(partial(bus.streams.record, is_timed=True) if is_timed else None)
        self._stack: list[Saved] = []
        self._flights: deque[Saved] = deque()  # copies to the host in flight, oldest first
        self._num_calls = 0
        self._base = 0  # height of the stack at the start of the last call
        self._turn: int | None = None  # `_base` at the start of the last backward
        self._is_forward = False  # whether the last operation was a `save`
        self._seen: dict[int, tuple[weakref.ref, int]] = {}  # inputs of this forward and their heights, by `id`
        self._shared: set[int] = set()  # heights of inputs that several calls share
        self._was_shared: set[int] = set()  # the same for the last forward

    @property
    def device_nbytes(self) -> int:
        """The bytes of checkpointed inputs on the device."""
        return sum(
            saved.values.numel() * saved.values.element_size() for saved in self._stack if saved.values is not None
        )

    def begin_call(self) -> None:
        """Records the call of a checkpointed block in forward."""
        if not self._stack:
            self._seen.clear()
            self._was_shared, self._shared = self._shared, set()
        self._num_calls += 1
        self._base = len(self._stack)

    def save(self, tensor: Tensor) -> Ticket:
        """Saves an input of the block that was called last."""
        self._is_forward = True
        saved = Saved(self._num_calls, tensor.numel())
        if self._is_shared(tensor) or type(tensor) is not Tensor or not _is_dense(tensor):
            saved.values = tensor.detach()
        else:
            self._place(saved, tensor.detach().as_strided((tensor.numel(),), (1,)))
        self._stack.append(saved)
        ticket = Ticket(saved)
        weakref.finalize(ticket, self._release, saved).atexit = False
        return ticket

    def _is_shared(self, tensor: Tensor) -> bool:
        """Returns whether another call receives the same tensor, in this forward or the last one."""
        height = len(self._stack)
        first, at = self._seen.setdefault(id(tensor), (weakref.ref(tensor), height))
        if first() is not tensor:  # the address of a freed tensor was reused
            self._seen[id(tensor)] = weakref.ref(tensor), height
        elif at != height:
            self._shared |= {at, height}
        return height in self._shared | self._was_shared

    def _place(self, saved: Saved, values: Tensor) -> None:
        if self._division is not None:
            self._division.check(values, len(self._stack))
            values, saved.is_divided = self._division.part_of(values), True
        self._pace.mark()
        if self._bus is None or self._base == self._turn or not self._pace.allows(len(self._stack)):
            # clone, since a view would keep the memory of the full tensor
            saved.values = values.clone() if saved.is_divided else values
            return
        self._land(MAX_FLIGHTS - 1)
        saved.piece = self.arena.take(values.numel(), values.dtype)
        saved.values = values  # keep it alive until the copy is done
        with self._bus.on_side_stream("down"):
            self._pace.begin()
        saved.down = self._bus.down(saved.piece, values)
        with self._bus.on_side_stream("down"):
            self._pace.end()
        self._flights.append(saved)
        self._land(MAX_FLIGHTS)

    def _land(self, max_flights: int) -> None:
        """Frees copied tensors, and waits until at most `max_flights` copies are in flight."""
        while self._flights and (len(self._flights) > max_flights or self._flights[0].down.is_done()):
            self._give_up(self._flights.popleft())

    def _give_up(self, saved: Saved) -> None:
        saved.down.wait()  # the computation may reuse the memory from now on
        saved.down = saved.values = None

    def take(self, ticket: Ticket) -> Tensor:
        """Returns the values as a 1-D tensor in memory order, and prefetches the inputs of the preceding call."""
        saved = ticket.saved
        if self._is_forward:
            self._is_forward = False
            self._turn = self._base
            self._pace.turn()
        saved.is_taken = False
        self._bring(saved.call)
        saved.is_taken = True
        values = saved.values
        if saved.up is not None:
            saved.up.wait()
            saved.up = saved.values = None  # the caller owns it; another `take` copies it again
        return self._division.whole_of(values, saved.numel) if saved.is_divided else values

    def _bring(self, call: int) -> None:
        """Starts to copy the inputs of a call and of the preceding one to the device."""
        before = None
        for saved in reversed(self._stack):
            if saved.is_released or saved.call > call:
                continue
            if saved.call < call and before is None:
                before = saved.call
            if saved.call not in (call, before):
                return
            if saved.values is None and not saved.is_taken:
                saved.values = torch.empty_like(saved.piece, device=self._bus.device)
                saved.up = self._bus.up(saved.values, saved.piece)

    def _release(self, saved: Saved) -> None:
        if saved.down is not None:
            self._flights.remove(saved)
            self._give_up(saved)
        if saved.up is not None:
            saved.up.wait()
        saved.values = saved.up = None
        saved.is_released = True
        if saved.piece is not None:
            self.arena.give(saved.piece)
        while self._stack and self._stack[-1].is_released:
            self._stack.pop()


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements are contiguous in memory in some order of the dimensions."""
    return tensor.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(tensor)


class Pace:
    """Limits the number of offloaded inputs to those whose copies overlap with computation. Measures copies and blocks
    of one forward with device events to set the limit for later ones.

    There is no limit on a device without timed events (the CPU, whose copies are synchronous).

    Args:
        record (`Callable`, *optional*): Records an event with timing on the current stream and returns it.
    """

    def __init__(self, record):
        self._record = record
        self.limit: int | None = None  # maximum number of offloaded inputs per forward; None: no limit
        self._copies: list[list] = []  # [begin, end] events of each copy since the last `turn`
        self._blocks: list = []  # event at the start of each block
        self._last: tuple[list, list] | None = None  # events of the last forward, until they are read

    def allows(self, count: int) -> bool:
        """Returns whether to offload another input after `count` inputs of this forward."""
        return self.limit is None or count < self.limit

    def mark(self) -> None:
        """Records the start of a checkpointed block. Call it on the compute stream."""
        if self._record is not None:
            self._blocks.append(self._record())

    def begin(self) -> None:
        """Records the start of a copy. Call it and `end` on the copy stream."""
        if self._record is not None:
            self._copies.append([self._record()])

    def end(self) -> None:
        """Records the end of the last copy."""
        if self._record is not None:
            self._copies[-1].append(self._record())

    def turn(self) -> None:
        """Ends a forward. Its events are read later, when they have completed, without waiting for them."""
        self._learn()
        if self._copies and len(self._blocks) > 1:
            self._last = self._copies, self._blocks
        self._copies, self._blocks = [], []

    def _learn(self) -> None:
        if self._last is None:
            return
        copies, blocks = self._last
        if not copies[-1][1].query() or not blocks[-1].query():
            return
        each = sum(begin.elapsed_time(end) for begin, end in copies) / len(copies)
        spare = blocks[0].elapsed_time(blocks[-1])
        self.limit = max(1, int(spare / each)) if each > 0 else None
        self._last = None


class Division:
    """Partitions tensors over the tensor-parallel ranks, which all hold the same values, and gathers them again
    (ZeRO-R P_a, arXiv 1910.02054, section 6.1).

    Args:
        comm (`Comm`): The tensor-parallel ranks.
        counters (`Counters`): Counts the bytes sent, as "activation".
    """

    def __init__(self, comm: Comm, counters: Counters):
        self._comm = comm
        self._counters = counters
        self._checked: set[int] = set()  # heights in the stack whose tensors were compared

    def part_numel(self, numel: int) -> int:
        """Returns the number of elements of a part. The last part may be padded."""
        return -(-numel // self._comm.num_ranks)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a 1-D tensor, a view unless it has to be padded."""
        numel = self.part_numel(whole.numel())
        part = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def whole_of(self, part: Tensor, numel: int) -> Tensor:
        """Gathers a tensor of `numel` elements from the parts of all ranks, which must call it in the same order."""
        whole = part.new_empty(part.numel() * self._comm.num_ranks)
        own = whole[self._comm.rank * part.numel() : (self._comm.rank + 1) * part.numel()].copy_(part)
        self._comm.all_gather(whole, own, what="checkpointed input").wait()
        sent = part.numel() * part.element_size() * (self._comm.num_ranks - 1)
        self._counters.add("activation", sent)
        return whole[:numel]

    def check(self, whole: Tensor, place: int) -> None:
        """Checks that all ranks have the same bits, in the first call for a place. Raises [`UnsupportedError`] on all
        ranks otherwise."""
        if place in self._checked:
            return
        bits = Sample([(0, whole.numel())], whole.device).sum_of(whole)
        own = torch.stack([torch.full_like(bits, whole.numel()), bits])
        if len(self._comm.all_gather_vector(own).unique(dim=0)) > 1:
            raise UnsupportedError(
                "partition_activations: the inputs of a checkpointed block differ between tensor-parallel ranks "
                "(different batches or sequence parallelism), expected equal inputs; give the ranks of a "
                "tensor-parallel group the same batch, or use offload_activations"
            )
        self._checked.add(place)
