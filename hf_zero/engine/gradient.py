"""Gradients of one flat buffer. They are collected whole as autograd produces them, and reduced to this rank's
range."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.comm import Comm, Pending
from hf_zero.comm.blockwise import BLOCK_NUMEL
from hf_zero.config import MemoryTier, Residency, ZeroConfig
from hf_zero.engine.flat import Flat
from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import align
from hf_zero.sharding.slots import ALIGN_NBYTES, Slot


# Smaller gradients are held back, to be copied together when their unit is reduced; larger ones are freed at once.
MAX_HELD_NUMEL = 2**16


class Gradient:
    """The gradient of one flat buffer between two optimizer steps; the classes below say where its average rests.

    It is summed over the ranks in `sum_dtype`, going between them in 8 bits where it `packs`, and rests in `dtype`.
    """

    rests_at = MemoryTier.DEVICE
    full: Tensor | None = None  # this rank's summand; None while no slot is lent (sharded gradients only)
    reduced: Tensor | None = None  # the average, over the range that the optimizer updates; None until there is one
    is_reduced_once: bool  # in each step, after its last micro-batch: no precision is lost by adding up in `full`
    row_norms: list[Tensor] | None = None  # of the owned range, as the last norm was taken; None where none was

    def __init__(self, flat: Flat, memory: "AverageMemory", packs: bool):
        self.flat = flat
        self.packs = packs
        self.sum_dtype = flat.placement.sum_dtype
        self.dtype = flat.placement.grad_dtype
        self._memory = memory
        self.views: list[Tensor] = []
        self.is_reduced_once = flat.placement.collects_whole and flat.dtype is self.dtype
        self.is_spent = False  # the optimizer has taken it already
        self.is_reduced = False  # `reduced` holds a gradient of this step
        self.filled = [False] * len(flat.params)  # `full` holds a gradient of this parameter
        self.used = [False] * len(flat.params)  # it got one since the last step
        self._zeroed = [False] * len(flat.params)  # in torch it would have one, if only of zeros, see `clear`
        self._keeps_zeros = False
        self._pads = list(flat.layout.pads())
        self._destinations: list[Tensor] = []  # where the gradients go that are held back, and these
        self._grads: list[Tensor] = []

    def lend(self, full: Tensor) -> None:
        """Sets the memory in which gradients are collected, which is overwritten."""
        self.full, self.views = full, self.flat.layout.views(full)

    def destination(self, index: int) -> tuple[Tensor, bool]:
        """Returns the memory for one parameter's gradient, and whether it already holds one to which this is added.
        Raises [`LifecycleError`] when the gradients of this step are reduced already and rest where they were
        collected."""
        if self.is_spent or (self.is_reduced_once and self.is_reduced):
            raise LifecycleError(
                f"{self.flat.infos[index].name}: a backward came after the gradients were clipped, or averaged or "
                "applied while they came, and before the optimizer step; step first, or run it before the last one "
                "by loss.backward(), or use stage 2 or 3 and no in_backward; after a backward that raised, call "
                "zero_grad() first, on all ranks"
            )
        is_filled = self.filled[index]
        self.filled[index] = self.used[index] = True
        if is_filled:
            self.flush()
        return self.views[index], is_filled

    def receive(self, index: int, grad: Tensor) -> None:
        """Takes one parameter's gradient: the first is copied, later ones are added."""
        destination, is_filled = self.destination(index)
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        if is_filled:
            destination.add_(grad)
        elif grad.numel() < MAX_HELD_NUMEL and grad.dtype is destination.dtype:
            self._destinations.append(destination)
            self._grads.append(grad)
        else:
            destination.copy_(grad)

    def become_zero(self) -> None:
        """Makes the average zero: no backward has brought a gradient, or all are dropped. Nothing is exchanged."""
        if self.reduced is None:
            self.reduced = self._make_reduced(self.full)
        self._zero_reduced()
        self.is_reduced, self.row_norms = True, None

    def _zero_reduced(self) -> None:
        self.reduced.zero_()

    def flush(self) -> None:
        """Copies the gradients that were held back to be copied at once."""
        if self._destinations:
            torch._foreach_copy_(self._destinations, self._grads)
            self._destinations, self._grads = [], []

    def reduce(self, what: str) -> Pending:
        """Averages the collected gradients over the ranks, into `reduced`. A parameter without a gradient counts as
        zero."""
        full = self.full
        self.flush()
        for start, stop in self._pads:  # each time: clipping by a norm that is not finite reaches the padding too
            full[start:stop].zero_()
        for index, filled in enumerate(self.filled):
            if not filled:
                self.views[index].zero_()
            self.filled[index] = False
        if not self.flat.placement.collects_whole:
            self.full, self.views = None, []
        adds, self.is_reduced, self.row_norms = self.is_reduced, True, None
        if self.reduced is None:
            self.reduced = self._make_reduced(full)
        return self._reduce_into_rest(full, adds, what)

    def leaves_at_once(self, adds: bool) -> bool:
        """Whether an average is on its way to the place where it rests as soon as `reduce` returns, and not only when
        that is waited for. `adds`: there is one of this step already, to which it is added."""
        return self.flat.comm.num_ranks == 1

    def _make_reduced(self, full: Tensor) -> Tensor:
        """Allocates memory for the average of the gradients in `full`."""
        raise NotImplementedError

    def _reduce_into_rest(self, full: Tensor, adds: bool, what: str) -> Pending:
        return self._average(full, self.reduced, adds, what)

    def _average(self, full: Tensor, result: Tensor, adds: bool, what: str) -> Pending:
        """Averages `full` over the ranks into `result`, which is whole where gradients rest whole, else a shard."""
        flat = self.flat
        replicated = flat.placement.gradient is Residency.REPLICATED
        out = result[slice(*flat.owned)] if replicated else result
        pending = flat.comm.average(full, out, dtype=self.sum_dtype, accumulate=adds, what=what, packs=self.packs)
        if not replicated:
            return pending

        def finish() -> None:
            pending.wait()
            flat.comm.shard_group.all_gather(result, out, what=what).wait()

        return Pending(finish, once=True)  # all ranks wait for all in one order

    def owned_range(self) -> Tensor:
        """The averaged gradient of the range that this rank owns."""
        low, high = self.flat.owned
        return self.reduced[low:high] if self.flat.placement.gradient is Residency.REPLICATED else self.reduced

    def own_part(self) -> Tensor:
        """The averaged gradient of the range for which this rank alone is responsible."""
        first, (low, high) = self.flat.owned[0], self.flat.part
        return self.owned_range()[low - first : high - first]

    def whole(self, what: str) -> Tensor | None:
        """The averaged gradient of the whole buffer, on every rank; None before the first reduction."""
        if not self.is_reduced or self.flat.placement.gradient is Residency.REPLICATED:
            return self.reduced.to(self.flat.comm.device) if self.is_reduced else None
        whole = torch.empty(self.flat.layout.full_numel, dtype=self.dtype, device=self.flat.comm.device)
        own = whole[slice(*self.flat.owned)].copy_(self.reduced)
        self.flat.comm.shard_group.all_gather(whole, own, what=what).wait()
        return whole

    def give_up(self) -> None:
        """Frees all memory."""
        self.full = self.reduced = None
        self.views = []

    def count_used(self) -> list[bool]:
        """Returns which parameters are to be updated: those with a gradient, and those that would have one of zeros in
        torch."""
        if self._keeps_zeros:
            self.used = [used or zeroed for used, zeroed in zip(self.used, self._zeroed)]
        return self.used

    def clear(self, zeroed: bool | None = None) -> None:
        """Drops the gradients. Memory of sharded averages on the device is freed; that on the host stays allocated.
        `zeroed`: as torch's `zero_grad(set_to_none=False)` leaves zeros in their place, which optimizers decay and
        move by momentum; `False`: they are as if there had been none; `None`: as before."""
        self._zeroed = [zeroed is not False and had for had in map(any, zip(self._zeroed, self.used))]
        self._keeps_zeros = self._keeps_zeros if zeroed is None else zeroed
        with torch._C.DisableTorchFunctionSubclass():  # parameters whose values are away have a Python class
            for param in self.flat.params:
                param.grad = None  # of before the model was sharded, or put there by hand
        self.is_reduced = self.is_spent = False
        self.row_norms = None
        self.filled = [False] * len(self.filled)
        self.used = [False] * len(self.used)
        self._destinations, self._grads = [], []


