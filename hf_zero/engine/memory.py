"""What a rank holds now, by tensor class, beside what DDP would hold."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hf_zero.config import MemoryTier
from hf_zero.engine.model_units import ModelUnits


@dataclass(frozen=True)
class MemoryReport:
    """The bytes on one rank by tensor class, each tensor counted once. They are on the device unless a field says
    otherwise.

    Args:
        parameter_nbytes (`int`): the parameters as they rest: compute copies at stages 0 to 2, masters at stage 3; and
            the scales of quantized ones, and secondary shards.
        gradient_nbytes (`int`): gradients that rest between backward and step.
        optimizer_nbytes (`int`): masters that are tensors of their own, and optimizer state.
        buffer_nbytes (`int`): reused buffers, for gathering, for collecting gradients and for exchanging them.
        host_nbytes (`int`): what is offloaded to the host's memory, and the buffers through which it goes there.
        ddp_parameter_nbytes (`int`): the same classes under DDP, in the dtypes that the model was loaded in.
        ddp_gradient_nbytes (`int`): likewise.
        ddp_optimizer_nbytes (`int`): likewise.
        disk_nbytes (`int`): what is offloaded to files.
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


def measure(engine: ModelUnits) -> MemoryReport:
    """Measures the tensors that an engine and its optimizer hold on this rank, see `ShardedModel.memory`."""
    gradients = list(engine.gradients())
    sources = [flat.rest.source for flat in engine.flats if flat.rest.source is not None]
    parameters = [flat.full for flat in engine.flats if not flat.rest.is_sharded]
    parameters += [source.values for source in sources if source.tier is MemoryTier.DEVICE]
    parameters += [tensor for flat in engine.flats for tensor in flat.scales]
    parameters += [flat.rest.secondary.shard.values for flat in engine.flats if flat.rest.secondary is not None]
    optimizer = engine.optimizer and engine.optimizer()
    state = list(optimizer.state_tensors()) if optimizer else []
    resting = [g.reduced for g in gradients if g.reduced is not None and g.rests_at is MemoryTier.DEVICE]
    resting += [g.full for g in gradients if g.is_persistent]
    copied = [flat.rest.masters for flat in engine.flats if flat.rest.has_copy]
    masters = [shard.values for shard in copied if shard.tier is MemoryTier.DEVICE]
    slots = [unit.slot.buffer for unit in engine.units if unit.slot is not None]
    slots += [slot.buffer for unit in engine.units if unit.gradient_slots for slot in unit.gradient_slots.slots]
    exchanging = engine.comm.exchanging
    ddp_params = {info.name: info for flat in engine.flats for info in flat.infos}.values()
    return MemoryReport(
        parameter_nbytes=_nbytes(parameters),
        gradient_nbytes=_nbytes(resting),
        optimizer_nbytes=_nbytes(masters) + _nbytes(tensor for tensor, tier in state if tier is MemoryTier.DEVICE),
        # without the averages that rest in slots meanwhile
        buffer_nbytes=_nbytes([*slots, *exchanging, *resting]) - _nbytes(resting),
        host_nbytes=engine.bus.host_nbytes + _nbytes(tensor for tensor, tier in state if tier is MemoryTier.HOST),
        ddp_parameter_nbytes=sum(info.shape.numel() * info.save_dtype.itemsize for info in ddp_params),
        ddp_gradient_nbytes=sum(
            info.shape.numel() * info.save_dtype.itemsize for info in ddp_params if info.trainable
        ),
        ddp_optimizer_nbytes=optimizer.unsharded_state_nbytes() if optimizer else 0,
        disk_nbytes=engine.disk.nbytes if engine.disk is not None else 0,
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' distinct ranges of memory. Views of one another count once."""
    ranges = sorted({(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors})
    total, end = 0, 0
    for low, high in ranges:
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total
