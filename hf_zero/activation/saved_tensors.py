"""What autograd saves in blocks that are not checkpointed, sent to the host from forward to backward.

A storage is moved as a whole, and once, however many tensors of it are saved. Parameters stay where they are, and so
does what a block is given without gradients, such as masks, and what several blocks are given.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.activation.installed import Installed
from hf_zero.activation.store import Store, Ticket
from hf_zero.engine.away import in_backward
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.patch import ForwardGuard, Patch, Uncopyable
from hf_zero.errors import LifecycleError


# Smaller storages stay on the device: a copy of one takes longer than its bytes.
MIN_NBYTES = 2**20


class SavedTensors(Installed):
    """Hands what autograd saves in a model's blocks to a store, until it is removed. Blocks inside of a checkpoint, or
    of other hooks on saved tensors, are left to these."""

    def __init__(self, engine: ZeroEngine, store: Store):
        super().__init__(engine)
        self._store = store
        self._device = engine.comm.device
        others = [unit for unit in engine.units if unit not in engine.modules]
        self._around = [param for unit in others for flat in unit.flats for param in flat.params]
        self._moved: dict[int, tuple[StorageWeakRef, ReferenceType[_Moved]]] = {}
        self._given: dict[int, StorageWeakRef] = {}  # what the blocks of this forward were given so far
        self._staying: set[int] = set()  # storages that the block under way leaves where they are
        self._handles.append(engine.model.register_forward_pre_hook(self._begin))
        for module in engine.modules.values():
            owner = module.forward if isinstance(module.forward, ForwardGuard) else module
            self._handles.append(Patch(owner, "forward", _Saving(self, module, owner.forward)))

    def _begin(self, *_) -> None:
        if not in_backward():
            self._given.clear()
            self._moved = {key: entry for key, entry in self._moved.items() if not entry[0].expired()}

    def begin_block(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """Notes what a block is given and holds, before its forward."""
        self._store.begin_call()
        own = [*self._around, *module.parameters(), *module.buffers()]
        self._staying = {_key(tensor) for tensor in own if _is_plain(tensor)}
        for tensor in inputs:
            if not _is_plain(tensor):
                continue
            key = _key(tensor)
            if not tensor.requires_grad or key in self._given:
                self._staying.add(key)
            self._given[key] = StorageWeakRef(tensor.untyped_storage())

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns what brings a saved tensor back."""
        if not self._goes(tensor):
            return staying(tensor)
        moved = self._move(tensor)
        moved.num_tensors += 1
        return coming(tensor, moved.take, tensor.storage_offset())

    def _goes(self, tensor: Tensor) -> bool:
        return (
            _is_plain(tensor)
            and tensor.device == self._device
            and tensor.untyped_storage().nbytes() >= MIN_NBYTES
            and _key(tensor) not in self._staying
        )

    def _move(self, tensor: Tensor) -> "_Moved":
        storage = tensor.untyped_storage()
        key = _key(tensor)
        known, found = self._moved.get(key, (None, None))
        moved = found() if found is not None and known is not None and not known.expired() else None
        if moved is None or moved.version != tensor._version:  # what was written since is other values
            moved = _Moved(self._store, storage, tensor)
            self._moved[key] = StorageWeakRef(storage), ref(moved)
        return moved


class _Moved:
    """A storage that went to the store."""

    def __init__(self, store: Store, storage: torch.UntypedStorage, tensor: Tensor):
        self.version = tensor._version
        self.num_tensors = 0  # that were saved of it
        self._num_taken = 0
        self._store = store
        self._values: Tensor | None = None  # on the device, until all its tensors were taken
        self._ticket: Ticket = store.save(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))

    def take(self) -> Tensor:
        """Returns all bytes, which are brought once for all tensors."""
        values = self._store.take(self._ticket) if self._values is None else self._values
        self._num_taken += 1
        is_last = self._num_taken % self.num_tensors == 0
        self._values = None if is_last else values
        return values


class _Saving(Uncopyable):
    """The forward of a block whose saved tensors go to a store."""

    def __init__(self, saved: SavedTensors, module: nn.Module, forward: Callable):
        update_wrapper(self, forward)
        self._saved, self._module, self._forward = saved, module, forward

    def __call__(self, *args, **kwargs):
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if is_hooked or in_backward() or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self._saved.begin_block(self._module, tensors_in(args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, lambda packed: packed()):
            return self._forward(*args, **kwargs)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than its storage, shape and strides say: none of a subclass, sparse, or one that is
    to be conjugated or negated when it is read."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def staying(tensor: Tensor) -> Callable[[], Tensor]:
    """Returns what gives a saved tensor that stays where it is."""
    return partial(_kept, tensor if isinstance(tensor, nn.Parameter) else tensor.detach(), tensor._version)


def coming(tensor: Tensor, take: Callable[[], Tensor], offset: int) -> Callable[[], Tensor]:
    """Returns what brings a saved tensor back. `take`: gives it, or the memory in which it begins behind `offset`
    elements."""
    # it follows the counter of the tensor's writes, and keeps none of its memory
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    form = tensor.dtype, tensor.shape, tensor.stride()
    return partial(_brought, take, form, offset, counter, tensor._version)


def _kept(tensor: Tensor, version: int) -> Tensor:
    _refuse_written(tensor, version)
    return tensor


def _brought(take: Callable[[], Tensor], form: tuple, offset: int, counter: Tensor, version: int) -> Tensor:
    _refuse_written(counter, version)
    values = take()
    if (values.dtype, values.shape, values.stride()) == form:
        return values
    dtype, *lies = form
    values = values.view(dtype)  # that stayed, they may begin within their storage
    return values.as_strided(*lies, values.storage_offset() + offset)


def _refuse_written(tensor: Tensor, version: int) -> None:
    """Refuses a tensor that was written to since it was saved, as autograd does without hooks."""
    if tensor._version != version:
        raise LifecycleError(
            f"backward: a tensor that it needs was modified by an inplace operation after it was saved (version "
            f"{tensor._version}, expected {version}); do not write to what a block has computed with"
        )
