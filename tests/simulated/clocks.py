"""What happened before what: vector clocks of host threads and streams, over ranges of bytes.

Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978); Mattern, "Virtual time and global
states of distributed systems" (1989). Two accesses to the same bytes, one of which writes, are a race unless one is
ordered before the other. Whether they are does not depend on how fast anything runs, so one run finds what any
interleaving could show.
"""

import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


MAX_ROWS = 256  # of a strided tensor so many runs of bytes are told apart; of more, the whole stretch counts
_PACKAGE = str(Path(__file__).parents[2] / "hf_zero")


class Clock(dict[str, int]):
    """How much of each actor's work is known to be done: a number of operations by the actor's name."""

    def join(self, other: "Clock") -> None:
        """Learns what another clock knows."""
        for actor, tick in other.items():
            if tick > self.get(actor, 0):
                self[actor] = tick


@dataclass(frozen=True)
class Access:
    """One operation's access to bytes [start, stop) of a storage."""

    actor: str
    tick: int
    writes: bool
    start: int
    stop: int
    operation: str
    place: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.actor} {verb} [{self.start}, {self.stop}) in {self.operation} at {self.place}"


@dataclass
class _Storage:
    """A storage that is alive, and who may still be using it."""

    weak: StorageWeakRef
    home: str  # whose memory it is: what is freed is this actor's at once
    accesses: list[Access]


class History:
    """All accesses that could still be part of a race, and the races that were found.

    Attributes:
        races (`dict[tuple[str, str], str]`): what was found, by the places of the two operations.
    """

    def __init__(self):
        self.clocks: defaultdict[str, Clock] = defaultdict(Clock)
        self.races: dict[tuple[str, str], str] = {}
        self._storages: dict[int, _Storage] = {}  # by address
        self.lock = threading.RLock()

    def tick(self, actor: str) -> None:
        """Notes that an actor does one more thing."""
        self.clocks[actor][actor] = self.clocks[actor].get(actor, 0) + 1

    def allocate(self, tensor: Tensor, home: str) -> None:
        """Notes new memory.

        Args:
            tensor (`Tensor`): that has it.
            home (`str`): the actor in whose order it goes to somebody else when it is freed.
        """
        address = address_of(tensor)
        if address:
            self._storages[address] = _Storage(StorageWeakRef(tensor.untyped_storage()), home, [])

    def learn(self, actor: str, tensor: Tensor) -> None:
        """Lets an actor know all that was done with a tensor."""
        storage = self._storages.get(address_of(tensor))
        for each in storage.accesses if storage is not None else ():
            self.clocks[actor].join(Clock({each.actor: each.tick}))

    def access(self, actor: str, tensor: Tensor, writes: bool, operation: str) -> None:
        """Notes an access, and looks for those that are not ordered before it."""
        address = address_of(tensor)
        if not address:
            return
        storage = self._storages.get(address)
        if storage is None:
            self.allocate(tensor, actor)
            storage = self._storages[address]
        clock, place = self.clocks[actor], place_of_caller()
        for start, stop in byte_ranges(tensor):
            new = Access(actor, clock.get(actor, 0), writes, start, stop, operation, place)
            kept = []
            for old in storage.accesses:
                is_known = old.actor == actor or clock.get(old.actor, 0) >= old.tick
                if not is_known and (writes or old.writes) and old.start < stop and start < old.stop:
                    self.races.setdefault((old.place, place), f"{old}; unordered: {new}")
                if not (is_known and start <= old.start and old.stop <= stop and (writes or not old.writes)):
                    kept.append(old)
            storage.accesses = [*kept, new]

    def look_for_freed(self) -> None:
        """Forgets storages that were freed. Their memory is for whoever asks next, in the order of their home."""
        with self.lock:
            gone = [(address, storage) for address, storage in self._storages.items() if storage.weak.expired()]
            for address, storage in gone:
                del self._storages[address]
                clock = self.clocks[storage.home]
                for old in storage.accesses:
                    if old.actor != storage.home and clock.get(old.actor, 0) < old.tick:
                        freed = f"{storage.home} frees the memory at {place_of_caller()}"
                        self.races.setdefault((old.place, "freed"), f"{old}; unordered: {freed}")


def address_of(tensor: Tensor) -> int:
    """Where the memory of a tensor's storage begins, 0 for none. Unlike `data_ptr`, this leaves a lazy copy lazy."""
    return torch._C._data_address(tensor) if tensor.numel() else 0


def byte_ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """The runs of bytes [start, stop) of its storage in which the elements of a tensor lie."""
    if not tensor.numel() or any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())):
        return []  # placeholders show one element many times
    itemsize, run, outer = tensor.element_size(), 1, []
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda axis: axis[1]):
        if size > 1 and stride == run and not outer:
            run *= size
        elif size > 1:
            outer.append((size, stride))
    first, num_rows = tensor.storage_offset(), 1
    for size, _ in outer:
        num_rows *= size
    if num_rows > MAX_ROWS:
        last = first + sum((size - 1) * stride for size, stride in outer) + run
        return [(first * itemsize, last * itemsize)]
    starts = [first]
    for size, stride in outer:
        starts = [start + index * stride for start in starts for index in range(size)]
    return [(start * itemsize, (start + run) * itemsize) for start in starts]


def place_of_caller() -> str:
    """The innermost line of the package on the stack, or where else the operation comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return f"{name[len(_PACKAGE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside of the package"


def host_thread() -> str:
    """The name of this thread as an actor."""
    return f"host thread {threading.current_thread().name}"


def is_plain(tensor: object) -> bool:
    """Whether an object is a tensor with memory of the CPU."""
    return isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided
