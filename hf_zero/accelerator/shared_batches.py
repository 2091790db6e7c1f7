"""Batches that several ranks share: accelerate's loaders give them to each of these, and they are gathered once."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import gather, recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.activation import refuse_group_size
from hf_zero.compat import check_overrides
from hf_zero.errors import ConfigError, UnsupportedError


def none_borrows() -> bool:
    """Says of a rank, in training, that its batch is its own, where ranks may have unlike numbers of rows."""
    return False


class SharingAccelerator(Accelerator):
    """The part of `ZeroAccelerator` that knows how many neighbouring ranks share each batch."""

    num_sharing: int = 1  # neighbouring ranks that are given the same batches
    borrows: Callable[[], bool] | None = None  # whether this rank's batch is another's; None: of no rank it is
    _gathers_once: bool = False
    _is_for_metrics: bool = False
    _batch_mesh: DeviceMesh | None = None  # None: every rank is given batches of its own

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Which ranks the loaders give the same batches. It is of this accelerator alone: accelerate's own would count
        for all that are made in the process."""
        return self._batch_mesh

    @property
    def is_one_group(self) -> bool:
        """Whether all of several ranks are given the same batches."""
        return 1 < self.num_sharing == self.num_processes

    def give_neighbours_same(self, num_sharing: int, axis: str) -> None:
        """Lets the loaders to be prepared give the same batches to so many neighbouring ranks. `axis` is accelerate's
        name for these: cp or tp."""
        self.num_sharing = num_sharing
        shape = (self.num_processes // num_sharing, num_sharing)
        self._batch_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp_shard", axis))

    def _share_batches(self, num_sharing: int) -> None:
        """Lets so many neighbouring ranks share each sequence. Raises [`ConfigError`] where the ranks form no equal
        groups, or rank 0 alone is to read the data, and to deal it out."""
        if num_sharing == 1:
            return
        refuse_group_size(num_sharing, self.num_processes, "zero_sequence_parallel")
        if self.dispatch_batches:
            raise ConfigError(
                "dispatch_batches: gives each rank other rows, and with zero_sequence_parallel neighbours need the "
                "same; leave it out"
            )
        self.dataloader_config.dispatch_batches = False  # of a stream, too, each rank reads what it needs
        self.give_neighbours_same(num_sharing, "cp")

    def gather(self, tensor, **kwargs) -> Any:
        """Gathers as accelerate does, for metrics of one rank of each group. Where ranks may borrow batches, they may
        also have unlike numbers of rows, and for metrics those that borrow have none."""
        if self.borrows is not None:
            return recursively_apply(self._gather_unlike, tensor, error_on_other_type=True)
        gathered = super().gather(tensor, **kwargs)
        return recursively_apply(self._first_of_each, gathered) if self._gathers_once else gathered

    def _gather_unlike(self, tensor: Tensor) -> Tensor:
        if not tensor.dim() and (self.borrows is none_borrows or not self._is_for_metrics):  # each rank has one
            return gather(tensor)[:: self.num_sharing if self._gathers_once else 1]
        rows = tensor if tensor.dim() else tensor.reshape(1)
        own = rows[:0] if self._is_for_metrics and self.borrows and self.borrows() else rows
        counts = gather(torch.tensor([len(own)], device=rows.device)).tolist()
        padded = rows.new_zeros(max(1, *counts), *rows.shape[1:])
        padded[: len(own)] = own
        parts = [part[:count] for part, count in zip(gather(padded).split(len(padded)), counts, strict=True)]
        return torch.cat(parts[:: self.num_sharing if self._gathers_once else 1])

    def _first_of_each(self, joined: Tensor) -> Tensor:
        return joined.unflatten(0, (self.num_processes, -1))[:: self.num_sharing].flatten(0, 1)

    def gather_for_metrics(self, input_data, use_gather_object=False, **kwargs) -> Any:
        """Gathers as accelerate does, and rows that ranks share once. Raises [`UnsupportedError`] for other objects
        than tensors, with ranks that share batches."""
        if self.num_sharing > 1 and (use_gather_object or not _are_tensors(input_data)):
            raise UnsupportedError(
                "gather_for_metrics: where ranks are given the same batches (zero_sequence_parallel, tensor "
                "parallelism) it gathers tensors, and no other objects; give it tensors"
            )
        with mock.patch.multiple(self, _gathers_once=self.num_sharing > 1, _is_for_metrics=True):
            return super().gather_for_metrics(input_data, use_gather_object, **kwargs)


check_overrides(SharingAccelerator, Accelerator, ("torch_device_mesh", "gather", "gather_for_metrics"))


def _are_tensors(values: Any) -> bool:
    if isinstance(values, dict):
        values = tuple(values.values())
    return all(map(_are_tensors, values)) if isinstance(values, (tuple, list)) else isinstance(values, Tensor)
