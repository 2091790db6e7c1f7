"""Gradients of one flat buffer. They are collected as autograd computes them, and reduced to this rank's range."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.comm import Comm, Pending
from hf_zero.config import MemoryTier, Residency
from hf_zero.engine.flat import Flat
from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import align
from hf_zero.sharding.slots import ALIGN_NBYTES, Slot


# Smaller gradients are copied together when their unit is reduced. Larger ones are copied and freed at once.
MAX_HELD_NUMEL = 2**16


class Gradient:
    """The gradient of one flat buffer between two optimizer steps.

    Autograd's gradients are collected in `full`. `average_ranks` averages them over the ranks (see `averaging`), with
    sums in `sum_dtype`. The average of the range that the optimizer updates is stored in `reduced`, in `dtype`: in the
    same memory (`is_in_place`), in separate device memory, or on the host (`is_on_host`).
    """

    full: Tensor | None = None  # this rank's unreduced gradient; None while it has no slot (sharded gradients only)
    local_sum: Tensor | None = None  # of the gradients of earlier backwards, in `sum_dtype`; see `sum_locally`
    reduced: Tensor | None = None  # None before the first average
    is_reduced_once: bool  # once per step, after the last micro-batch, if accumulating in `full` loses no precision
    row_norms: list[Tensor] | None = None  # of the owned range, from the last norm; None if not computed

    def __init__(self, flat: Flat, average_ranks: Callable[..., Pending], memory: "AverageMemory"):
        placement = flat.placement
        self.flat = flat
        self.sum_dtype = placement.sum_dtype
        self.dtype = placement.grad_dtype
        self.is_in_place = placement.is_averaged_in_place
        self.is_on_host = placement.average_at is MemoryTier.HOST
        self._average_ranks = average_ranks
        self._memory = memory
        self.views: list[Tensor] = []
        self.is_reduced_once = placement.collects_whole and flat.dtype is self.dtype
        self.is_spent = False  # the optimizer has already used it
        self.is_reduced = False  # `reduced` holds a gradient of this step
        self.filled = [False] * len(flat.params)  # `full` holds a gradient of this parameter
        self.used = [False] * len(flat.params)  # this parameter got a gradient since the last step
        self._zeroed = [False] * len(flat.params)  # it would have a gradient of zeros in torch, see `clear`
        self._keeps_zeros = False
        self._pads = list(flat.layout.pads())
        self._destinations: list[Tensor] = []  # destinations of the small gradients in `_grads`
        self._grads: list[Tensor] = []

    @property
    def is_due_at_step(self) -> bool:
        """Whether the step must reduce it: no backward has, or gradients are summed locally."""
        return self.local_sum is not None or (self.is_reduced_once and not self.is_reduced)

    def lend(self, full: Tensor) -> None:
        """Sets the memory in which gradients are collected. It is overwritten."""
        self.full, self.views = full, self.flat.layout.views(full)

    def destination(self, index: int) -> tuple[Tensor, bool]:
        """Returns the memory for one parameter's gradient, and whether the gradient must be added to values that are
        already there. Raises [`LifecycleError`] if the gradients of this step are final: reduced once per step, or
        already used by the optimizer."""
        if self.is_spent or (self.is_reduced_once and self.is_reduced):
            raise LifecycleError(
                f"{self.flat.infos[index].name}: a backward came after the gradients were clipped, or averaged or "
                "applied during an earlier backward, and before the optimizer step; call optimizer.step() first, or "
                "run this backward before the last one, or use stage 2 or 3 without in_backward; after a backward "
                "that raised, call zero_grad() first, on all ranks"
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
        """Sets the average to zero, because its gradients were dropped or zeroed. Nothing is exchanged."""
        if self.reduced is None:
            self.reduced = self._make_reduced(self.full)
        if self.is_on_host:  # after pending copies
            zeros = torch.zeros(self.reduced.shape, dtype=self.dtype, device=self.flat.comm.device)
            self.flat.masters.transfer.down(self.reduced, zeros, accumulate=False)
        else:
            self.reduced.zero_()
        self.is_reduced, self.row_norms = True, None

    def flush(self) -> None:
        """Copies all small gradients to their destinations."""
        if self._destinations:
            torch._foreach_copy_(self._destinations, self._grads)
            self._destinations, self._grads = [], []

    def sum_locally(self) -> None:
        """Adds the collected gradients to `local_sum` instead of reducing them. A parameter without a gradient counts
        as zero."""
        self._complete()
        if self.local_sum is None:
            self.local_sum = self.full.to(self.sum_dtype, copy=True)
        else:
            self.local_sum.add_(self.full)

    def _complete(self) -> None:
        """Fills `full` with zeros where there is no gradient."""
        self.flush()
        for start, stop in self._pads:  # each time, because clipping by a nonfinite norm changes the padding too
            self.full[start:stop].zero_()
        for index, filled in enumerate(self.filled):
            if not filled:
                self.views[index].zero_()
            self.filled[index] = False

    def reduce(self, what: str) -> Pending:
        """Averages the collected gradients over the ranks, into `reduced`, together with those in `local_sum`. A
        parameter without a gradient counts as zero."""
        if self.local_sum is not None:
            self.sum_locally()
            full, self.local_sum = self.local_sum, None
        else:
            self._complete()
            full = self.full
        if not self.flat.placement.collects_whole:
            self.full, self.views = None, []
        adds, self.is_reduced, self.row_norms = self.is_reduced, True, None
        if self.reduced is None:
            self.reduced = self._make_reduced(full)
        if self.is_on_host:
            return self._average_on_host(full, adds, what)
        return self._average(full, self.reduced, adds, what)

    def leaves_at_once(self, adds: bool) -> bool:
        """Whether `reduce` itself issues the copy of the average to its storage. Otherwise the `wait` on the reduction
        does. `adds`: whether the average is added to an earlier one of this step; it then passes through staging
        memory, and the host may have to wait for that memory."""
        return self.flat.comm.num_ranks == 1 or (self.is_on_host and self.flat.comm.runs_ahead and not adds)

    def _make_reduced(self, full: Tensor) -> Tensor:
        """Returns memory for the average of the gradients in `full`."""
        masters = self.flat.masters
        if self.is_in_place:
            return full[slice(*masters.covers)]
        if not self.is_on_host:
            return self._memory.take(masters.numel, self.dtype)
        # copies from the device may arrive in the dtype that is stored
        locked = self.dtype is self.flat.dtype or self.flat.comm.num_ranks > 1
        return masters.transfer.bus.empty(masters.numel, self.dtype, locked=locked)

    def _average_on_host(self, full: Tensor, adds: bool, what: str) -> Pending:
        """Averages `full` over the ranks and copies the average to the host."""
        transfer = self.flat.masters.transfer
        if self.flat.comm.num_ranks == 1:  # the buffer is free once the copy is done
            return transfer.down(self.reduced, full, accumulate=adds)
        if self.dtype is self.flat.dtype:
            summed = full[slice(*self.flat.masters.covers)]
        else:
            summed = torch.empty(self.reduced.shape, dtype=self.dtype, device=full.device)
        averaging = self._average(full, summed, False, what)
        if self.leaves_at_once(adds):
            with transfer.bus.on_side_stream("down"):  # only this stream waits for the average
                averaging.wait()
                return transfer.down(self.reduced, summed, accumulate=False)

        def finish():
            averaging.wait()
            transfer.down(self.reduced, summed, accumulate=adds).wait()

        return Pending(finish, once=True)

    def _average(self, full: Tensor, result: Tensor, adds: bool, what: str) -> Pending:
        """Averages `full` over the ranks into `result`: the full buffer if gradients are replicated, else a shard."""
        flat = self.flat
        replicated = flat.placement.gradient is Residency.REPLICATED
        out = result[slice(*flat.owned)] if replicated else result
        pending = self._average_ranks(full, out, dtype=self.sum_dtype, accumulate=adds, what=what)
        if not replicated:
            return pending

        def finish() -> None:
            pending.wait()
            flat.comm.shard_group.all_gather(result, out, what=what).wait()

        return Pending(finish, once=True)  # all ranks wait in the same order

    def owned_range(self) -> Tensor:
        """Returns the averaged gradient of the range that this rank owns."""
        low, high = self.flat.owned
        return self.reduced[low:high] if self.flat.placement.gradient is Residency.REPLICATED else self.reduced

    def own_part(self) -> Tensor:
        """Returns the averaged gradient of this rank's part of the shard."""
        first, (low, high) = self.flat.owned[0], self.flat.part
        return self.owned_range()[low - first : high - first]

    def whole(self, what: str) -> Tensor | None:
        """Returns the averaged gradient of the whole buffer, on every rank; None before the first reduction."""
        if not self.is_reduced or self.flat.placement.gradient is Residency.REPLICATED:
            return self.reduced.to(self.flat.comm.device) if self.is_reduced else None
        whole = torch.empty(self.flat.layout.full_numel, dtype=self.dtype, device=self.flat.comm.device)
        own = whole[slice(*self.flat.owned)].copy_(self.reduced)
        self.flat.comm.shard_group.all_gather(whole, own, what=what).wait()
        return whole

    def leave(self, memory: Tensor) -> None:
        """Moves the average out of lent memory, if it is stored there."""
        if self.reduced is not None and self.reduced.untyped_storage()._cdata == memory.untyped_storage()._cdata:
            self.reduced = self.reduced.clone()

    def give_up(self) -> None:
        """Frees all memory."""
        self.full = self.local_sum = self.reduced = None
        self.views = []

    def count_used(self) -> list[bool]:
        """Returns which parameters to update: those with a gradient, and those that would have a gradient of zeros in
        torch."""
        if self._keeps_zeros:
            self.used = [used or zeroed for used, zeroed in zip(self.used, self._zeroed)]
        return self.used

    def clear(self, zeroed: bool | None = None) -> None:
        """Drops the gradients. Device memory of averages is freed, except on CPUs, where fresh memory causes page
        faults, that of replicated gradients. Host memory stays allocated.

        Args:
            zeroed: True: as after torch's `zero_grad(set_to_none=False)`, parameters that had a gradient have one of
                zeros, so weight decay and momentum still update them. False: they have no gradient. None: as in the
                last call that set it.
        """
        self._zeroed = [zeroed is not False and had for had in map(any, zip(self._zeroed, self.used))]
        self._keeps_zeros = self._keeps_zeros if zeroed is None else zeroed
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters have a Python class
            for param in self.flat.params:
                param.grad = None  # from before sharding, or set by hand
        self.is_reduced = self.is_spent = False
        self.local_sum = self.row_norms = None
        self.filled = [False] * len(self.filled)
        self.used = [False] * len(self.used)
        self._destinations, self._grads = [], []
        stays = self.is_in_place or (self.flat.placement.collects_whole and self.flat.comm.is_on_cpu)
        if not (stays or self.is_on_host):
            self.reduced = None


