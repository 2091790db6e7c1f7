"""The store in which the inputs of checkpointed blocks rest from forward to backward."""

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


# Memory on the host grows by so many bytes at a time.
CHUNK_NBYTES = 64 * 2**20
# So many copies to the host may be under way: before the next begins, the computation waits for the oldest, whose
# memory is then free for what comes.
MAX_FLIGHTS = 2


class Ticket:
    """The object that autograd holds instead of a tensor. When autograd releases it, the tensor is freed."""

    def __init__(self, saved: "Saved"):
        self.saved = saved


@dataclass(eq=False)
class Saved:
    """One checkpointed input: on the device, on the host, or on its way from one to the other.

    Args:
        call (`int`): the number of the call of a checkpointed block that it belongs to.
        is_divided (`bool`): whether this rank keeps only its part.
    """

    call: int
    numel: int
    is_divided: bool = False
    values: Tensor | None = None  # on the device: what stays there, is on its way to the host, or on its way back
    piece: Tensor | None = None  # on the host
    down: Transfer | None = None  # until `values` may be given up
    up: Transfer | None = None  # until `values` may be read
    is_taken: bool = False  # so nobody is going to ask for it, as a rule
    is_released: bool = False


class Store:
    """A stack of checkpointed inputs: forward pushes, backward pops (ZeRO, arXiv 1910.02054, section 6.1).

    Not sent to the host are the inputs of the last block of a forward, which backward needs at once; those whose
    copies blocks cannot hide (see `Pace`); and what several blocks are given, which exists once anyway.

    Args:
        bus (`Bus`, *optional*): the way to the host; `None` keeps all on the device.
        division (`Division`, *optional*): divides what is replicated over tensor-parallel ranks.
        chunk_nbytes (`int`): by how much memory on the host grows.
    """

    def __init__(self, bus: Bus | None, division: "Division | None", chunk_nbytes: int = CHUNK_NBYTES):
        self._bus = bus
        self._division = division
        self.arena = Arena(lambda nbytes: bus.empty(nbytes, torch.uint8), chunk_nbytes)
        is_timed = bus is not None and bus.device.type not in ("cpu", "meta")  # a plan takes no time
        self._pace = Pace(partial(bus.streams.record, is_timed=True) if is_timed else None)
        self._stack: list[Saved] = []
        self._flights: deque[Saved] = deque()  # on their way to the host, the oldest first
        self._num_calls = 0
        self._base = 0  # height of the stack when the last call began
        self._turn: int | None = None  # that height when the last backward began
        self._is_forward = False  # whether the last thing that happened was a `save`
        self._seen: dict[int, tuple[weakref.ref, int]] = {}  # what the calls so far were given, and at which height
        self._shared: set[int] = set()  # heights of what several calls so far were given
        self._was_shared: set[int] = set()  # the same of the last forward

    @property
    def device_nbytes(self) -> int:
        """The bytes of checkpointed inputs on the device."""
        return sum(
            saved.values.numel() * saved.values.element_size() for saved in self._stack if saved.values is not None
        )

    def begin_call(self) -> None:
        """Notes that a checkpointed block is called in forward."""
        if not self._stack:
            self._seen.clear()
            self._was_shared, self._shared = self._shared, set()
        self._num_calls += 1
        self._base = len(self._stack)

    def save(self, tensor: Tensor) -> Ticket:
        """Saves the present values of an input of the block that was called last."""
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
        """Whether another call gets this same tensor, or got it in the last forward."""
        height = len(self._stack)
        first, at = self._seen.setdefault(id(tensor), (weakref.ref(tensor), height))
        if first() is not tensor:  # another, at the address of one that is gone
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
            # the part alone: a view of the whole would keep all of its memory
            saved.values = values.clone() if saved.is_divided else values
            return
        self._land(MAX_FLIGHTS - 1)
        saved.piece = self.arena.take(values.numel(), values.dtype)
        saved.values = values  # copies read it until they are made
        with self._bus.on_side_stream("down"):
            self._pace.begin()
        saved.down = self._bus.down(saved.piece, values)
        with self._bus.on_side_stream("down"):
            self._pace.end()
        self._flights.append(saved)
        self._land(MAX_FLIGHTS)

    def _land(self, max_flights: int) -> None:
        """Frees the memory of tensors that were copied, and waits until at most `most` copies are under way."""
        while self._flights and (len(self._flights) > max_flights or self._flights[0].down.is_done()):
            self._give_up(self._flights.popleft())

    def _give_up(self, saved: Saved) -> None:
        saved.down.wait()  # what the device does from now on may write to that memory
        saved.down = saved.values = None

    def take(self, ticket: Ticket) -> Tensor:
        """Returns the values, 1-D, as they lay in memory, and begins to copy the inputs of the call before."""
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
            saved.up = saved.values = None  # the caller's; taken once more, it is brought once more
        return self._division.whole_of(values, saved.numel) if saved.is_divided else values

    def _bring(self, call: int) -> None:
        """Begins to copy the inputs of a call, and of the one before it, to the device."""
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
    """Whether the elements fill one stretch of memory, in whatever order of the dimensions."""
    return tensor.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(tensor)


