"""What a model's states take of a device, told from the shapes of its parameters before anything is connected or read.
It decides how many ranks `shard_size="auto"` takes."""

import torch
from torch import nn

from hf_zero.config import MemoryTier, Residency, StagePlan, ZeroConfig
from hf_zero.engine.divided import local_of
from hf_zero.engine.opaque import is_opaque


# Of a device's memory, what states may take: activations, gathered units and libraries have the rest.
STATES_SHARE = 0.75
# What AdamW keeps of each element; which optimizer comes is not known yet.
NUM_MOMENTS = 2


def memory_of_device(device: torch.device) -> int | None:
    """Returns the memory of a device; `None` where that is the host's, which ranks and others share, or not known."""
    backend = torch.get_device_module(device)
    return backend.mem_get_info(device)[1] if device.type != "cpu" and hasattr(backend, "mem_get_info") else None


def states_fit(model: nn.Module, config: ZeroConfig, num_ranks: int, memory_nbytes: int | None) -> bool:
    """Whether a model's states fit a device, as far as its memory is known."""
    return memory_nbytes is None or states_nbytes(model, config, num_ranks) <= STATES_SHARE * memory_nbytes


def states_nbytes(model: nn.Module, config: ZeroConfig, num_ranks: int) -> int:
    """Returns the bytes that one of the ranks over which a model is sharded holds on its device between backward and
    update: parameters, masters, gradients and AdamW's state.

    Args:
        num_ranks (`int`): of a shard group.
    """
    plan, share = config.plan(num_ranks), config.offload_fraction if config.offload != "none" else 1.0
    total = 0.0
    for param in model.parameters():
        total += share * _nbytes(param, plan, config, num_ranks)
        total += (1 - share) * _nbytes(param, plan.here, config, num_ranks)
    return round(total)


def _nbytes(param: nn.Parameter, plan: StagePlan, config: ZeroConfig, num_ranks: int) -> float:
    is_number, is_trained = not is_opaque(param) and param.is_floating_point(), param.requires_grad
    dtype = config.compute_dtype if config.compute_dtype is not None and is_number else param.dtype
    is_widened = config.compute_dtype is not None and is_trained and dtype in (torch.bfloat16, torch.float16)
    master_dtype = torch.float32 if is_widened else dtype
    grad_dtype = min(config.sum_dtype, master_dtype, key=lambda each: each.itemsize)
    whole = local_of(param).numel()

    def held(residency: Residency) -> float:
        return whole / num_ranks if residency is Residency.SHARDED else whole

    on_device = (plan.master_at if is_trained else plan.compute_at) is MemoryTier.DEVICE
    if plan.compute is not Residency.SHARDED:
        nbytes = float(whole * dtype.itemsize)
        nbytes += held(plan.master) * master_dtype.itemsize if on_device and master_dtype is not dtype else 0
    elif on_device or plan.compute_at is MemoryTier.DEVICE:  # masters, or copies of those that are elsewhere
        nbytes = held(plan.compute) * (master_dtype if on_device else dtype).itemsize
    else:
        nbytes = 0.0
    if not is_trained:
        return nbytes
    is_persistent = plan.grad is not Residency.SHARDED
    nbytes += whole * dtype.itemsize if is_persistent else 0
    if on_device:
        at_rest = Residency.REPLICATED if plan.grad is Residency.REPLICATED else Residency.SHARDED
        is_in_place = is_persistent and dtype is grad_dtype
        nbytes += 0 if is_in_place else held(at_rest) * grad_dtype.itemsize
        nbytes += held(plan.master) * NUM_MOMENTS * master_dtype.itemsize
    return nbytes
