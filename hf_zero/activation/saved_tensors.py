"""Offload of the tensors that autograd saves in blocks without checkpointing, from forward to backward.

A storage is moved once, even if several tensors of it are saved. Not offloaded are parameters, inputs that require no
gradient, such as masks, and inputs that several blocks share.
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


# Smaller storages stay on the device: the latency of a copy outweighs its size.
MIN_NBYTES = 2**20


class SavedTensors(Installed):
    """Passes the tensors that autograd saves in a model's blocks to a store. Skips blocks inside a checkpoint or other
    saved-tensors hooks."""

    def __init__(self, engine: ZeroEngine, store: Store):
        super().__init__(engine)
        self._store = store
        self._device = engine.comm.device
        others = [unit for unit in engine.units if unit not in engine.modules]
        self._around = [param for unit in others for flat in unit.flats for param in flat.params]
        self._moved: dict[int, tuple[StorageWeakRef, ReferenceType[_Moved]]] = {}
        self._given: dict[int, StorageWeakRef] = {}  # inputs of the blocks so far in this forward
        self._staying: set[int] = set()  # storages that are not offloaded in the current block
        self._handles.append(engine.model.register_forward_pre_hook(self._begin))
        for module in engine.modules.values():
            owner = module.forward if isinstance(module.forward, ForwardGuard) else module
            self._handles.append(Patch(owner, "forward", _Saving(self, module, owner.forward)))

    def _begin(self, *_) -> None:
        if not in_backward():
            self._given.clear()
            self._moved = {key: entry for key, entry in self._moved.items() if not entry[0].expired()}

    def begin_block(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """Records the inputs, parameters and buffers of a block before its forward."""
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
        """Returns a function that restores a saved tensor."""
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
        if moved is None or moved.version != tensor._version:  # written since: the values differ
            moved = _Moved(self._store, storage, tensor)
            self._moved[key] = StorageWeakRef(storage), ref(moved)
        return moved


class _Moved:
    """A storage in the store."""

    def __init__(self, store: Store, storage: torch.UntypedStorage, tensor: Tensor):
        self.version = tensor._version
        self.num_tensors = 0  # saved tensors of this storage
        self._num_taken = 0
        self._store = store
        self._values: Tensor | None = None  # on the device, until all its tensors are restored
        self._ticket: Ticket = store.save(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))

    def take(self) -> Tensor:
        """Returns all bytes of the storage, which is copied to the device once for all its tensors."""
        values = self._store.take(self._ticket) if self._values is None else self._values
        self._num_taken += 1
        is_last = self._num_taken % self.num_tensors == 0
        self._values = None if is_last else values
        return values


class _Saving(Uncopyable):
    """The forward of a block with offload of its saved tensors."""

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
    """Returns whether storage, shape and strides describe a tensor completely: no subclass, sparse layout, or lazy
    conjugation or negation."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def staying(tensor: Tensor) -> Callable[[], Tensor]:
    """Returns a function that returns a saved tensor that is not offloaded."""
    return partial(_kept, tensor if isinstance(tensor, nn.Parameter) else tensor.detach(), tensor._version)


def coming(tensor: Tensor, take: Callable[[], Tensor], offset: int) -> Callable[[], Tensor]:
    """Returns a function that restores an offloaded tensor.

    Args:
        tensor (`Tensor`): The saved tensor.
        take (`Callable`): Returns the tensor, or memory that contains it.
        offset (`int`): Elements before the tensor in that memory.
    """
    # shares the tensor's version counter without keeping its memory
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
    values = values.view(dtype)  # values that were not copied may start within their storage
    return values.as_strided(*lies, values.storage_offset() + offset)


def _refuse_written(tensor: Tensor, version: int) -> None:
    """Raises if a tensor was modified after it was saved, like autograd without hooks."""
    if tensor._version != version:
        raise LifecycleError(
            f"backward: a saved tensor was modified by an inplace operation (version {tensor._version}, expected "
            f"{version}); do not write to tensors that a block has used"
        )
