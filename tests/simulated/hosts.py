"""Ranks without an accelerator, which share the memory of one host or send messages.

In shared memory, what one rank does is there for another only behind a message between them (`comm.peers`). Each rank
notes its accesses and its messages; from the notes of all, vector clocks tell which accesses nothing orders. Messages
of gloo arrive when they are waited for, and not before.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.comm import peers, shared
from tests.simulated.clocks import Access, History, Race, address_of, byte_ranges, is_plain, place_of_caller


Memory = tuple[int, int]  # the rank that has made it, and its number there


@dataclass
class Notes:
    """What one rank has done, in order.

    Args:
        events (`list`): accesses, each with its memory; `(True, rank)` for a message sent, `(False, rank)` for one
            received.
    """

    events: list[tuple[Memory, Access] | tuple[bool, int]] = field(default_factory=list)


class SharedWatch(TorchDispatchMode):
    """Notes what this rank does in memory that several ranks map."""

    def __init__(self):
        super().__init__()
        self.notes = Notes()
        self.memory: dict[int, Memory] = {}  # by address
        self.nbytes: dict[int, int] = {}  # likewise

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        reads, writes = ([], []) if is_view(function) else operands(function, args, kwargs or {})
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = self.memory.get(address_of(tensor))
                for start, stop in byte_ranges(tensor) if memory is not None else ():
                    self._note(memory, is_written, start, stop, function.__name__.partition(".")[0])
        return result

    def _note(self, memory: Memory, is_written: bool, start: int, stop: int, name: str) -> None:
        access = Access(f"rank {dist.get_rank()}", 0, is_written, start, stop, name, place_of_caller(), "")
        self.notes.events.append((memory, access))

    def _note_read(self, view: memoryview) -> None:
        """Notes that a part of a file is read into memory."""
        start = address_of(torch.frombuffer(view, dtype=torch.uint8))
        for begin, memory in self.memory.items():
            if begin <= start < begin + self.nbytes[begin]:
                self._note(memory, True, start - begin, start - begin + len(view), "a read of a file")

    def _add(self, tensor: Tensor, rank: int, number: int) -> None:
        storage = tensor.untyped_storage()
        self.memory[storage.data_ptr()], self.nbytes[storage.data_ptr()] = (rank, number), storage.nbytes()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Notes what is done inside the context."""
        send, receive, empty = peers.Peer.send, peers.Peer.receive, shared.SharedComm.empty
        read_file = OpenFiles._read

        def noting_send(peer, *args, **kwargs) -> bool:
            is_sent = send(peer, *args, **kwargs)
            if is_sent:
                self.notes.events.append((True, peer.rank))
            return is_sent

        def noting_receive(peer, seconds: float) -> bool:
            is_received = receive(peer, seconds)
            if is_received:
                self.notes.events.append((False, peer.rank))
                for number, each in peer.memory.items():
                    self._add(each, peer.rank, number)
            return is_received

        def noting_empty(comm, *args, **kwargs) -> Tensor:
            made = empty(comm, *args, **kwargs)
            for number, each in comm._own.values():
                self._add(each, dist.get_rank(), number)
            return made

        def noting_read_file(file, name: str, begin: int, view: memoryview) -> None:
            self._note_read(view)
            read_file(file, name, begin, view)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers.Peer, "send", noting_send)
            patch.setattr(peers.Peer, "receive", noting_receive)
            patch.setattr(shared.SharedComm, "empty", noting_empty)
            patch.setattr(OpenFiles, "_read", noting_read_file)
            with self:
                yield


def races_between(notes: list[Notes]) -> list[str]:
    """The accesses of different ranks that no message orders, at least one of which writes."""
    history, at = History(), [0] * len(notes)
    sent: dict[tuple[int, int], list] = {}
    num_received: Counter[tuple[int, int]] = Counter()
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, own in enumerate(notes):
            clock = history.clocks[f"rank {rank}"]
            while at[rank] < len(own.events):
                what, subject = own.events[at[rank]]
                if what is True:
                    sent.setdefault((rank, subject), []).append(dict(clock))
                elif what is False:
                    way = subject, rank
                    if num_received[way] == len(sent.get(way, ())):
                        break  # it is sent by a rank whose turn is to come
                    clock.join(sent[way][num_received[way]])
                    num_received[way] += 1
                else:
                    history.tick(f"rank {rank}")
                    history.replay(f"memory {what[1]} of rank {what[0]}", subject)
                at[rank] += 1
                has_moved = True
    return list(history.races.values())


def is_view(function) -> bool:
    """Whether an operator touches no values."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)


def operands(function, args: tuple, kwargs: dict) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes to."""
    reads, writes = [], []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [each for each in (value if isinstance(value, (list, tuple)) else [value]) if is_plain(each)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(tensors)
    return reads, writes


class LateMessages:
    """Messages between ranks that arrive when they are waited for. What is sent must not change before that.

    Args:
        quietly (`Callable`): a context for what is done here.
    """

    def __init__(self, quietly: Callable = nullcontext):
        self.quietly = quietly
        self.under_way: set[_Message] = set()
        self.overlaps: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Lets messages be late inside the context."""
        with pytest.MonkeyPatch.context() as patch:
            for name, kind in (("irecv", _Arriving), ("isend", _Leaving)):
                patch.setattr(dist, name, self._late(getattr(dist, name), kind))
            make_op = dist.P2POp  # which knows torch's own functions
            patch.setattr(dist, "P2POp", lambda op, *args: make_op(op.__wrapped__, *args))
            yield

    def _late(self, original: Callable, kind: type["_Message"]) -> Callable:
        @wraps(original)
        def begin(tensor: Tensor, *args, **kwargs) -> "_Message":
            with self.quietly():
                message = kind(tensor, self)
                self.look_for_overlaps(message)
            message.work = original(message.copy, *args, **kwargs)
            self.under_way.add(message)
            return message

        return begin

    def complaints(self) -> list[str]:
        """The messages that nobody has waited for."""
        forgotten = [f"the message begun at {message.place} was not waited for" for message in self.under_way]
        return self.overlaps + forgotten

    def look_for_overlaps(self, new: "_Message") -> None:
        """Notes messages under way that arrive in the memory of another."""
        for old in list(self.under_way):  # a thread that saves sends, too
            both = zip(byte_ranges(old.tensor), byte_ranges(new.tensor))
            is_same = address_of(old.tensor) == address_of(new.tensor)
            if is_same and any(a < d and c < b for (a, b), (c, d) in both) and _Arriving in (type(old), type(new)):
                self.overlaps.append(f"messages begun at {old.place} and {new.place} are under way in the same memory")


class _Message:
    work: dist.Work

    def __init__(self, tensor: Tensor, messages: LateMessages):
        self.tensor = tensor
        self.copy = tensor.clone()
        self.place = place_of_caller()
        self._messages = messages

    def wait(self, *timeout) -> bool:
        result = self.work.wait(*timeout)
        self._messages.under_way.discard(self)
        return result


class _Arriving(_Message):
    def __init__(self, tensor: Tensor, messages: LateMessages):
        super().__init__(tensor, messages)
        tensor.view(torch.uint8).fill_(0xFF)

    def wait(self, *timeout) -> bool:
        result = super().wait(*timeout)
        with self._messages.quietly():
            self.tensor.copy_(self.copy)
        return result


class _Leaving(_Message):
    def wait(self, *timeout) -> bool:
        result = super().wait(*timeout)
        with self._messages.quietly():
            same = torch.equal(self.tensor.view(torch.uint8), self.copy.view(torch.uint8))
        if not same:
            raise Race(f"what was sent at {self.place} changed before it had left")
        return result
