"""Activations between forward and backward: on the host, partitioned over the tensor-parallel ranks, or both.

Hooks on the tensors that autograd saves see the inputs of a checkpointed block, or else everything that a block saves.
A storage is moved once, even if several tensors or blocks save it. Parameters stay on the device, and so do inputs
that require no gradient, such as masks, which all blocks share.

The hooks are around the forward of each block, and around `_gradient_checkpointing_func`, which transformers' models
call inside or outside of it, and which `gradient_checkpointing_enable` sets at any time. Both implementations of
torch's checkpoint (reentrant or not) save a block's positional tensors through these hooks. Computations inside the
checkpoint have other hooks, or no gradients.
"""

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial, update_wrapper

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.activation.checkpointing import FLAG, put_around, take_off
from hf_zero.activation.partition import Division
from hf_zero.comm import Bus, Transfer
from hf_zero.engine.away import in_backward
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.patch import ForwardGuard, Installed, Patch, Uncopyable
from hf_zero.errors import LifecycleError


# Smaller storages stay on the device: the latency of a copy outweighs their size.
MIN_NBYTES = 2**20
# Maximum number of concurrent copies to the host. Before another one starts, the computation waits for the oldest,
# whose device memory can then be reused.
MAX_FLIGHTS = 2
# Calls of blocks without a backward after which records of freed storages are dropped.
PRUNE_EVERY = 256


