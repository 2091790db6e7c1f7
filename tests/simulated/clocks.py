"""What happened before what: vector clocks of host threads and streams, over ranges of bytes.

Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978); Mattern, "Virtual time and global
states of distributed systems" (1989). Two accesses to the same bytes, one of which writes, are a race unless one is
ordered before the other. Whether they are does not depend on how fast anything runs, so one run finds what any
interleaving could show.
"""

import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


MAX_ROWS = 256  # of a strided tensor so many runs of bytes are told apart; of more, the whole stretch counts
_PACKAGE = str(Path(__file__).parents[2] / "hf_zero")


class Race(AssertionError):
    """Two accesses that nothing orders, where a training cannot go on."""


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
    unit: str  # whose turn it is, empty between units

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        unit = f" for unit {self.unit!r}" if self.unit else ""
        return f"{self.actor} {verb} bytes [{self.start}, {self.stop}) in {self.operation}{unit} at {self.place}"


@dataclass
class _Storage:
    """A storage that is alive, and who may still be using it."""

    weak: StorageWeakRef | None = None
    nbytes: int = 0
    home: str = ""  # whose memory it is: what is freed is this actor's at once
    accesses: list[Access] = field(default_factory=list)
    waits_for: set[str] = field(
        default_factory=set
    )  # actors whose work so far is done before it is freed (`Tensor.record_stream`)


class History:
    """All accesses that could still be part of a race, and the races that were found.

    Attributes:
        races (`dict[tuple[str, str], str]`): what was found, by the places of the two operations.
    """

    def __init__(self):
        self.clocks: defaultdict[str, Clock] = defaultdict(Clock)
        self.races: dict[tuple[str, str], str] = {}
        self._storages: dict[int, _Storage] = {}  # by address
        self._named: defaultdict[str, _Storage] = defaultdict(_Storage)
        self.lock = threading.RLock()
        self.turn = threading.local()  # its `unit` is that of what a thread does now

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
        with self.lock:
            if address:
                self._storage_at(address)
                storage = tensor.untyped_storage()
                self._storages[address] = _Storage(StorageWeakRef(storage), storage.nbytes(), home)

    def _storage_at(self, address: int) -> _Storage | None:
        storage = self._storages.get(address)
        if storage is not None and storage.weak.expired():
            self._note_freed([address])
            return None
        return storage

    def learn(self, actor: str, tensor: Tensor) -> None:
        """Lets an actor know all that was done with a tensor."""
        self.look_for_freed()
        storage = self._storage_at(address_of(tensor))
        for each in storage.accesses if storage is not None else ():
            self.clocks[actor].join(Clock({each.actor: each.tick}))

    def access(self, actor: str, tensor: Tensor, writes: bool, operation: str, is_made: bool = True) -> None:
        """Notes an access to a tensor, and looks for those that are not ordered before it. One that is not made yet is
        not kept for later ones."""
        address = address_of(tensor)
        if not address:
            return
        if self._storage_at(address) is None:
            self.allocate(tensor, actor)
        storage = self._storages[address]
        before = storage.accesses
        self._note(storage, actor, byte_ranges(tensor), writes, operation)
        if not is_made:
            storage.accesses = before

    def access_bytes(self, actor: str, start: int, nbytes: int, writes: bool, operation: str) -> None:
        """Notes an access that no operator makes, such as a file's, to bytes at an address."""
        with self.lock:
            for address, storage in self._storages.items():
                if address <= start < address + storage.nbytes:
                    first = start - address
                    return self._note(storage, actor, [(first, first + nbytes)], writes, operation)

    def access_named(self, name: str, actor: str, start: int, stop: int, writes: bool, operation: str) -> None:
        """Notes an access to bytes of something else, such as a file."""
        with self.lock:
            self._note(self._named[name], actor, [(start, stop)], writes, operation)

    def _note(
        self, storage: _Storage, actor: str, ranges: list[tuple[int, int]], writes: bool, operation: str
    ) -> None:
        tick, place, unit = self.clocks[actor].get(actor, 0), place_of_caller(), getattr(self.turn, "unit", "")
        for start, stop in ranges:
            self._add(storage, Access(actor, tick, writes, start, stop, operation, place, unit))

    def replay(self, name: str, access: Access) -> None:
        """Notes an access that another process has made, as its actor's last operation."""
        self._add(self._named[name], replace(access, tick=self.clocks[access.actor][access.actor]))

    def _add(self, storage: _Storage, new: Access) -> None:
        clock, kept = self.clocks[new.actor], []
        for old in storage.accesses:
            is_known = old.actor == new.actor or clock.get(old.actor, 0) >= old.tick
            if not is_known and (new.writes or old.writes) and old.start < new.stop and new.start < old.stop:
                self.races.setdefault((old.place, new.place), f"{old}; unordered: {new}")
            is_inside = new.start <= old.start and old.stop <= new.stop
            if not (is_known and is_inside and (new.writes or not old.writes)):
                kept.append(old)
        storage.accesses = [*kept, new]

    def record_stream(self, tensor: Tensor, actor: str) -> None:
        """Notes that a tensor's memory is for others when an actor has done what it had to do until it is freed."""
        storage = self._storages.get(address_of(tensor))
        if storage is not None:
            storage.waits_for.add(actor)

    def look_for_freed(self) -> None:
        """Forgets storages that were freed. It is called before any actor learns what others have done."""
        with self.lock:
            self._note_freed([address for address, storage in self._storages.items() if storage.weak.expired()])

    def _note_freed(self, addresses: list[int]) -> None:
        """Notes that memory is for whoever asks next, in the order of its home."""
        with self.lock:
            for address in addresses:
                storage = self._storages.pop(address)
                clock = self.clocks[storage.home]
                for old in storage.accesses:
                    is_known = old.actor in (storage.home, *storage.waits_for)
                    # threads of the host that use memory hold it
                    is_known |= old.actor.startswith(HOST_THREAD) and storage.home.startswith(HOST_THREAD)
                    if not is_known and clock.get(old.actor, 0) < old.tick:
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


HOST_THREAD = "host thread "


def host_thread() -> str:
    """The name of this thread as an actor."""
    return HOST_THREAD + threading.current_thread().name


def is_plain(tensor: object) -> bool:
    """Whether an object is a tensor with memory of the CPU."""
    return isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided
