"""An accelerator on CPU tensors, and the worst that its semantics allow.

It stands where `torch.get_device_module` gives the streams and events of a device. What is issued on a stream is done
at once, but it counts as done only for those who are ordered behind it: by an event, by `wait_stream`, by a
`synchronize`. Everything else is a race (`clocks`). The default stream is late too, as the host sees it. Each
communicator is a stream of its own. Memory of the device is freed in the order of the stream that first used it, as
that of a caching allocator is, and memory of the host in the order of the host's thread.

Where the semantics leave a choice (whether a copy has been made by the time that the host asks), a seed makes it.

What it cannot see: reads by other libraries of memory that no operator touches, and how long anything takes.
"""

import concurrent.futures
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero import storage
from hf_zero.activation import offload
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.comm import Comm, bus, distributed
from hf_zero.comm.groups import Average, groups_of
from hf_zero.engine import build, shard
from hf_zero.engine.engine import BackwardPass, ZeroEngine
from hf_zero.engine.unit import Unit
from tests.simulated.clocks import Clock, History, address_of, host_thread, is_plain, place_of_caller
from tests.simulated.hosts import LateMessages, is_view, operands


HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
TIMEOUT_SECONDS = 60.0
# Small, so that buffers are filled again and again.
BUCKET_NBYTES = 4096
PIECE_NBYTES, NUM_PIECES = 1024, 2
# Operators that make views, or memory, and touch no values; and those that may go between device and host.
NO_ACCESS = {"detach", "alias", "lift_fresh", "_unsafe_view"}
ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
COPIES = {"copy_", "_to_copy", "clone"}
# Operators whose result the host reads: it waits for the stream.
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}


class Stream:
    """A queue of the device. What is in it is done for those who wait for it."""

    _count = 0

    def __init__(self, accelerator: "Accelerator", name: str | None = None):
        Stream._count += 1
        self.name = name or f"stream {Stream._count}"
        self._clocks = accelerator.history.clocks
        self._accelerator = accelerator

    @property
    def clock(self) -> Clock:
        return self._clocks[self.name]

    def wait_stream(self, other: "Stream") -> None:
        self._accelerator.history.look_for_freed()
        self.clock.join(other.clock)

    def synchronize(self) -> None:
        self._accelerator.let_host_wait(self.clock)


