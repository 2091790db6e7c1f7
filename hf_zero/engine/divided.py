"""Parameters that transformers' tensor parallelism partitions over the ranks of its mesh (DTensors). The engine shards
this rank's local tensor. Other parameters are replicated on these ranks and have equal gradients there."""

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hf_zero.errors import UnsupportedError


def _dtensor_class() -> Any:
    """Returns `DTensor`, or no class if nothing has imported it yet, which takes as long as importing torch."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, _dtensor_class())


def is_divided(param: nn.Parameter) -> bool:
    """Whether a parameter is partitioned over tensor-parallel ranks."""
    return is_dtensor(param) and not all(placement.is_replicate() for placement in param.placements)


def local_of(param: nn.Parameter) -> Tensor:
    """Returns this rank's local tensor of a parameter, detached."""
    return param._local_tensor if is_dtensor(param) else param.data


def put(params: Iterable[nn.Parameter], values: Iterable[Tensor]) -> None:
    """Sets this rank's local tensor of each `param.data`."""
    dtensor = _dtensor_class()
    for param, value in zip(params, values):
        if not isinstance(param, dtensor):
            param.data = value
            continue
        if param.dtype is not value.dtype:
            other = with_local(param, value)
            param.data = other  # the outer tensor's dtype
            param._spec = other._spec
        param._local_tensor = value


def with_local(param: nn.Parameter, values: Tensor) -> Tensor:
    """Returns a DTensor with the placements of `param` and the local tensor `values`. If `param` is not a DTensor,
    returns `values`."""
    if not is_dtensor(param):
        return values
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = param.device_mesh, param.shape, param.stride()
    return DTensor.from_local(values, mesh, param.placements, run_check=False, shape=shape, stride=stride)


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Returns the local tensor of a parameter's gradient, redistributed to the parameter's placements."""
    if not is_dtensor(grad):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def dividing_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Returns the group of ranks over which a model's parameters are partitioned, or `None` if there is none. Raises
    [`UnsupportedError`] for models sharded by FSDP, for meshes with several dimensions, and for several groups."""
    found: dict[dist.ProcessGroup, str] = {}
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    sharded = next((name for name, module in model.named_modules() if isinstance(module, fsdp)), None)
    if sharded is not None:
        raise UnsupportedError(f"{sharded or 'model'}: is sharded by FSDP already; load the model without it")
    for name, param in model.named_parameters():
        if is_dtensor(param):
            if param.device_mesh.ndim != 1 or any(placement.is_partial() for placement in param.placements):
                raise UnsupportedError(
                    f"{name}: has placements {param.placements}, but "
                    "only partitions along one mesh dimension are supported; load it with tensor parallelism only"
                )
            found.setdefault(param.device_mesh.get_group(), name)
    if len(found) > 1:
        raise UnsupportedError(
            f"{' and '.join(found.values())}: are partitioned over different ranks; load the model with tensor "
            "parallelism, or with expert parallelism over the same ranks"
        )
    return next(iter(found), None)