class GradientInPlace(Gradient):
    """Gradients whose average overwrites the memory in which they are collected."""

    def _make_reduced(self, full: Tensor) -> Tensor:
        return full[slice(*self.flat.held)]


class GradientApart(Gradient):
    """Gradients whose average rests on the device apart from where they are collected, as a shard or in more
    precision."""

    def _make_reduced(self, full: Tensor) -> Tensor:
        return self._memory.take(self.flat.rest.masters.numel, self.dtype)

    def leave(self, memory: Tensor) -> None:
        """Moves the average out of memory that was lent for a while, if it rests there."""
        if self.reduced is not None and self.reduced.untyped_storage()._cdata == memory.untyped_storage()._cdata:
            self.reduced = self.reduced.clone()

    def clear(self, zeroed: bool | None = None) -> None:
        super().clear(zeroed)
        if not self.flat.placement.collects_whole:
            self.reduced = None


class AverageMemory:
    """Memory of the device for averages, between backward and step: idle slots that are lent to them, else memory
    that is freed after the step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._loans: list[Loan] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns memory, 1-D, with arbitrary contents."""
        for loan in self._loans:
            lent = loan.take(numel, dtype)
            if lent is not None:
                return lent
        return torch.empty(numel, dtype=dtype, device=self._device)

    def lend(self, slot: Slot, gradients: list[GradientApart]) -> None:
        """Lends an idle slot until a unit needs it again. `gradients`: whose averages may take it."""
        slot.holder = Loan(slot.buffer, gradients, self._loans.remove)
        self._loans.append(slot.holder)


