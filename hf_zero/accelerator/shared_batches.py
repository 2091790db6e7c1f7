"""Batches that several ranks share: accelerate's loaders give them to each of these ranks, and they are gathered
once."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.activation import refuse_group_size
from hf_zero.compat import check_overrides, replaced
from hf_zero.errors import ConfigError, UnsupportedError


class SharingAccelerator(Accelerator):
    """The part of `ZeroAccelerator` for neighboring ranks that share batches."""

    num_sharing: int = 1  # number of neighboring ranks that share batches
    _gathers_once: bool = False
    _batch_mesh: DeviceMesh | None = None  # None: no ranks share batches

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh that tells loaders which ranks share batches. accelerate's own would apply to all accelerators of
        the process."""
        return self._batch_mesh

    def give_neighbours_same(self, num_sharing: int, axis: str) -> None:
        """Makes loaders that are prepared later give the same batches to `num_sharing` neighboring ranks. `axis` is
        accelerate's name of the mesh dimension: cp or tp."""
        self.num_sharing = num_sharing
        shape = (self.num_processes // num_sharing, num_sharing)
        self._batch_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp_shard", axis))

    def _share_batches(self, num_sharing: int) -> None:
        """Makes `num_sharing` neighboring ranks share each sequence. Raises [`ConfigError`] if the number of ranks is
        not divisible by it, or with `dispatch_batches`."""
        if num_sharing == 1:
            return
        refuse_group_size(num_sharing, self.num_processes, "zero_sequence_parallel")
        if self.dispatch_batches:
            raise ConfigError(
                "dispatch_batches: gives every rank other rows, but zero_sequence_parallel needs the same rows on "
                "neighboring ranks; remove it"
            )
        self.dataloader_config.dispatch_batches = False  # the default is True for streams
        self.give_neighbours_same(num_sharing, "cp")

    def gather(self, tensor, **kwargs) -> Any:
        """Gathers like accelerate; for metrics, from one rank per group."""
        gathered = super().gather(tensor, **kwargs)
        return recursively_apply(self._first_of_each, gathered) if self._gathers_once else gathered

    def _first_of_each(self, joined: Tensor) -> Tensor:
        return joined.unflatten(0, (self.num_processes, -1))[:: self.num_sharing].flatten(0, 1)

    def gather_for_metrics(self, input_data, use_gather_object=False, **kwargs) -> Any:
        """Gathers like accelerate, but rows that ranks share only once. Raises [`UnsupportedError`] if ranks share
        batches and `input_data` has objects other than tensors."""
        if self.num_sharing > 1 and (use_gather_object or not _are_tensors(input_data)):
            raise UnsupportedError(
                "gather_for_metrics: only tensors can be gathered if ranks share batches (zero_sequence_parallel, "
                "tensor parallelism); pass tensors"
            )
        with replaced(self, _gathers_once=self.num_sharing > 1):
            return super().gather_for_metrics(input_data, use_gather_object, **kwargs)


check_overrides(SharingAccelerator, Accelerator, ("torch_device_mesh", "gather", "gather_for_metrics"))


def _are_tensors(values: Any) -> bool:
    if isinstance(values, dict):
        values = tuple(values.values())
    return all(map(_are_tensors, values)) if isinstance(values, (tuple, list)) else isinstance(values, Tensor)