class Pace:
    """The number of checkpointed inputs that a device can send to the host without making the computation wait. It is
    learned from one forward for the next: copies and blocks are timed by events of the device.

    A device without timed events (the CPU itself, whose copies are made at once) sends all.

    Args:
        record: returns an event behind the work of the current stream that takes the time (`elapsed_time`), or is
            `None`.
    """

    def __init__(self, record):
        self._record = record
        self.limit: int | None = None  # how many of a forward's inputs go to the host; None: all
        self._copies: list[list] = []  # [begin, end] of each copy since the last `turn`
        self._blocks: list = []  # when the computation came to each block
        self._last: tuple[list, list] | None = None  # the forward to learn from, once its events have passed

    def allows(self, count: int) -> bool:
        """Whether one more checkpointed input may go when so many of this forward went or stayed already."""
        return self.limit is None or count < self.limit

    def mark(self) -> None:
        """Records that the computation comes to a checkpointed block. It is called on the computation's stream."""
        if self._record is not None:
            self._blocks.append(self._record())

    def begin(self) -> None:
        """Records that a copy begins. It is called on the copy's stream, as `end` is."""
        if self._record is not None:
            self._copies.append([self._record()])

    def end(self) -> None:
        """Records the end of the copy that began last."""
        if self._record is not None:
            self._copies[-1].append(self._record())

    def turn(self) -> None:
        """Ends a forward. Its times are read when its events have passed, without waiting for them."""
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
    """Divides tensors that are equal on tensor-parallel ranks over these ranks, and makes them whole again (ZeRO-R
    P_a, arXiv 1910.02054, section 6.1).

    Args:
        counters (`Counters`): where the bytes sent are added, as "activation".
    """

    def __init__(self, comm: Comm, counters: Counters):
        self._comm = comm
        self._counters = counters
        self._checked: set[int] = set()  # places whose tensors were found equal

    def part_numel(self, numel: int) -> int:
        """Returns how many elements a part has. The last part may be padded."""
        return -(-numel // self._comm.num_ranks)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a 1-D tensor, a view unless it has to be padded."""
        numel = self.part_numel(whole.numel())
        part = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def whole_of(self, part: Tensor, numel: int) -> Tensor:
        """Returns a whole tensor of `numel` elements from the parts of all ranks, which call it in the same order."""
        whole = part.new_empty(part.numel() * self._comm.num_ranks)
        own = whole[self._comm.rank * part.numel() : (self._comm.rank + 1) * part.numel()].copy_(part)
        self._comm.all_gather(whole, own, what="checkpointed input").wait()
        sent = part.numel() * part.element_size() * (self._comm.num_ranks - 1)
        self._counters.add("activation", sent)
        return whole[:numel]

    def check(self, whole: Tensor, place: int) -> None:
        """Checks that all ranks have the same bits, the first time that it is called for a place. Raises
        [`UnsupportedError`] when they have not, on all ranks."""
        if place in self._checked:
            return
        bits = Sample([(0, whole.numel())], whole.device).sum_of(whole)
        own = torch.stack([torch.full_like(bits, whole.numel()), bits])
        if len(self._comm.all_gather_vector(own).unique(dim=0)) > 1:
            raise UnsupportedError(
                "partition_activations: the inputs of a checkpointed block differ between tensor-parallel ranks, "
                "which were expected to have the same (other batches, or sequence parallelism); give the ranks of a "
                "tensor-parallel group the same batch, or use offload_activations"
            )
        self._checked.add(place)
