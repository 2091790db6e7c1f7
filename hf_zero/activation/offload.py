"""Activations on the host from forward to backward, through hooks on the tensors that autograd saves.

Of a checkpointed block these are its inputs (ZeRO, arXiv 1910.02054, section 6.1), of another block all that its
forward saves. A storage is moved as a whole, and once, however many tensors of it are saved. Parameters stay where
they are, and so does what a block is given without gradients, such as masks, and what earlier blocks were given.

A stream copies to the host, another one back. Backward asks for a block's tensors, and those of the block before it
are then on their way.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.activation.checkpointing import FLAG, put_around, take_off
from hf_zero.activation.installed import Installed
from hf_zero.activation.partition import Division
from hf_zero.comm import Bus
from hf_zero.engine.away import in_backward
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.patch import ForwardGuard, Patch, Uncopyable
from hf_zero.errors import LifecycleError


# Smaller storages of blocks that are not checkpointed stay on the device: copying one takes longer than its bytes.
MIN_NBYTES = 2**20
# Copies to the host that may be under way. Before the next begins, the computation waits for the oldest.
MAX_FLIGHTS = 2


class Offload(Installed):
    """Moves what autograd saves in a model's blocks to a store, until it is removed. Blocks inside of other hooks on
    saved tensors are left to these."""

    def __init__(self, engine: ZeroEngine, store: "Store"):
        super().__init__(engine)
        self.store = store
        self._device = engine.comm.device
        others = [unit for unit in engine.units if unit not in engine.modules]
        self._around = [param for unit in others for flat in unit.flats for param in flat.params]
        self._saved: dict[int, tuple[StorageWeakRef, ReferenceType[Saved]]] = {}
        self._given: dict[int, StorageWeakRef] = {}  # what the blocks of this forward were given so far
        self._staying: set[int] = set()  # storages that the block under way leaves where they are
        self._handles.append(engine.model.register_forward_pre_hook(self._begin))
        # what a module's forward calls is made ready before it: the model may be entered anywhere
        self._checkpointed = [module for module in engine.model.modules() if hasattr(module, FLAG)]
        for module in self._checkpointed:
            within = [each for each in module.modules() if hasattr(each, FLAG)]
            self._handles.append(module.register_forward_pre_hook(partial(self._prepare, within)))
        if engine.config.partition_activations:  # which divides the inputs of checkpointed blocks alone
            return
        for module in engine.modules.values():
            owner = module.forward if isinstance(module.forward, ForwardGuard) else module
            self._handles.append(Patch(owner, "forward", _Saving(self, module, owner.forward)))

    def remove(self) -> None:
        super().remove()
        take_off(self._checkpointed, self._checkpoint)

    def _begin(self, model: nn.Module, _args: tuple) -> None:
        if in_backward():
            return
        self.store.begin_forward()
        self._given.clear()
        self._saved = {key: entry for key, entry in self._saved.items() if not entry[0].expired()}
        is_unused = self._engine.config.partition_activations and model.training and torch.is_grad_enabled()
        if is_unused and not any(getattr(module, FLAG) for module in self._checkpointed):
            raise LifecycleError(
                "partition_activations acts on the inputs of checkpointed blocks, and none is checkpointed; call "
                "model.gradient_checkpointing_enable() before training, or leave it out"
            )

    def _prepare(self, modules: list[nn.Module], *_) -> None:
        put_around(modules, self._checkpoint)

    def _checkpoint(self, function: Callable, block: Callable, *args, **kwargs):
        """Calls a checkpoint function. The tensors that autograd saves meanwhile are the inputs of its block: what is
        computed inside has hooks of its own, or no gradients."""
        return self.call(partial(function, block), [], 0, args, kwargs)

    def call(self, forward: Callable, own: list[Tensor], min_nbytes: int, args: tuple, kwargs: dict) -> Any:
        """Calls what computes a block. `own`: its parameters and buffers, which stay; so do storages of fewer than
        `min_nbytes`."""
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if is_hooked or in_backward() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.store.begin_call()
        self._staying = {_key(tensor) for tensor in [*self._around, *own] if _is_plain(tensor)}
        for tensor in filter(_is_plain, tensors_in(args, kwargs)):
            key = _key(tensor)
            if not tensor.requires_grad or key in self._given:
                self._staying.add(key)
            self._given[key] = StorageWeakRef(tensor.untyped_storage())
        with torch.autograd.graph.saved_tensors_hooks(partial(self.pack, min_nbytes), lambda packed: packed()):
            return forward(*args, **kwargs)

    def pack(self, min_nbytes: int, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns what gives a saved tensor back."""
        version = tensor._version
        is_movable = _is_plain(tensor) and not isinstance(tensor, nn.Parameter) and tensor.device == self._device
        if not is_movable or tensor.untyped_storage().nbytes() < max(1, min_nbytes) or _key(tensor) in self._staying:
            kept = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
            return partial(_unpacked, kept, version, lambda: kept)
        # it follows the counter of the tensor's writes, and keeps none of its memory
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)
        saved = self._save(tensor)
        saved.num_tensors += 1
        lies = tensor.shape, tensor.stride(), tensor.storage_offset()
        return partial(_unpacked, counter, version, partial(self._restored, saved, tensor.dtype, lies))

    def _save(self, tensor: Tensor) -> "Saved":
        storage, key = tensor.untyped_storage(), _key(tensor)
        known, found = self._saved.get(key, (None, None))
        saved = found() if found is not None and known is not None and not known.expired() else None
        if saved is None or saved.version != tensor._version:  # what was written since is other values
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            saved = self.store.save(values, tensor._version)
            self._saved[key] = StorageWeakRef(storage), ref(saved)
        return saved

    def _restored(self, saved: "Saved", dtype: torch.dtype, lies: tuple) -> Tensor:
        return self.store.take(saved).view(dtype).as_strided(*lies)