class Event:
    """A place in a stream."""

    def __init__(self, accelerator: "Accelerator", **_):
        self._accelerator = accelerator
        self.clock = Clock()
        self._is_recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self._is_recorded = True
        self.clock = Clock((stream or self._accelerator.current_stream()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        self._accelerator.history.look_for_freed()
        (stream or self._accelerator.current_stream()).clock.join(self.clock)

    def synchronize(self) -> None:
        self._accelerator.let_host_wait(self.clock)

    def query(self) -> bool:
        is_done = not self._is_recorded or self._accelerator.random.random() < 0.5
        if is_done:
            self._accelerator.let_host_know(self.clock)
        return is_done


class Accelerator:
    """The device of one rank.

    Args:
        seed (`int`): of the choices that the semantics leave.

    Attributes:
        history (`History`): who touched what, and what is a race.
        host_waits (`Counter`): how often the host waited for the device, by place.
        collectives (`list`): the name of the communicator, what was done and bytes, in the order of the launches.
    """

    def __init__(self, seed: int = 0):
        self.random = random.Random(seed)
        self.history = History()
        self.messages = LateMessages(_paused)
        self.host_waits: Counter[str] = Counter()
        self.collectives: list[tuple[str, str, int]] = []
        self._host_memory: dict[int, StorageWeakRef] = {}  # by address, what is the host's
        self._local = threading.local()
        self._default = Stream(self, "default stream")
        self.module = SimpleNamespace(
            Stream=lambda *_, **__: Stream(self),
            Event=lambda *_, **settings: Event(self, **settings),
            current_stream=lambda *_: self.current_stream(),
            default_stream=lambda *_: self._default,
            stream=self.on_stream,
            synchronize=lambda *_: self._default.synchronize(),
            set_device=lambda *_: None,
            is_available=lambda: False,  # torch 2.14 asks every device module; no real accelerator is here
        )

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def let_host_wait(self, clock: Clock) -> None:
        """Lets this thread of the host wait for all that a clock knows. It does not wait if it knows that already."""
        with self.history.lock:
            known = self.history.clocks[host_thread()]
            if any(tick > known.get(actor, 0) for actor, tick in clock.items()):
                self.host_waits[place_of_caller()] += 1
            self.let_host_know(clock)

    def let_host_know(self, clock: Clock) -> None:
        """Lets this thread of the host know all that a clock knows."""
        with self.history.lock:
            self.history.look_for_freed()
            self.history.clocks[host_thread()].join(clock)

    def look_for_freed(self) -> None:
        """Looks whether what was freed since was used by others, as the current stream's next work would find it."""
        self.issue(self.current_stream().name)
        self.history.look_for_freed()

    def is_on_host(self, tensor: Tensor) -> bool:
        weak = self._host_memory.get(address_of(tensor))
        return weak is not None and not weak.expired()

    def put_on_host(self, tensor: Tensor) -> None:
        """Notes that a tensor's memory is the host's."""
        if tensor.numel():  # all tensors without elements have one address
            self._host_memory[address_of(tensor)] = StorageWeakRef(tensor.untyped_storage())
        self.history.allocate(tensor, host_thread())

    def allocate(self, tensor: Tensor) -> None:
        """Notes memory of the device, whose next user is in the order of the current stream when it is freed."""
        if is_plain(tensor):
            self.history.allocate(tensor, self.current_stream().name)

    def issue(self, actor: str) -> None:
        """Notes that an actor does something. What this thread of the host did, or waited for, comes before it."""
        if actor != host_thread():
            self.history.clocks[actor].join(self.history.clocks[host_thread()])
        self.history.tick(actor)

    def note(self, operation: str, reads: list[Tensor], writes: list[Tensor], non_blocking: bool) -> None:
        """Notes an operator: a kernel of the current stream, or the host's own work where its memory takes part."""
        with self.history.lock:
            stream, on_host = self.current_stream(), [self.is_on_host(each) for each in [*reads, *writes]]
            actor, is_copy = stream.name, operation in COPIES
            if on_host and all(on_host):
                actor = host_thread()
            elif not is_copy and any(each.dim() for each, is_here in zip([*reads, *writes], on_host) if is_here):
                actor = host_thread()  # what has no dimension is a number, which a kernel is launched with
            self.issue(actor)
            if actor == host_thread():  # numbers that a device has computed are waited for
                for each, is_here in zip([*reads, *writes], on_host):
                    if not is_here and each.numel() == 1:
                        self.history.learn(actor, each)
            for each in reads:
                is_number = not is_copy and not each.dim() and self.is_on_host(each)  # copied into the launch
                self.history.access(host_thread() if is_number else actor, each, False, operation)
            for each in writes:
                self.history.access(actor, each, True, operation)
            is_between = is_copy and any(on_host) and not non_blocking
            if (operation in WAITING or is_between) and actor != host_thread():
                self.let_host_wait(stream.clock)

    def collective(self, communicator: str, what: str, do: Callable, reads: list[Tensor], writes: list[Tensor]):
        """Runs a collective on the stream of its communicator, behind what the current stream has."""
        with _paused():
            do()
        with self.history.lock:
            if what != "exchange":  # of messages each rank has its own
                self.collectives.append((communicator, what, sum(each.nbytes for each in reads)))
            self.history.look_for_freed()
            clock = self.history.clocks[communicator]
            if not all(map(self.is_on_host, [*reads, *writes])):
                clock.join(self.current_stream().clock)
            self.issue(communicator)
            for each in reads:
                self.history.access(communicator, each, False, what)
            for each in writes:
                self.history.access(communicator, each, True, what)
            event = Event(self)
            event.clock = Clock(clock)
        return SimpleNamespace(wait=event.wait, event=event, holds=[*reads, *writes])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the accelerator into the place of the CPU's module, and everything that is done under its eyes."""
        with pytest.MonkeyPatch.context() as patch:
            keep_groups(patch)
            patch.setattr(torch, "get_device_module", lambda *_: self.module)
            patch.setattr(build, "connect", self._connect)
            patch.setattr(Comm, "is_on_cpu", property(lambda comm: comm.device == HOST))
            patch.setattr(shard, "NUM_PIECES", NUM_PIECES)
            patch.setattr(shard.HostTransfer.__init__, "__defaults__", (PIECE_NBYTES,))
            patch.setattr(distributed.NativeComm, "_collect", self._gather(distributed.NativeComm._collect))
            patch.setattr(distributed.NativeComm, "_sum", self._reduce(distributed.NativeComm._sum))
            patch.setattr(dist, "batch_isend_irecv", self._exchange(dist.batch_isend_irecv))
            patch.setattr(dist, "broadcast", self._broadcast(dist.broadcast))
            patch.setattr(bus.Bus, "__init__", _named(bus.Bus.__init__))
            patch.setattr(bus.Bus, "empty", self._host_empty(bus.Bus.empty))
            patch.setattr(offload, "MIN_NBYTES", 1)
            patch.setattr(offload.HostMemory, "give", self._give(offload.HostMemory.give))
            patch.setattr(storage.SwapFile, "_do", self._move_file(storage.SwapFile._do))
            patch.setattr(OpenFiles, "_read", self._read_file(OpenFiles._read))
            patch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", self._submit())
            patch.setattr(concurrent.futures.Future, "result", self._result())
            patch.setattr(concurrent.futures.Future, "done", self._done())
            patch.setattr(threading.Thread, "start", self._start())
            patch.setattr(threading.Thread, "join", self._join())
            for name in ("cpu", "tolist", "numpy"):
                patch.setattr(Tensor, name, self._read_by_host(getattr(Tensor, name)))
            for name in ("tensor", "frombuffer", "from_numpy"):
                patch.setattr(torch, name, self._make(getattr(torch, name)))
            patch.setattr(Tensor, "device", property(self._device_of), raising=True)
            patch.setattr(Tensor, "to", self._move(Tensor.to))
            patch.setattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", self._group())
            patch.setattr(Tensor, "record_stream", lambda *where: self._record_stream(*where))
            self._note_turns(patch)
            with self.messages.installed(), Watch(self):
                yield

    def races(self) -> list[str]:
        """What was found."""
        return [*self.history.races.values(), *self.messages.complaints()]

    def _note_turns(self, patch: pytest.MonkeyPatch) -> None:
        """Notes which unit it is for whom something is done, for messages."""
        turn = self.history.turn

        def during(original: Callable) -> Callable:
            @wraps(original)
            def call(unit, *args, **kwargs):
                before, turn.unit = getattr(turn, "unit", ""), unit.name
                try:
                    return original(unit, *args, **kwargs)
                finally:
                    turn.unit = before

            return call

        def from_now_on(original: Callable, is_over: bool = False) -> Callable:
            @wraps(original)
            def call(owner, unit, *args, **kwargs):
                turn.unit = unit.name
                try:
                    return original(owner, unit, *args, **kwargs)
                finally:
                    turn.unit = "" if is_over else unit.name

            return call

        for name, method in vars(Unit).items():
            if isinstance(method, FunctionType) and not name.startswith("_"):
                patch.setattr(Unit, name, during(method))
        patch.setattr(ZeroEngine, "before_block", from_now_on(ZeroEngine.before_block))
        patch.setattr(ZeroEngine, "after_block", from_now_on(ZeroEngine.after_block, is_over=True))
        patch.setattr(BackwardPass, "visit", from_now_on(BackwardPass.visit))

    def _connect(self, device: torch.device, **settings) -> Comm:
        is_alone = dist.get_world_size() == 1
        return Comm(DEVICE, TIMEOUT_SECONDS) if is_alone else connected(distributed.NativeComm, DEVICE, **settings)

    def _gather(self, original: Callable) -> Callable:
        def collect(comm, full: Tensor, shard: Tensor):
            return self.collective(
                "gathers", "all-gather", lambda: original(comm, full, shard).wait(), [shard], [full]
            )

        return collect

    def _reduce(self, original: Callable) -> Callable:
        def reduce(comm, full: Tensor, out: Tensor):
            return self.collective(
                "sums", "reduce-scatter", partial(_finish, original, comm, full, out), [full], [out]
            )

        return reduce

    def _exchange(self, original: Callable) -> Callable:
        def exchange(ops: list[dist.P2POp]) -> list:
            sends = [op.tensor for op in ops if op.op.__name__ == "isend"]
            receives = [op.tensor for op in ops if op.op.__name__ == "irecv"]
            on_host = all(map(self.is_on_host, [*sends, *receives]))

            def do():
                for work in original(ops):
                    work.wait()

            work = self.collective("messages" + on_host * " on the host", "exchange", do, sends, receives)
            if on_host:
                return [SimpleNamespace(wait=lambda: self.let_host_know(work.event.clock))]
            return [work]

        return exchange

    def _broadcast(self, original: Callable) -> Callable:
        """A broadcast, for which the current stream waits, or the host where its memory is sent."""

        def broadcast(tensor: Tensor, *args, **kwargs) -> None:
            written = [] if dist.get_rank() == 0 else [tensor]
            do = partial(original, tensor, *args, **kwargs)
            work = self.collective("gathers", "broadcast", do, [tensor], written)
            self.let_host_know(work.event.clock) if self.is_on_host(tensor) else work.wait()

        return broadcast

    def _host_empty(self, original: Callable) -> Callable:
        @wraps(original)
        def empty(*args, **kwargs):
            with _paused():
                memory = original(*args, **kwargs)
            self.put_on_host(memory)
            return memory

        return empty

    def _give(self, original: Callable) -> Callable:
        """What is given back to the host's memory is overwritten by whoever takes it next: here at once."""

        def give(memory: offload.HostMemory, tensor: Tensor) -> None:
            original(memory, tensor)
            with self.history.lock:
                actor = self.current_stream().name
                self.issue(actor)
                self.history.access(actor, tensor, True, "the next use of what was given back", is_made=False)
            with _paused():
                tensor.view(torch.uint8).fill_(0xFF)

        return give

    def _move_file(self, original: Callable) -> Callable:
        """The disk's reads and writes."""

        def move(file, way: str, view: memoryview, offset: int) -> None:
            original(file, way, view, offset)
            self._note_bytes(view, way == storage.READ, way)
            where = (f"file {id(file)}", host_thread(), offset, offset + len(view))
            self.history.access_named(*where, way == storage.WRITE, way)

        return move

    def _read_file(self, original: Callable) -> Callable:
        def read(file, name: str, begin: int, view: memoryview) -> None:
            self._note_bytes(view, True, "a read of a file")
            original(file, name, begin, view)

        return read

    def _note_bytes(self, view: memoryview, writes: bool, operation: str) -> None:
        with self.history.lock:
            self.issue(host_thread())
            start = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            self.history.access_bytes(host_thread(), start, len(view), writes, operation)

    def _record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.history.record_stream(tensor, stream.name)

    def _submit(self) -> Callable:
        original = concurrent.futures.ThreadPoolExecutor.submit

        def submit(pool, work, /, *args, **kwargs):
            handed_over = _HandedOver(self)
            future = original(pool, handed_over.run, work, *args, **kwargs)
            future.handed_over = handed_over
            return future

        return submit

    def _result(self) -> Callable:
        original = concurrent.futures.Future.result

        def result(future, timeout=None):
            try:
                return original(future, timeout)
            finally:
                if hasattr(future, "handed_over"):
                    future.handed_over.take_back()

        return result

    def _done(self) -> Callable:
        original = concurrent.futures.Future.done

        def done(future) -> bool:
            is_done = original(future)
            if is_done and hasattr(future, "handed_over"):
                future.handed_over.take_back()
            return is_done

        return done

    def _start(self) -> Callable:
        original = threading.Thread.start

        def start(thread):
            if getattr(thread._target, "__module__", None) != "concurrent.futures.thread":
                thread.handed_over = _HandedOver(self)
                thread.run = partial(thread.handed_over.run, thread.run)
            original(thread)

        return start

    def _join(self) -> Callable:
        original = threading.Thread.join

        def join(thread, timeout=None):
            original(thread, timeout)
            if hasattr(thread, "handed_over") and not thread.is_alive():
                thread.handed_over.take_back()

        return join

    def _device_of(self, tensor: Tensor) -> torch.device:
        device = _DEVICE.__get__(tensor)
        return DEVICE if device == HOST and _watching() is self and not self.is_on_host(tensor) else device

    def _make(self, original: Callable) -> Callable:
        def make(*args, **kwargs):
            result = original(*args, **kwargs)
            if _watching() is self and is_plain(result) and kwargs.get("device") in (None, HOST, "cpu"):
                self.put_on_host(result)
            return result

        return make

    def _move(self, original: Callable) -> Callable:
        """Copies between the two memories, which `to` takes for one."""

        def to(tensor: Tensor, *args, **kwargs):
            result = original(tensor, *args, **kwargs)
            target = kwargs.get("device", args[0] if args else None)
            target = target.device if isinstance(target, Tensor) else target
            if _watching() is not self or target not in (HOST, DEVICE) or self._device_of(tensor) == target:
                return result
            if target == HOST:
                return result.cpu()
            with _paused():
                copy = result.clone()
            self.allocate(copy)
            self.note("copy_", [result], [copy], kwargs.get("non_blocking", False))
            return copy

        return to

    def _group(self) -> Callable:
        """Groups tensors by the device that they seem to be on."""
        original = torch.optim.Optimizer._group_tensors_by_device_and_dtype

        def group(lists, with_indices=False):
            groups = original(lists, with_indices)
            return {(of[0][0][0].device, dtype): of for (_, dtype), of in groups.items()}

        return staticmethod(group)

    def _read_by_host(self, original: Callable) -> Callable:
        def read(tensor: Tensor, *args, **kwargs):
            if not is_plain(tensor) or _watching() is not self:
                return original(tensor, *args, **kwargs)
            with self.history.lock:
                is_here = self.is_on_host(tensor)
                actor = host_thread() if is_here else self.current_stream().name
                self.issue(actor)
                self.history.access(actor, tensor, False, original.__name__)
                if not is_here:
                    self.let_host_wait(self.current_stream().clock)
            if is_here or original.__name__ != "cpu":
                return original(tensor, *args, **kwargs)
            with _paused():
                copy = tensor.clone()
            self.put_on_host(copy)
            return copy

        return read


def _named(original: Callable) -> Callable:
    """Lets the streams of a bus tell which way they go."""

    @wraps(original)
    def init(made, *args) -> None:
        original(made, *args)
        for way, stream in made._ways.items():
            stream.name += f" ({way})"

    return init


def _finish(original: Callable, *args) -> None:
    original(*args).wait()


class _HandedOver:
    """Work for another thread, which knows what its giver knew; who waits for it knows what it has done."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._before = Clock(accelerator.history.clocks[host_thread()])
        self._after = Clock()

    def run(self, work: Callable, /, *args, **kwargs):
        clocks, actor = self._accelerator.history.clocks, host_thread()
        self._accelerator.history.look_for_freed()
        clocks[actor].join(self._before)
        with Watch(self._accelerator):
            try:
                return work(*args, **kwargs)
            finally:
                self._after = Clock(clocks[actor])

    def take_back(self) -> None:
        self._accelerator.let_host_know(self._after)


_STATE = threading.local()
_DEVICE = torch._C.TensorBase.device


def _watching() -> Accelerator | None:
    return None if getattr(_STATE, "is_paused", False) else getattr(_STATE, "accelerator", None)


@contextmanager
def _paused() -> Iterator[None]:
    """Around what the simulation itself does."""
    before, _STATE.is_paused = getattr(_STATE, "is_paused", False), True
    try:
        yield
    finally:
        _STATE.is_paused = before


class Watch(TorchDispatchMode):
    """Notes what each operator reads and writes."""

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self._accelerator = accelerator

    def __enter__(self):
        self._before, _STATE.accelerator = getattr(_STATE, "accelerator", None), self._accelerator
        return super().__enter__()

    def __exit__(self, *error):
        _STATE.accelerator = self._before
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.__name__.partition(".")[0]
        if _watching() is None or function.namespace == "c10d" or name in NO_ACCESS:
            return result
        if name in ALLOCATING:
            is_like = name.startswith("new") or name.endswith("like")
            is_here = self._accelerator.is_on_host(args[0]) if is_like else True
            if is_here and kwargs.get("device") in (None, HOST):
                self._accelerator.put_on_host(result)
            else:
                self._accelerator.allocate(result)
            return result
        if is_view(function):
            return result
        reads, writes = operands(function, args, kwargs)
        if is_plain(result) and not reads and not writes and kwargs.get("device") in (None, HOST):
            self._accelerator.put_on_host(result)  # such as `torch.zeros(3)`
            return result
        known = {address_of(each) for each in [*reads, *writes]}
        results = [each for each in (result if isinstance(result, (list, tuple)) else [result]) if is_plain(each)]
        made = [each for each in results if address_of(each) not in known]
        if reads and all(self._accelerator.is_on_host(each) for each in [*reads, *writes]):
            for each in made:
                self._accelerator.put_on_host(each)
        is_copy = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        self._accelerator.note(name, reads, [*writes, *made], bool(is_copy))
        return result


_GROUPS: dict[tuple, dist.ProcessGroup] = {}


def connected(kind: type[Comm], device: torch.device, *, shard_size: int | None = None, **_) -> Comm:
    """All ranks, through collectives of some kind, in shard groups of a size if there is one."""

    def make(group: dist.ProcessGroup) -> Comm:
        if dist.get_world_size(group) == 1:
            return Comm(device, TIMEOUT_SECONDS)
        return kind(group, device, TIMEOUT_SECONDS, BUCKET_NBYTES)

    comm = make(dist.group.WORLD)
    if shard_size is not None:
        parts = [make(group) for group in groups_of(dist.group.WORLD, shard_size, device, TIMEOUT_SECONDS).values()]
        comm.divide(*parts, Average(*parts))
    return comm


def keep_groups(patch: pytest.MonkeyPatch) -> None:
    """Takes for the n-th group of some ranks the n-th that they made in an earlier training: each has threads, and
    making one takes longer than a step."""
    original, num_made = dist.new_group, Counter()

    def new_group(group_ranks, **settings):
        kind = (*group_ranks, str(settings.get("backend")))
        num_made[kind] += 1
        key = (*kind, num_made[kind])
        if key not in _GROUPS:
            _GROUPS[key] = original(group_ranks, **settings)
        return _GROUPS[key]

    patch.setattr(dist, "new_group", new_group)
