"""The memory of a rank by tensor class, computed before the first step."""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from hf_zero.config import MemoryTier, Residency
from hf_zero.engine.engine import ZeroEngine


REFERENCE = "reference model"
# Names of the classes that are a model's parameters.
PARAMETERS = ("parameters", "frozen parameters", "scales of quantized parameters")


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one purpose and dtype."""

    name: str  # the purpose
    dtype: torch.dtype | None  # None for buffers that hold several
    nbytes: int  # on this rank
    num_parts: int  # number of ranks over which the tensors are divided; 1 if every rank holds all of them
    tier: MemoryTier = MemoryTier.DEVICE  # where they are stored


def tensor_classes(engine: ZeroEngine, optimizer: torch.optim.Optimizer | None = None) -> list[TensorClass]:
    """Returns the tensors that exist between uses or are reused, as of the first step.

    Activations and temporary allocations of libraries are not included. `optimizer` is a `ShardedOptimizer`, whose
    state need not exist yet. State of optimizers that are not elementwise is included once it exists."""
    num_ranks = engine.comm.shard_group.num_ranks
    numel: Counter[tuple[str, torch.dtype, Residency, MemoryTier]] = Counter()
    for flat in engine.flats:
        for kind in flat.placement.kinds():
            held = int(kind.numel(flat.layout.full_numel, num_ranks))
            numel[kind.name, kind.dtype, kind.residency, kind.tier] += held
        for scales in flat.scales:
            key = ("scales of quantized parameters", scales.dtype, Residency.REPLICATED, MemoryTier.DEVICE)
            numel[key] += scales.numel()
    for dtype, count, tier in optimizer.expected_state() if optimizer is not None else ():
        numel["optimizer state", dtype, engine.plan.master, tier] += count
    classes = [
        TensorClass(name, dtype, count * dtype.itemsize, num_ranks if residency is Residency.SHARDED else 1, tier)
        for (name, dtype, residency, tier), count in numel.items()
    ]
    gathering, collecting = _slots_nbytes(engine)
    classes += [TensorClass("gather buffers", None, gathering, 1)] if gathering else []
    classes += [TensorClass("gradient buffers", None, collecting, 1)] if collecting else []
    exchanging = engine.comm.buffer_nbytes
    classes += [TensorClass("communication buffers", None, exchanging, 1)] if exchanging else []
    return classes


def reference_classes(engine: ZeroEngine) -> list[TensorClass]:
    """Returns the tensors of a frozen reference model: its parameters, and all of its buffers combined."""
    found = tensor_classes(engine)
    held = [replace(each, name=REFERENCE) for each in found if each.name in PARAMETERS]
    buffers = sum(each.nbytes for each in found) - sum(each.nbytes for each in held)
    return [*held, *([TensorClass(f"buffers of the {REFERENCE}", None, buffers, 1)] if buffers else [])]


def checkpoint_nbytes(engine: ZeroEngine, classes: list[TensorClass]) -> int:
    """Returns the size of a checkpoint, over all ranks: the model in its own dtypes, the optimizer state, and masters
    with a wider dtype than the model. For a model with adapters, the base model is not saved."""
    nbytes = sum(each.nbytes * each.num_parts for each in classes if each.name == "optimizer state")
    has_base = not hasattr(engine.model, "peft_config")
    for flat in (flat for flat in engine.flats if flat.trainable or has_base):
        for info in flat.infos:
            is_wider = torch.promote_types(flat.masters.dtype, info.save_dtype) != info.save_dtype
            width = info.save_dtype.itemsize + (flat.masters.dtype.itemsize if is_wider else 0)
            nbytes += info.shape.numel() * width
    return nbytes


def render_classes(classes: list[TensorClass]) -> str:
    """Returns one line per class: its purpose, dtype, and size on a rank."""
    width = max((len(each.name) for each in classes), default=0)
    lines = []
    for each in classes:
        dtype = str(each.dtype).removeprefix("torch.") if each.dtype is not None else ""
        share = f"sharded over {each.num_parts} ranks" if each.num_parts > 1 else "full copy" if each.dtype else ""
        tier = "" if each.tier is MemoryTier.DEVICE else f"on the {each.tier.value}"
        size = f"{each.nbytes / 2**20:>10.2f} MiB"
        lines.append(f"  {each.name:<{width}}  {dtype:<8}  {size}  {share}  {tier}".rstrip())
    return "\n".join(lines)


def _slots_nbytes(engine: ZeroEngine) -> tuple[int, int]:
    """Returns the size of the slots for gathered units, and of those for gradients collected in backward."""
    slots = {id(unit.slot): unit.slot.buffer.numel() for unit in engine.units if unit.slot is not None}
    lent = {unit.gradient_slots for unit in engine.units if unit.gradient_slots is not None}
    return sum(slots.values()), sum(each.nbytes * each.count for each in lent)