class HostMemory:
    """Buffers on the host that are reused in every step (ZeRO-R M_D, arXiv 1910.02054, section 6.3). `bus` allocates
    them; `None` if nothing is moved to the host."""

    def __init__(self, bus: Bus | None):
        self._bus = bus
        self._free: list[tuple[int, Tensor]] = []  # with their sizes; other threads append to it

    def take(self, nbytes: int) -> Tensor:
        """Returns the smallest free buffer that is large enough, 1-D uint8. If there is none, a new one replaces the
        largest."""
        sizes = [size for size, _ in self._free]
        fitting = [size for size in sizes if size >= nbytes]
        if fitting:
            return self._free.pop(sizes.index(min(fitting)))[1]
        assert self._bus is not None
        self._bus.synchronize()  # the buffer that is freed may still be copied
        if sizes:
            del self._free[sizes.index(max(sizes))]
        return self._bus.empty(nbytes, torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Frees a buffer, whose memory may be reused immediately."""
        self._free.append((buffer.numel(), buffer))


class Call:
    """A call of a block in forward. It lives as long as the tensors that it saves.

    Args:
        previous (`Call`, *optional*): The call before it since the last backward.
        staying (`set[int]`): The storages that are not moved.
    """

    def __init__(self, previous: "Call | None", staying: set[int]):
        self.index: int = 0 if previous is None else previous.index + 1
        self.previous = (lambda: None) if previous is None else weakref.ref(previous)
        self.staying = staying
        self.saved: weakref.WeakSet[SavedStorage] = weakref.WeakSet()


class SavedStorage:
    """A storage that autograd keeps between forward and backward. It is freed when autograd releases its tensors.

    Args:
        values (`Tensor`): All bytes of the storage, or this rank's part.
        bus (`Bus`, *optional*): Copies the storage to the host and back. With `None`, it stays on the device.
        memory (`HostMemory`): The memory on the host.
    """

    def __init__(self, values: Tensor, bus: Bus | None, memory: HostMemory):
        self.values: Tensor | None = values  # on the device, also during copies
        self.num_tensors = 0  # saved tensors of this storage
        self._num_restored = 0
        self._bus = bus
        self._memory = memory
        self._up: Transfer | None = None  # until `values` may be read
        self.down: Transfer | None = None  # until `values` is freed
        self._host: Tensor | None = None
        if bus is not None:
            self._buffer = memory.take(values.numel())
            self._host = self._buffer[: values.numel()]
            self.down = bus.down(self._host, values)

    def free_device(self) -> None:
        """Frees the device memory after the copy to the host. The computation issued next may reuse it."""
        if self.down is not None:
            self.down.wait()
            self.down = self.values = None

    def prefetch(self) -> None:
        """Starts to copy the values to the device."""
        if self.values is None:
            assert self._bus is not None
            self.free_device()  # with `retain_graph`, the copy to the host may still be in progress
            self.values = torch.empty_like(self._host, device=self._bus.device)
            self._up = self._bus.up(self.values, self._host)

    def restore(self) -> Tensor:
        """Returns the values, which are copied to the device once for all tensors of the storage."""
        self.prefetch()
        values = self.values
        if self._up is not None:
            self._up.wait()
        self._num_restored += 1
        if self._host is not None and self._num_restored % self.num_tensors == 0:
            self.values = self._up = None  # the caller owns it
        return values

    def __del__(self):
        if self._host is not None:
            for transfer in (self.down, self._up):
                if transfer is not None:
                    transfer.wait()
            self._memory.give(self._buffer)


class Offload(Installed):
    """Moves the tensors that autograd saves in a model's blocks. Skips blocks inside a checkpoint or other
    saved-tensors hooks.

    The tensors of the last block stay on the device, since backward needs them first.

    Args:
        engine (`ZeroEngine`): The model's engine.
        bus (`Bus`, *optional*): Copies to the host and back. `None` keeps everything on the device.
        division (`Division`, *optional*): Partitions the inputs of checkpointed blocks over tensor-parallel ranks.
            Blocks that are not checkpointed are skipped.
    """

    def __init__(self, engine: ZeroEngine, bus: Bus | None, division: Division | None):
        super().__init__(engine)
        self._bus = bus
        self._division = division
        self.memory = HostMemory(self._bus)
        self._flights: deque[weakref.ref[SavedStorage]] = deque()  # copies to the host in flight, oldest first
        # by storage, with the version counter of its tensors
        self._saved: dict[int, tuple[StorageWeakRef, int, weakref.ref[SavedStorage]]] = {}
        self._call: Call | None = None  # the last one since the last backward
        self._last = -1  # index of the last call before the last backward
        self._checkpointing = [module for module in engine.model.modules() if hasattr(module, FLAG)]
        for module in engine.model.modules():
            if inner := [each for each in module.modules() if hasattr(each, FLAG)]:
                self._handles.append(module.register_forward_pre_hook(partial(self._wrap_checkpoint_functions, inner)))
        for module in engine.modules.values() if division is None else ():
            owner = module.forward if isinstance(module.forward, ForwardGuard) else module
            self._handles.append(Patch(owner, "forward", _Saving(self, module, owner.forward)))

    def remove(self) -> None:
        super().remove()
        take_off(self._checkpointing, self._checkpointed)

    def _wrap_checkpoint_functions(self, modules: list[nn.Module], *_) -> None:
        if not in_backward():
            put_around(modules, self._checkpointed)

    def _checkpointed(self, function: Callable, block: Callable, *args, **kwargs):
        """Calls a checkpoint function, which saves the inputs of the block."""
        return self.run(partial(function, block), [], *args, **kwargs)

    def run(self, function: Callable, own: list[Tensor], *args, **kwargs):
        """Calls a function and moves the tensors that it saves, except `own`."""
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if is_hooked or in_backward() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        inputs = [tensor for tensor in tensors_in(args, kwargs) if not tensor.requires_grad]
        staying = {_key(tensor) for tensor in (*own, *inputs) if _is_plain(tensor)}
        if self._call is None or self._call.index % PRUNE_EVERY == PRUNE_EVERY - 1:
            self._saved = {key: entry for key, entry in self._saved.items() if not entry[0].expired()}
        self._call = Call(self._call, staying)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, self._call), lambda packed: packed()):
            return function(*args, **kwargs)

    def _pack(self, call: Call, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns a function that restores a saved tensor."""
        if not self._goes(call, tensor):
            return partial(_kept, tensor if isinstance(tensor, nn.Parameter) else tensor.detach(), tensor._version)
        saved = self._storage_of(call, tensor)
        saved.num_tensors += 1
        # shares the tensor's version counter without keeping its memory
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)
        form = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        numel = tensor.untyped_storage().nbytes()
        return partial(self._restore, call, saved, numel, form, counter, tensor._version)

    def _goes(self, call: Call, tensor: Tensor) -> bool:
        return (
            _is_plain(tensor)
            and tensor.device == self._engine.comm.device
            and (self._division is not None or tensor.untyped_storage().nbytes() >= MIN_NBYTES)
            and _key(tensor) not in call.staying
        )

    def _storage_of(self, call: Call, tensor: Tensor) -> SavedStorage:
        storage, key = tensor.untyped_storage(), _key(tensor)
        known, version, found = self._saved.get(key, (None, None, lambda: None))
        saved = None if known is None or known.expired() or version != tensor._version else found()
        if saved is not None:
            return saved
        values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        bus = None if call.index == self._last else self._bus
        if self._division is not None:
            self._division.check(values, call.index % max(1, len(self._engine.blocks)))
            values = self._division.part_of(values)
            values = values if bus is not None else values.clone()  # a view would keep the full tensor
        self._free_copied(MAX_FLIGHTS - 1)
        saved = SavedStorage(values, bus, self.memory)
        self._flights.append(weakref.ref(saved))
        self._free_copied(MAX_FLIGHTS)
        call.saved.add(saved)
        self._saved[key] = StorageWeakRef(storage), tensor._version, weakref.ref(saved)
        return saved

    def _free_copied(self, max_flights: int) -> None:
        """Frees copied tensors, and waits until at most `max_flights` copies are in flight."""
        while self._flights:
            saved = self._flights[0]()
            is_done = saved is None or saved.down is None or saved.down.is_done()
            if not is_done and len(self._flights) <= max_flights:
                return
            self._flights.popleft()
            if saved is not None:
                saved.free_device()

    def _restore(
        self, call: Call, saved: SavedStorage, numel: int, form: tuple, counter: Tensor, version: int
    ) -> Tensor:
        _refuse_written(counter, version)
        if self._call is not None:
            self._last, self._call = self._call.index, None
        previous = call.previous()
        for ahead in () if previous is None else previous.saved:
            ahead.prefetch()
        values = saved.restore()
        if self._division is not None:
            values = self._division.whole_of(values, numel)
        dtype, *lies = form
        return values.view(dtype).as_strided(*lies)


class _Saving(Uncopyable):
    """The forward of a block with offload of its saved tensors."""

    def __init__(self, offload: Offload, module: nn.Module, forward: Callable):
        update_wrapper(self, forward)
        self._offload, self._module, self._forward = offload, module, forward

    def __call__(self, *args, **kwargs):
        own = [*self._module.parameters(), *self._module.buffers()]
        return self._offload.run(self._forward, own, *args, **kwargs)


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether storage, shape and strides describe a tensor completely: no subclass, sparse layout, or lazy
    conjugation or negation."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _kept(tensor: Tensor, version: int) -> Tensor:
    _refuse_written(tensor, version)
    return tensor


def _refuse_written(tensor: Tensor, version: int) -> None:
    """Raises if a tensor was modified after it was saved, like autograd without hooks."""
    if tensor._version != version:
        raise LifecycleError(
            f"backward: a saved tensor was modified by an inplace operation (version {tensor._version}, expected "
            f"{version}); do not write to tensors that a block has used"
        )