class Loan:
    """The holder of a slot whose memory averages take, until a unit needs it again."""

    def __init__(self, memory: Tensor, gradients: list[GradientApart], end: Callable[["Loan"], None]):
        self._memory = memory  # 1-D uint8
        self._gradients = gradients
        self._end = end
        self._next = 0  # the first byte that is not taken

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a part of the memory that is not taken; `None` where it is too small."""
        start, stop = self._next, self._next + numel * dtype.itemsize
        if stop > self._memory.numel():
            return None
        self._next = align(stop, ALIGN_NBYTES)
        return self._memory[start:stop].view(dtype)

    def evict(self) -> None:
        """Ends the loan. Averages that still rest there, since no step has come, move to memory of their own."""
        self._end(self)
        for gradient in self._gradients:
            gradient.leave(self._memory)


class GradientOnHost(Gradient):
    """Gradients whose average is copied to the host's memory and rests there."""

    rests_at = MemoryTier.HOST

    def leaves_at_once(self, adds: bool) -> bool:
        # what is added goes through staging pieces, for which the host may have to wait
        return super().leaves_at_once(adds) or (self.flat.comm.runs_ahead and not adds)

    def _make_reduced(self, full: Tensor) -> Tensor:
        masters = self.flat.rest.masters
        # what comes down may be of the dtype that it rests in
        locked = self.dtype is self.flat.dtype or self.flat.comm.num_ranks > 1
        return masters.transfer.bus.empty(masters.numel, self.dtype, locked=locked)

    def _zero_reduced(self) -> None:
        zeros = torch.zeros(self.reduced.shape, dtype=self.dtype, device=self.flat.comm.device)
        self.flat.rest.masters.transfer.down(self.reduced, zeros, accumulate=False)  # behind what is on its way

    def _reduce_into_rest(self, full: Tensor, adds: bool, what: str) -> Pending:
        transfer = self.flat.rest.masters.transfer
        if self.flat.comm.num_ranks == 1:  # the buffer is free again when the copy is made
            return transfer.down(self.reduced, full, accumulate=adds)
        if self.dtype is self.flat.dtype:
            summed = full[slice(*self.flat.held)]
        else:
            summed = torch.empty(self.reduced.shape, dtype=self.dtype, device=full.device)
        averaging = self._average(full, summed, False, what)
        if self.leaves_at_once(adds):
            with transfer.bus.on_side_stream("down"):  # which waits for the average, as nothing else does
                averaging.wait()
                return transfer.down(self.reduced, summed, accumulate=False)

        def finish():
            averaging.wait()
            transfer.down(self.reduced, summed, accumulate=adds).wait()

        return Pending(finish, once=True)


def gradient_of(flat: Flat, config: ZeroConfig, memory: AverageMemory) -> Gradient:
    """Makes what collects the gradient of a buffer and holds its average."""
    placement = flat.placement
    # where each parameter has scales of its own; what is summed in fp64 goes as it is
    is_rounded = flat.layout.align_to == BLOCK_NUMEL and placement.sum_dtype is torch.float32
    kind: type[Gradient] = GradientApart
    if placement.average_at is not MemoryTier.DEVICE:
        kind = GradientOnHost
    elif placement.is_averaged_in_place:
        kind = GradientInPlace
    return kind(flat, memory, config.packs_reductions and is_rounded)


class GradientSlots:
    """The few buffers in which units collect gradients during backward.

    Two suffice (`count`) when each unit's backward ends before the next but one begins. Where it does not (several
    graphs in one backward), further ones are made. When backward ends they are freed, so that gradients, which grow
    while activations shrink, do not add to these; but not memory that other ranks have mapped.
    """

    def __init__(self, nbytes: int, count: int, comm: Comm):
        self.nbytes = nbytes
        self.count = count
        self._comm = comm
        self._free: list[Slot] = []
        self._busy: dict[Slot, Pending | None] = {}  # None while gradients are being collected

    @property
    def slots(self) -> list[Slot]:
        """The buffers that are allocated now."""
        return [*self._free, *self._busy]

    def acquire(self) -> Slot:
        """Returns a buffer for gradients: a new one while there are too few, then the one whose reduction began
        first."""
        if not self._free and len(self._busy) >= self.count:
            self._wait_for_oldest()
        slot = self._free.pop() if self._free else Slot(self._comm.empty(self.nbytes, torch.uint8))
        self._busy[slot] = None
        return slot

    def reducing(self, slot: Slot, pending: Pending) -> None:
        """Notes that a buffer is free when `pending` is done."""
        del self._busy[slot]  # they are waited for in the order of the reductions, which is the same on all ranks
        self._busy[slot] = pending

    def release(self, slot: Slot) -> None:
        """Takes a buffer back."""
        del self._busy[slot]
        self._free.append(slot)

    def wait_for_all(self) -> None:
        """Waits for all reductions under way, and frees the buffers."""
        while self._wait_for_oldest():
            pass
        if self._comm.shared_memory is None:
            self._free.clear()

    def _wait_for_oldest(self) -> bool:
        """Waits for the oldest reduction under way. Returns False when there is none."""
        for slot, pending in self._busy.items():
            if pending is not None:
                pending.wait()
                self.release(slot)
                return True
        return False