class AverageMemory:
    """Device memory for averages between backward and step: idle slots, else memory that is freed after the step."""

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

    def lend(self, slot: Slot, gradients: list[Gradient]) -> None:
        """Lends an idle slot to the averages of `gradients`, until a unit needs it again."""
        slot.holder = Loan(slot.buffer, gradients, self._loans.remove)
        self._loans.append(slot.holder)


class Loan:
    """The holder of a slot that is lent to averages until a unit needs it again."""

    def __init__(self, memory: Tensor, gradients: list[Gradient], end: Callable[["Loan"], None]):
        self._memory = memory  # 1-D uint8
        self._gradients = gradients
        self._end = end
        self._next = 0  # the first free byte

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns free memory, or `None` if there is too little."""
        start, stop = self._next, self._next + numel * dtype.itemsize
        if stop > self._memory.numel():
            return None
        self._next = align(stop, ALIGN_NBYTES)
        return self._memory[start:stop].view(dtype)

    def evict(self) -> None:
        """Ends the loan. Averages that are still needed move to other memory."""
        self._end(self)
        for gradient in self._gradients:
            gradient.leave(self._memory)


class GradientSlots:
    """The buffers in which units collect gradients during backward.

    `count` buffers (two) are enough if at most two units collect gradients at a time. More are allocated if needed
    (several graphs in one backward). They are freed when backward ends, so that they do not add to the activations of
    the next forward, except memory that other ranks have mapped.
    """

    def __init__(self, nbytes: int, count: int, comm: Comm):
        self.nbytes = nbytes
        self.count = count
        self._comm = comm
        self._free: list[Slot] = []
        self._busy: dict[Slot, Pending | None] = {}  # None while gradients are being collected

    @property
    def slots(self) -> list[Slot]:
        """The allocated buffers."""
        return [*self._free, *self._busy]

    def acquire(self) -> Slot:
        """Returns a buffer for gradients: a free or new one while there are fewer than `count`, else the one whose
        reduction began first."""
        if not self._free and len(self._busy) >= self.count:
            self._wait_for_oldest()
        slot = self._free.pop() if self._free else Slot(self._comm.empty(self.nbytes, torch.uint8))
        self._busy[slot] = None
        return slot

    def reducing(self, slot: Slot, pending: Pending) -> None:
        """Records that a buffer is free when `pending` is done."""
        del self._busy[slot]  # reinserted last: buffers are waited for in the order of reductions, equal on all ranks
        self._busy[slot] = pending

    def release(self, slot: Slot) -> None:
        """Marks a buffer as free."""
        del self._busy[slot]
        self._free.append(slot)

    def wait_for_all(self) -> None:
        """Waits for all pending reductions and frees the buffers."""
        while self._wait_for_oldest():
            pass
        if self._comm.shared_memory is None:
            self._free.clear()

    def _wait_for_oldest(self) -> bool:
        """Waits for the oldest pending reduction. Returns False if there is none."""
        for slot, pending in self._busy.items():
            if pending is not None:
                pending.wait()
                self.release(slot)
                return True
        return False
