"""Gradients of one flat buffer: collected whole as autograd produces them, reduced to this rank's range."""

import torch
from torch import Tensor

from hf_zero.comm import Comm, Pending
from hf_zero.config import Residency
from hf_zero.engine.flat import Flat
from hf_zero.errors import LifecycleError
from hf_zero.shard.slots import Slot


# Smaller gradients are held back, to be copied together when their unit is reduced; larger ones are freed at once.
MAX_HELD_NUMEL = 2**16


class Gradient:
    """The gradient of one flat buffer between two optimizer steps.

    Args:
        flat (`Flat`): the buffer.
        sum_dtype (`torch.dtype`): in which gradients are summed over the ranks; they also rest in it, unless the
            master is of lower precision.
    """

    full: Tensor | None  # this rank's summand; None while no slot is lent (sharded gradients only)
    reduced: Tensor | None  # the average, over the range that the optimizer updates; None until the first reduction
    is_persistent: bool  # `full` stays between backward passes, because it is the resting place of the summand
    rests_where_collected: bool  # `reduced` is (a range of) `full`: reduced once a step, after its last micro-batch

    def __init__(self, flat: Flat, sum_dtype: torch.dtype):
        self.flat = flat
        self.sum_dtype = torch.float64 if flat.dtype is torch.float64 else sum_dtype
        self.dtype = min(self.sum_dtype, flat.master.dtype, key=lambda dtype: dtype.itemsize)
        self.full = None
        self.reduced = None
        self.views: list[Tensor] = []
        self.is_persistent = flat.plan.grad is not Residency.SHARDED
        self.rests_where_collected = self.is_persistent and flat.dtype is self.dtype
        self.is_reduced = False  # `reduced` holds a gradient of this step
        self.filled = [False] * len(flat.params)  # `full` holds a gradient of this parameter
        self.used = [False] * len(flat.params)  # it got one since the last step
        self._pads = list(flat.layout.pads())
        self._places: list[Tensor] = []  # where the gradients go that are held back, and these
        self._grads: list[Tensor] = []

    def lend(self, full: Tensor, views: list[Tensor]) -> None:
        """Gives memory in which gradients are collected, see `views_of`. It is overwritten."""
        self.full, self.views = full, views

    def views_of(self, full: Tensor) -> list[Tensor]:
        """The places of the parameters' gradients in such memory."""
        return [full[place.offset : place.stop].view(place.shape) for place in self.flat.layout.places]

    def place(self, index: int) -> tuple[Tensor, bool]:
        """Where one parameter's gradient goes, and whether there is one already, to which to add. It counts as filled.

        Raises:
            `LifecycleError`: when the gradients of this step are reduced already and rest where they were collected.
        """
        if self.rests_where_collected and self.is_reduced:
            raise LifecycleError(
                f"{self.flat.infos[index].name}: a backward came after the gradients were clipped and before the "
                "optimizer step; step first, or use stage 2 or 3"
            )
        is_filled = self.filled[index]
        self.filled[index] = self.used[index] = True
        if is_filled:
            self.settle()
        return self.views[index], is_filled

    def receive(self, index: int, grad: Tensor) -> None:
        """Takes one parameter's gradient: the first is copied, later ones are added."""
        place, is_filled = self.place(index)
        if is_filled:
            place.add_(grad)
        elif grad.numel() < MAX_HELD_NUMEL and grad.dtype is place.dtype:
            self._places.append(place)
            self._grads.append(grad)
        else:
            place.copy_(grad)

    def settle(self) -> None:
        """Copies the gradients that were held back to be copied at once."""
        if self._places:
            torch._foreach_copy_(self._places, self._grads)
            self._places, self._grads = [], []

    def reduce(self, what: str) -> Pending:
        """Averages what was collected over the ranks, into `reduced`. Where no gradient came, zero counts."""
        full, flat = self.full, self.flat
        self.settle()
        for start, stop in self._pads:  # each time: clipping by a norm that is not finite reaches the padding too
            full[start:stop].zero_()
        for index, filled in enumerate(self.filled):
            if not filled:
                self.views[index].zero_()
            self.filled[index] = False
        low, high = flat.owned
        if self.reduced is None:
            self.reduced = self._make_reduced()
        replicated = flat.plan.grad is Residency.REPLICATED
        out = self.reduced[low:high] if replicated else self.reduced
        pending = flat.comm.reduce(full, out, dtype=self.sum_dtype, accumulate=self.is_reduced, what=what)
        self.is_reduced = True
        if not self.is_persistent:
            self.full, self.views = None, []
        if not replicated:
            return pending
        pending.wait()
        return flat.comm.gather(self.reduced, out, what=what)

    def _make_reduced(self) -> Tensor:
        layout, (low, high) = self.flat.layout, self.flat.owned
        whole = self.flat.plan.grad is Residency.REPLICATED
        if self.rests_where_collected:
            return self.full if whole else self.full[low:high]
        numel = layout.full_numel if whole else layout.shard_numel
        return torch.empty(numel, dtype=self.dtype, device=self.flat.comm.device)

    def owned_range(self) -> Tensor:
        """The averaged gradient of the range that this rank owns."""
        low, high = self.flat.owned
        return self.reduced[low:high] if self.flat.plan.grad is Residency.REPLICATED else self.reduced

    def whole(self, what: str) -> Tensor | None:
        """The averaged gradient of the whole buffer, on every rank; None before the first reduction."""
        if not self.is_reduced or self.flat.plan.grad is Residency.REPLICATED:
            return self.reduced if self.is_reduced else None
        whole = torch.empty(self.flat.layout.full_numel, dtype=self.dtype, device=self.flat.comm.device)
        self.flat.comm.gather(whole, self.reduced, what=what).wait()
        return whole

    def clear(self) -> None:
        """Forgets the gradients. Shards of them are given back: activations take their place in the next forward."""
        self.is_reduced = False
        if not self.is_persistent:
            self.reduced = None
        self.filled = [False] * len(self.filled)
        self.used = [False] * len(self.used)
        self._places, self._grads = [], []


