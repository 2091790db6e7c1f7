"""Where the values, gradients and master weights of a set of parameters are stored, and in which dtypes.

A placement is pure data, computed once by `place`. The engine allocates from it; the memory report and the planner
count from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_zero.config import MemoryTier, Residency, StagePlan, ZeroConfig


HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one purpose that exist between uses."""

    name: str  # the purpose
    dtype: torch.dtype
    residency: Residency
    tier: MemoryTier

    def numel(self, whole: float, num_ranks: int) -> float:
        """Returns the number of elements that each rank holds out of `whole`."""
        return whole / num_ranks if self.residency is Residency.SHARDED else whole


@dataclass(frozen=True)
class Placement:
    """The placement of parameters with the same dtype and trainability.

    Args:
        trainable (`bool`): whether the parameters have gradients and optimizer state.
        dtype (`torch.dtype`): dtype of the values that modules compute with, and of the gradients from backward.
        master_dtype (`torch.dtype`): dtype of the master weights, which the optimizer updates.
        sum_dtype (`torch.dtype`): dtype in which gradients are summed over ranks and micro-batches.
        grad_dtype (`torch.dtype`): dtype of the stored average: that of the sum, or of a master with lower precision.
        values (`Residency`): residency of the values that modules compute with.
        gradient (`Residency`): residency of the gradient between backward and step.
        masters (`Residency`): residency of the master weights and the optimizer state.
        values_at (`MemoryTier`): where the values are stored.
        masters_at (`MemoryTier`): where the master weights and the optimizer state are stored.
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
        """Whether values and masters have the same dtype and memory tier, so that they can share memory."""
        return self.master_dtype is self.dtype and self.masters_at is self.values_at

    @property
    def has_copy(self) -> bool:
        """Whether values are stored in addition to the masters. For sharded values this is only the case if the
        masters are offloaded; otherwise gathers cast the masters."""
        is_read = self.values is Residency.SHARDED and self.masters_at is MemoryTier.DEVICE
        return not (self.is_same or is_read)

    @property
    def collects_whole(self) -> bool:
        """Whether a gradient is collected in a separate buffer that is kept from step to step."""
        return self.gradient is not Residency.SHARDED

    @property
    def is_averaged_in_place(self) -> bool:
        """Whether the average overwrites the buffer in which the gradient was collected."""
        return self.collects_whole and self.dtype is self.grad_dtype and self.masters_at is MemoryTier.DEVICE

    @property
    def average_at(self) -> MemoryTier:
        """Where the average is stored: with the masters, but never on disk."""
        return MemoryTier.DEVICE if self.masters_at is MemoryTier.DEVICE else MemoryTier.HOST

    def kinds(self) -> Iterator[TensorKind]:
        """Yields the tensors that exist between uses, except optimizer state."""
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
    """Decides where and in which dtypes parameters are stored.

    Args:
        dtype (`torch.dtype`): dtype in which modules compute with them.
        trainable (`bool`): whether they are trained.
        config (`ZeroConfig`): the settings.
        plan (`StagePlan`): the plan of the stage for the part of the model that contains them.
    """
    # trained parameters that were cast to half precision have fp32 masters
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
