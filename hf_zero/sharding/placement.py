"""Where the values, the gradient and the masters of one set of parameters rest, and in which dtypes.

It is pure data, decided once, by `place`. The engine allocates by it, and the memory report and the planner count by
it, so that none of them has a rule of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_zero.config import MemoryTier, Residency, StagePlan, ZeroConfig


HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one purpose that rest between uses."""

    name: str  # their purpose
    dtype: torch.dtype
    residency: Residency
    tier: MemoryTier

    def numel(self, whole: float, num_ranks: int) -> float:
        """Returns how many elements one of the ranks holds, of so many in all."""
        return whole / num_ranks if self.residency is Residency.SHARDED else whole


@dataclass(frozen=True)
class Placement:
    """The placement of parameters that share dtype and trainability.

    Args:
        trainable (`bool`): what is not has neither gradient nor optimizer state.
        dtype (`torch.dtype`): of the values that modules compute with, and of the gradients that backward makes.
        master_dtype (`torch.dtype`): of the values that the optimizer updates.
        sum_dtype (`torch.dtype`): in which gradients are summed over ranks and micro-batches.
        grad_dtype (`torch.dtype`): in which the average rests: that of the sum, or of a master with lower precision.
        values (`Residency`): of the values that modules compute with.
        gradient (`Residency`): of the gradient between a backward and the step.
        masters (`Residency`): of the values that the optimizer updates, and of its state.
        values_at (`MemoryTier`): where values rest.
        masters_at (`MemoryTier`): where masters and the optimizer's state rest.
    """

    trainable: bool
    dtype: torch.dtype
    master_dtype: torch.dtype
    sum_dtype: torch.dtype
    grad_dtype: torch.dtype
    values: Residency
    gradient: Residency
    masters: Residency
    values_at: MemoryTier
    masters_at: MemoryTier

    @property
    def is_same(self) -> bool:
        """Whether values and masters have one dtype and rest in one tier, so that one memory may be both."""
        return self.master_dtype is self.dtype and self.masters_at is self.values_at

    @property
    def has_copy(self) -> bool:
        """Whether values rest beside the masters. Sharded ones do only where the masters are off the device: else
        gathers cast the masters on their way."""
        is_read = self.values is Residency.SHARDED and self.masters_at is MemoryTier.DEVICE
        return not (self.is_same or is_read)

    @property
    def collects_whole(self) -> bool:
        """Whether a gradient is collected in memory of its own that stays from step to step."""
        return self.gradient is not Residency.SHARDED

    @property
    def is_averaged_in_place(self) -> bool:
        """Whether the average overwrites the memory in which the gradient was collected."""
        return self.collects_whole and self.dtype is self.grad_dtype and self.masters_at is MemoryTier.DEVICE

    @property
    def average_at(self) -> MemoryTier:
        """Where the average rests: with the masters, but never on disk."""
        return MemoryTier.DEVICE if self.masters_at is MemoryTier.DEVICE else MemoryTier.HOST

    def kinds(self) -> Iterator[TensorKind]:
        """Yields what rests between uses, without the optimizer's state."""
        values_dtype = self.dtype if self.has_copy or self.is_same else self.master_dtype
        yield TensorKind(
            "parameters" if self.trainable else "frozen parameters", values_dtype, self.values, self.values_at
        )
        if self.has_copy:
            yield TensorKind("masters", self.master_dtype, self.masters, self.masters_at)
        if self.trainable and self.collects_whole:
            yield TensorKind("gradients", self.dtype, Residency.PARTIAL, MemoryTier.DEVICE)
        if self.trainable and not self.is_averaged_in_place:
            at_rest = Residency.REPLICATED if self.gradient is Residency.REPLICATED else Residency.SHARDED
            yield TensorKind("reduced gradients", self.grad_dtype, at_rest, self.average_at)


def place(dtype: torch.dtype, trainable: bool, config: ZeroConfig, plan: StagePlan) -> Placement:
    """Decides where parameters rest.

    Args:
        dtype (`torch.dtype`): in which modules compute with them.
        trainable (`bool`): whether they are trained.
        config (`ZeroConfig`): the settings.
        plan (`StagePlan`): the stage's, for the part of the model in which they are.
    """
    # parameters that are asked to compute in half precision, and are trained, have a master of more
    is_widened = config.compute_dtype is not None and trainable and dtype in HALF_DTYPES
    master_dtype = torch.float32 if is_widened else dtype
    sum_dtype = torch.float64 if dtype is torch.float64 else config.sum_dtype
    return Placement(
        trainable=trainable,
        dtype=dtype,
        master_dtype=master_dtype,
        sum_dtype=sum_dtype,
        grad_dtype=min(sum_dtype, master_dtype, key=lambda each: each.itemsize),
        values=plan.compute,
        gradient=plan.grad,
        masters=plan.master,
        values_at=plan.compute_at,
        masters_at=plan.master_at if trainable else plan.compute_at,
    )