class GradientSlots:
    """The few buffers in which units collect gradients during backward.

    Two suffice when each unit's backward ends before the next but one begins. Where it does not (several graphs in one
    backward), further ones are made. They are given back when backward ends: activations take their place in the next
    forward, so that the two never add up.

    Args:
        nbytes (`int`): what the largest unit needs.
        comm (`Comm`): where from.
    """

    def __init__(self, nbytes: int, comm: Comm):
        self._nbytes = nbytes
        self._comm = comm
        self._free: list[Slot] = []
        self._busy: dict[Slot, Pending | None] = {}  # None while gradients are being collected

    @property
    def slots(self) -> list[Slot]:
        """All buffers there are at the moment."""
        return [*self._free, *self._busy]

    def acquire(self) -> Slot:
        """A buffer to collect in: a new one as long as there is one at most, then the one that is being reduced."""
        if not self._free and len(self._busy) > 1:
            self._settle_one()
        slot = self._free.pop() if self._free else Slot(self._comm.empty(self._nbytes, torch.uint8))
        self._busy[slot] = None
        return slot

    def reducing(self, slot: Slot, pending: Pending) -> None:
        """Tells that the buffer is free again when `pending` is done."""
        self._busy[slot] = pending

    def release(self, slot: Slot) -> None:
        """Takes a buffer back."""
        del self._busy[slot]
        self._free.append(slot)

    def drain(self) -> None:
        """Waits for all reductions under way, and gives the memory back."""
        while self._settle_one():
            pass
        if not self._comm.shares_memory:
            self._free.clear()

    def _settle_one(self) -> bool:
        """Waits for the oldest reduction under way; False when there is none."""
        for slot, pending in self._busy.items():
            if pending is not None:
                pending.wait()
                self.release(slot)
                return True
        return False
