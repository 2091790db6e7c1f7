"""Memory on one rank: a report of current use by class of tensors, compared with DDP, and an estimate of a model's
states from the shapes of its parameters."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_zero.comm.streams import free_and_total_nbytes
from hf_zero.config import MemoryTier, StagePlan, ZeroConfig
from hf_zero.engine.divided import local_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.opaque import is_opaque
from hf_zero.sharding.placement import TensorKind, place


# The fraction of a device's memory that states may use. Activations, gathered units and libraries need the remainder.
STATES_SHARE = 0.75
# Number of values per element that AdamW keeps. The actual optimizer is not known yet.
NUM_MOMENTS = 2


@dataclass(frozen=True)
class MemoryReport:
    """Memory in bytes on one rank by class of tensors. Each tensor counts once. Memory is on the device unless a field
    says otherwise.

    Args:
        parameter_nbytes (`int`): stored parameters: compute copies at stages 0 to 2; masters, or shards of the compute
            copy if there are any, at stage 3; and the scales of quantized parameters.
        gradient_nbytes (`int`): gradients that are kept between backward and step.
        optimizer_nbytes (`int`): masters in addition to compute copies, and optimizer state.
        buffer_nbytes (`int`): reused buffers for gathering parameters, and for collecting and exchanging gradients;
            and 1 KiB for each parameter of which a sample is compared.
        host_nbytes (`int`): values offloaded to host memory, and staging buffers.
        ddp_parameter_nbytes (`int`): parameters under DDP, in the dtypes in which the model was loaded.
        ddp_gradient_nbytes (`int`): gradients under DDP.
        ddp_optimizer_nbytes (`int`): optimizer state under DDP.
        disk_nbytes (`int`): values offloaded to disk.
    """

    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    buffer_nbytes: int
    host_nbytes: int
    ddp_parameter_nbytes: int
    ddp_gradient_nbytes: int
    ddp_optimizer_nbytes: int
    disk_nbytes: int = 0


def measure(engine: ZeroEngine) -> MemoryReport:
    """Implements `ShardedModel.memory`."""
    gradients = engine.gradients
    sources = [flat.source for flat in engine.flats if flat.source is not None]
    parameters = [flat.full for flat in engine.flats if not flat.is_sharded]
    parameters += [source.values for source in sources if source.tier is MemoryTier.DEVICE]
    parameters += [tensor for flat in engine.flats for tensor in flat.scales]
    optimizer = engine.newest_optimizer
    state = list(optimizer.state_tensors()) if optimizer else []
    resting = [g.reduced for g in gradients if g.reduced is not None and not g.is_on_host]
    resting += [g.full for g in gradients if g.flat.placement.collects_whole]
    resting += [g.local_sum for g in gradients if g.local_sum is not None]
    copied = [flat.masters for flat in engine.flats if flat.has_copy]
    masters = [shard.values for shard in copied if shard.tier is MemoryTier.DEVICE]
    slots = [unit.slot.buffer for unit in engine.units if unit.slot is not None]
    slots += [slot.buffer for unit in engine.units if unit.gradient_slots for slot in unit.gradient_slots.slots]
    exchanging = [*engine.comm.exchanging, *(tensor for flat in engine.flats for tensor in flat.sampling)]
    ddp_params = {info.name: info for flat in engine.flats for info in flat.infos}.values()
    return MemoryReport(
        parameter_nbytes=_nbytes(parameters),
        gradient_nbytes=_nbytes(resting),
        optimizer_nbytes=_nbytes(masters) + _nbytes(tensor for tensor, tier in state if tier is MemoryTier.DEVICE),
        # averages that are kept in slots count as gradients
        buffer_nbytes=_nbytes([*slots, *exchanging, *resting]) - _nbytes(resting),
        host_nbytes=engine.bus.host_nbytes + _nbytes(tensor for tensor, tier in state if tier is MemoryTier.HOST),
        ddp_parameter_nbytes=sum(info.shape.numel() * info.save_dtype.itemsize for info in ddp_params),
        ddp_gradient_nbytes=sum(
            info.shape.numel() * info.save_dtype.itemsize for info in ddp_params if info.trainable
        ),
        ddp_optimizer_nbytes=optimizer.unsharded_state_nbytes() if optimizer else 0,
        disk_nbytes=engine.disk.file.nbytes if engine.disk is not None else 0,
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Returns the total size of the memory of tensors. Overlapping views count once."""
    ranges = sorted({(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors})
    total, end = 0, 0
    for low, high in ranges:
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def memory_of_device(device: torch.device) -> int | None:
    """Returns the total memory of a device, or `None` if it is unknown or the device is the CPU, whose memory is
    shared."""
    known = None if device.type == "cpu" else free_and_total_nbytes(device)
    return None if known is None else known[1]


def states_fit(model: nn.Module, config: ZeroConfig, num_ranks: int, memory_nbytes: int | None) -> bool:
    """Whether the states of a model fit on a device. `True` if the memory of the device is unknown."""
    return memory_nbytes is None or states_nbytes(model, config, num_ranks) <= STATES_SHARE * memory_nbytes


def states_nbytes(model: nn.Module, config: ZeroConfig, num_ranks: int) -> int:
    """Estimates the device memory of one rank between backward and step: parameters, masters, gradients and the state
    of AdamW. `num_ranks` is the size of the shard group."""
    plan, share = config.plan(num_ranks), config.offload_fraction if config.offload != "none" else 1.0
    total = 0.0
    for param in model.parameters():
        total += share * _states_nbytes(param, plan, config, num_ranks)
        total += (1 - share) * _states_nbytes(param, plan.here, config, num_ranks)
    return round(total)


def _states_nbytes(param: nn.Parameter, plan: StagePlan, config: ZeroConfig, num_ranks: int) -> float:
    placement = place(computed_in(param, config.compute_dtype), param.requires_grad, config, plan)
    kinds, whole = list(placement.kinds()), local_of(param).numel()
    if placement.trainable:
        moments = TensorKind("moments", placement.master_dtype, placement.masters, placement.masters_at)
        kinds += [moments] * NUM_MOMENTS
    on_device = (kind for kind in kinds if kind.tier is MemoryTier.DEVICE)
    return sum(kind.numel(whole, num_ranks) * kind.dtype.itemsize for kind in on_device)


def computed_in(param: nn.Parameter, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which modules use a parameter, unless the model's class keeps it in fp32."""
    is_number = not is_opaque(param) and param.is_floating_point()
    return compute_dtype if compute_dtype is not None and is_number else param.dtype