class _Saving(Uncopyable):
    """The forward of a block that is not checkpointed."""

    def __init__(self, offload: Offload, module: nn.Module, forward: Callable):
        update_wrapper(self, forward)
        self._offload, self._module, self._forward = offload, module, forward

    def __call__(self, *args, **kwargs):
        own = [*self._module.parameters(), *self._module.buffers()]
        return self._offload.call(self._forward, own, MIN_NBYTES, args, kwargs)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than its storage, shape and strides say: none of a subclass, sparse, or one that is
    to be conjugated or negated when it is read."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unpacked(counter: Tensor, version: int, give: Callable[[], Tensor]) -> Tensor:
    """Returns a saved tensor. Refuses one that was written to since, as autograd does without hooks."""
    if counter._version != version:
        raise LifecycleError(
            f"backward: a tensor that it needs was modified by an inplace operation after it was saved (version "
            f"{counter._version}, expected {version}); do not write to what a block has computed with"
        )
    return give()


class Saved:
    """A storage on the device, on the host, or on its way from one to the other, as long as autograd holds it."""

    def __init__(self, store: "Store", call: int, version: int, nbytes: int):
        self.call = call  # the number of the block's call
        self.version = version
        self.nbytes = self.kept_nbytes = nbytes  # the latter may be those of this rank's part
        self.num_tensors = 0  # that were saved of it
        self.num_taken = 0
        self.values: Tensor | None = None  # on the device: before the copy down is made, or from the copy up on
        self.memory: Any = None  # on the host
        self.down: Any = None  # a `Transfer` until `values` may be given up
        self.up: Any = None  # a `Transfer` until `values` may be read
        self._store = store

    @property
    def is_taken(self) -> bool:
        """Whether all its tensors were taken, so that as a rule nobody asks for it again."""
        return self.num_taken > 0 and self.num_taken % self.num_tensors == 0

    def __del__(self):
        for transfer in (self.down, self.up):
            if transfer is not None:
                transfer.wait()  # what the device does from now on may write to that memory
        if self.memory is not None:
            self._store.give(self.memory)


class Store:
    """Storages that forward saves and backward takes, the last ones first.

    Args:
        bus (`Bus`, *optional*): the way to the host; `None` keeps all on the device.
        division (`Division`, *optional*): divides what is replicated over tensor-parallel ranks.
    """

    def __init__(self, bus: Bus | None, division: Division | None):
        self._bus: Any = bus
        self._division = division
        self._free: list[Tensor] = []  # memory on the host, kept from step to step, the smallest first
        self._flights: deque[Saved] = deque()  # on their way to the host, the oldest first
        self.calls: defaultdict[int, WeakSet[Saved]] = defaultdict(WeakSet)  # what each call of a block has saved
        self._num_calls = 0

    def begin_forward(self) -> None:
        """Notes that a model's forward is called."""
        for call in [call for call, saved in self.calls.items() if not saved]:
            del self.calls[call]

    def begin_call(self) -> None:
        """Notes that a block is called in forward."""
        self._num_calls += 1

    def save(self, values: Tensor, version: int) -> Saved:
        """Saves the present values of a storage, 1-D uint8. Autograd is to hold what it returns."""
        saved = Saved(self, self._num_calls, version, values.numel())
        self.calls[saved.call].add(saved)
        saved.values = values if self._division is None else self._division.part_of(values)
        saved.kept_nbytes = saved.values.numel()
        if self._bus is not None:
            self._land(MAX_FLIGHTS - 1)
            saved.memory = self._memory(saved.kept_nbytes)
            saved.down = self._bus.down(saved.memory[: saved.kept_nbytes], saved.values)
            self._flights.append(saved)
            self._land(MAX_FLIGHTS)
        return saved

    def _land(self, max_flights: int) -> None:
        """Frees the memory of what was copied, and waits until at most so many copies are under way."""
        while self._flights and (len(self._flights) > max_flights or self._flights[0].down.is_done()):
            saved = self._flights.popleft()
            saved.down.wait()
            saved.down = saved.values = None

    def take(self, saved: Saved) -> Tensor:
        """Returns the values, 1-D uint8, and begins to copy those of the call before to the device."""
        if saved in self._flights:  # its values are still here
            self._flights.remove(saved)
        for call in (saved.call, saved.call - 1):
            for each in self.calls.get(call, ()):
                if each.values is None and (each is saved or not each.is_taken):
                    self._bring(each)
        self.calls.pop(saved.call + 1, None)
        values = saved.values
        assert values is not None
        if saved.up is not None:
            saved.up.wait()
        saved.num_taken += 1
        if saved.is_taken and saved.up is not None:
            saved.values = saved.up = None  # the caller's; taken once more, it is brought once more
        return values if self._division is None else self._division.whole_of(values, saved.nbytes)

    def _bring(self, saved: Saved) -> None:
        saved.values = torch.empty(saved.kept_nbytes, dtype=torch.uint8, device=self._bus.device)
        saved.up = self._bus.up(saved.values, saved.memory[: saved.kept_nbytes])

    def _memory(self, nbytes: int) -> Tensor:
        """Takes memory on the host. What is too small goes: the sequences have become longer."""
        place = bisect_left(self._free, nbytes, key=Tensor.numel)
        if place < len(self._free) and self._free[place].numel() <= 2 * nbytes:
            return self._free.pop(place)
        if place:
            self._bus.synchronize()  # copies may still use it
            del self._free[place - 1]
        return self._bus.empty(nbytes, torch.uint8)

    def give(self, memory: Tensor) -> None:
        """Takes memory back, which may be used again at once."""
        insort(self._free, memory, key=Tensor.numel)
