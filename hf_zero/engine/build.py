"""Builds the engine of a plain model: partition, layout, buffers, slots and hooks."""

import os
import re
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.comm import Bus, Comm, connect
from hf_zero.comm.agreement import collect_from_all_ranks
from hf_zero.comm.blockwise import BLOCK_NUMEL, Packed
from hf_zero.comm.groups import averaging
from hf_zero.comm.streams import free_and_total_nbytes
from hf_zero.comm.world import local_device, ranks_alike, refuse_dividing
from hf_zero.config import MemoryTier, StagePlan, ZeroConfig
from hf_zero.engine import buffers, hooks
from hf_zero.engine.access import RanksInStep, remember, unit_of
from hf_zero.engine.away import Placeholders
from hf_zero.engine.divided import dividing_group, is_divided, local_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import Flat, ParamInfo
from hf_zero.engine.gradient import AverageMemory, Gradient, GradientSlots
from hf_zero.engine.guards import Members
from hf_zero.engine.initial_values import draw_seed, initialize, is_bare, warn_of_constructors
from hf_zero.engine.memory import computed_in, memory_of_device, states_fit
from hf_zero.engine.opaque import is_opaque, unpack_layers
from hf_zero.engine.partition import Partition, UnitSpec, partition, refuse_what_cannot_be_sharded
from hf_zero.engine.patch import Patch
from hf_zero.engine.schedule import Schedule, Stack
from hf_zero.engine.shard import MAX_HELD_NBYTES, HostTransfer
from hf_zero.engine.sharded_model import ENGINE_ATTRIBUTE, engine_of
from hf_zero.engine.source import forget_source, source_of
from hf_zero.engine.unit import Unit
from hf_zero.errors import CheckpointError, LifecycleError
from hf_zero.sharding.layout import ALIGN_NUMEL, Layout
from hf_zero.sharding.placement import place
from hf_zero.sharding.slots import Slot, parts_nbytes, trim
from hf_zero.storage import DiskOffload, DiskPrefetcher


def shard_parameters(
    model: nn.Module,
    config: ZeroConfig,
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> ZeroEngine:
    """Shards the parameters of a model over the data-parallel ranks, in place. It ignores the settings for
    activations; `hf_zero.shard` applies them."""
    engine = engine_of(model)
    if engine is not None:
        if engine.config != config:
            raise LifecycleError(f"the model is already sharded with {engine.config}, but got {config}")
        return engine
    if any(unit_of(p) is not None for p in model.parameters()):
        raise LifecycleError(
            "a submodule of the model, or a model that contains it, is already sharded; shard the full model once"
        )
    if torch.is_inference_mode_enabled():
        raise LifecycleError(
            "shard: was called inside torch.inference_mode(), where tensors cannot be trained; call it outside"
        )
    if device is None:
        device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    device = local_device(device)
    dividing = dividing_group(model)
    refuse_what_cannot_be_sharded(model, device)
    if dividing is not None:
        group = group or ranks_alike(dividing, config.timeout_seconds)
        refuse_dividing(group, dividing, device)
    comm = _connect(
        device,
        config,
        group,
        shard_size=config.shard_size,
        fits=lambda num_ranks: states_fit(model, config, num_ranks, memory_of_device(device)),
    )
    if is_bare(model):
        initialize(model, seed=comm.broadcast_object(draw_seed()))
        if comm.rank == 0:
            warn_of_constructors(model)
    return build(model, config, comm, dividing and _connect(device, config, dividing))


def _connect(device: torch.device, config: ZeroConfig, group: dist.ProcessGroup | None, **divided) -> Comm:
    return connect(
        device,
        group=group,
        timeout_seconds=config.timeout_seconds,
        bucket_nbytes=config.bucket_nbytes,
        shared_memory=config.shared_memory,
        **divided,
    )


def build(
    model: nn.Module, config: ZeroConfig, comm: Comm, divided_over: Comm | None = None, *, bus: Bus | None = None
) -> ZeroEngine:
    """Builds the engine of a model unit by unit. The original memory of a unit is freed before the next one is built.

    Args:
        model (`nn.Module`): the model.
        config (`ZeroConfig`): the settings.
        comm (`Comm`): the data-parallel ranks.
        divided_over (`Comm`, *optional*): the tensor-parallel ranks.
        bus (`Bus`, *optional*): copies between device and host; by default a new one for the device of `comm`.
    """
    patches = unpack_layers(model)
    parts = partition(model)
    placeholders = Placeholders(comm.device)
    bus = bus or Bus(comm.device, comm.counters)
    average_memory = AverageMemory(comm.device)
    blocks = [spec for stack in parts.stacks for spec in stack.blocks]
    largest = max((sum(p.numel() for p in spec.params.values()) for spec in blocks), default=0)
    held_nbytes = 4 * largest // comm.shard_group.num_ranks  # a block in fp32, or two in half precision
    transfer = HostTransfer(bus, held_nbytes=min(held_nbytes, MAX_HELD_NBYTES))
    units = _make_units(model, parts.units, config, comm, average_memory, placeholders, transfer)
    flats = [flat for unit in units for flat in unit.flats]
    for flat in flats:
        flat.allocate()
    disk = _rest_on_disk(flats, config.offload_dir, bus)
    sharing = _sharing(units, parts)
    _place_slots(sharing, config, comm)
    _read_sources(flats, comm)
    for flat in flats:
        flat.fill()
        flat.reshard() if flat.is_sharded else flat.unshard()
        flat.mark_clean()
    if disk is not None:
        _make_disk_prefetchers(disk, sharing, bus)
    remember(units)
    _place_gradients(sharing, comm)
    buffers.place(model, comm)
    engine = _assemble(model, config, comm, units, parts, placeholders, average_memory, bus)
    engine.disk, engine.divided_over = disk, divided_over
    engine.handles += patches
    trim(comm.device)
    return engine


def _make_units(model, specs, config, comm, average_memory, placeholders, transfer) -> list[Unit]:
    sends = comm.shard_group.num_ranks > 1
    lay_out = partial(
        _lay_out,
        config=config,
        comm=comm,
        placeholders=placeholders,
        transfer=transfer,
        packing=Packed(comm.shard_group) if sends and config.gather_dtype is not None else None,
    )
    average, average_packed = averaging(comm, packs=False), averaging(comm, packs=True)

    def collect(flat: Flat) -> Gradient:
        # quantized only if no block spans two parameters; fp64 sums are sent unquantized
        packs = config.packs_reductions and flat.layout.align_to == BLOCK_NUMEL
        is_packed = packs and flat.placement.sum_dtype is torch.float32
        return Gradient(flat, average_packed if is_packed else average, average_memory)

    stays = _keep_in_fp32(model)
    units = []
    for index, (spec, plan) in enumerate(zip(specs, _plans(specs, config, comm))):
        own = [lay_out(group, plan) for group in _grouped(spec, config.compute_dtype, stays)]
        gradients = [collect(flat) for flat in own if flat.trainable]
        units.append(Unit(spec.name, own, gradients, index=index))
    return units


def _assemble(model, config, comm, units, parts, placeholders, average_memory, bus) -> ZeroEngine:
    by_name = {spec.name: unit for spec, unit in zip(parts.units, units)}
    owners = {
        spec.owner: Stack([by_name[unit.name] for unit in spec.units], spec.head and by_name[spec.head.name])
        for spec in parts.stacks
    }
    vocabulary = [spec for stack in parts.stacks for spec in (stack.embedding, stack.head) if spec is not None]
    for stack in parts.stacks:
        if stack.embedding is not None:
            by_name[stack.embedding.name].is_embedding = True
    schedule = Schedule(list(owners.values()))
    engine = ZeroEngine(
        model,
        config,
        comm,
        root=units[0],
        schedule=schedule,
        modules={by_name[spec.name]: spec.module for stack in parts.stacks for spec in stack.blocks},
        vocabulary={by_name[spec.name]: spec.module for spec in vocabulary},
        placeholders=placeholders,
        average_memory=average_memory,
        bus=bus,
    )
    engine.refuse_new_members = Members(model).refuse_new
    hooks.install(engine, owners)
    engine.handles.append(Patch(model, ENGINE_ATTRIBUTE, engine))
    for module in model.modules() if any(unit.is_sharded for unit in units) else ():
        if hasattr(type(module), "generate"):  # both an adapter model and the model inside it
            engine.handles += RanksInStep(units).marks(module)
    return engine


def _grouped(spec: UnitSpec, compute_dtype, keep_in_fp32) -> list[list[tuple[str, nn.Parameter, torch.dtype]]]:
    """Groups the parameters of a unit by dtype, trainability, class, and partitioning by tensor parallelism. Matrices
    come first in each group. This aligns them, and keeps parameters with weight decay contiguous."""
    groups: dict[tuple, list] = {}
    for name, p in sorted(spec.params.items(), key=lambda item: item[1].dim() < 2):
        dtype = p.dtype if keep_in_fp32(name) else computed_in(p, compute_dtype)
        groups.setdefault((dtype, p.requires_grad, is_opaque(p), is_divided(p)), []).append((name, p, dtype))
    return list(groups.values())


def _plans(specs: list[UnitSpec], config: ZeroConfig, comm: Comm) -> list[StagePlan]:
    """Returns the stage plan of every unit. Units are offloaded from the last one backward until `offload_fraction` of
    the parameters is reached."""
    plan = config.plan(comm.shard_group.num_ranks)
    left = config.offload_fraction * sum(p.numel() for spec in specs for p in spec.params.values())
    plans = []
    for spec in reversed(specs):
        plans.append(plan if left > 0 else plan.here)
        left -= sum(p.numel() for p in spec.params.values())
    return plans[::-1]


def _lay_out(
    group,
    plan: StagePlan,
    config: ZeroConfig,
    comm: Comm,
    placeholders: Placeholders,
    transfer: HostTransfer,
    packing: Packed | None,
) -> Flat:
    infos = [ParamInfo(name, local_of(p).shape, p.dtype, p.requires_grad) for name, p, _ in group]
    params, dtype, trainable = [p for _, p, _ in group], group[0][2], infos[0].trainable
    placement = place(dtype, trainable, config, plan)
    is_number = not is_opaque(params[0]) and dtype.is_floating_point and dtype.itemsize > 1
    can_be_rounded = is_number and dtype is (config.compute_dtype or dtype)
    if not can_be_rounded:
        # do not quantize opaque bytes, float8, or parameters that the model keeps in fp32
        packing = None
    is_rounded = packing is not None or (can_be_rounded and config.packs_reductions)
    layout = Layout.of(
        [tuple(info.shape) for info in infos],
        comm.shard_group.num_ranks,
        comm.num_replicas,
        align_to=BLOCK_NUMEL if is_rounded else ALIGN_NUMEL,  # no two parameters share a scale
    )
    return Flat(
        infos,
        params,
        layout,
        placement=placement,
        comm=comm,
        transfer=transfer,
        placeholders=placeholders,
        packing=packing,
    )


def _sharing(units: list[Unit], parts: Partition) -> list[list[Unit]]:
    """Groups the units that share memory: the blocks; the embedding and the head, which are never used at the same
    time; the root."""
    blocks = {spec.name for stack in parts.stacks for spec in stack.blocks}
    root, *others = units
    return [[u for u in others if u.name in blocks], [u for u in others if u.name not in blocks], [root]]


def _place_slots(sharing: list[list[Unit]], config: ZeroConfig, comm: Comm) -> None:
    """Assigns a slot to every unit whose full values are not kept. The blocks share slots; the embedding and the head
    share one.

    A unit always uses the same slot, so that views that autograd saved in forward show the right values in backward.
    """
    blocks, *others = ([unit for unit in group if unit.slot_parts] for group in sharing)
    sizes = {unit: parts_nbytes(unit.slot_parts) for group in (blocks, *others) for unit in group}
    largest = max((sizes[unit] for unit in blocks), default=0)
    if config.keep_gathered == "auto":
        kept = _fitting(largest, [unit for group in sharing for unit in group], comm) if largest else 0
    else:
        kept = int(config.keep_gathered)
    num_slots = min(len(blocks), config.prefetch_units + 1 + kept)
    counted = [(blocks, num_slots), *((group, 1) for group in others if group)]
    wanted = [(max((sizes[unit] for unit in group), default=0), count) for group, count in counted]
    for (group, _), (nbytes, count) in zip(counted, wanted):
        slots = [Slot(torch.empty(nbytes, dtype=torch.uint8, device=comm.device)) for _ in range(count)]
        for position, unit in enumerate(group):
            unit.use_slot(slots[position % count])


def _fitting(nbytes: int, units: list[Unit], comm: Comm) -> int:
    """Returns how many buffers of `nbytes` fit on every rank into half of the free memory, after gradients and
    optimizer state are subtracted."""
    free = 0
    if comm.device.type != "cpu":
        free = (free_and_total_nbytes(comm.device) or (0, 0))[0]
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // comm.num_ranks  # all on this host
    here = [gradient for unit in units for gradient in unit.gradients if not gradient.is_on_host]
    to_come = sum(12 * gradient.flat.layout.shard_numel for gradient in here)
    own = torch.tensor([max(0, free - to_come) // 2 // nbytes], device=comm.device)
    return int(comm.all_gather_vector(own).min())


def _read_sources(flats: list[Flat], comm: Comm) -> None:
    """Reads this rank's ranges of the parameters that have sources. Raises [`CheckpointError`] on all ranks if one of
    them cannot read, or if the ranks have different numbers of sources."""
    params = [p for flat in flats for p in flat.params]

    def read() -> int:
        for flat in flats:
            flat.read()
        return sum(source_of(p) is not None for p in params)

    found = collect_from_all_ranks(comm, "reading the weights", read)
    own = found[comm.rank]
    for rank, num_sources in enumerate(found):
        if num_sources != own:
            raise CheckpointError(
                f"{num_sources} parameters are read from files on rank {rank}, but {own} on rank {comm.rank}; "
                "load the model in the same way on every rank"
            )
    for param in params:
        forget_source(param)


def _rest_on_disk(flats: list[Flat], folder: str | None, bus: Bus) -> DiskOffload | None:
    """Reserves files for the masters and compute shards that are offloaded to disk."""
    masters = [flat.masters for flat in flats if flat.masters.tier is MemoryTier.DISK]
    if not masters:
        return None
    copies = [copy for flat in flats if (copy := flat.compute_shard) and copy.tier is MemoryTier.DISK]
    parts = [(shard.numel, shard.dtype) for shard in [*masters, *copies]]
    disk = DiskOffload(flats[0].comm, folder, bus, parts, casts=bool(copies))
    for shard, tensor in zip([*masters, *copies], disk.tensors):
        shard.on_disk = tensor
    return disk


def _make_disk_prefetchers(disk: DiskOffload, sharing: list[list[Unit]], bus: Bus) -> None:
    """Assigns a prefetcher to each unit whose values are on disk. A block is read at once; other units may be much
    larger and are read in windows."""
    blocks = sharing[0]
    for unit in (unit for group in sharing for unit in group):
        flats = [flat for flat in unit.flats if flat.source is not None and flat.source.on_disk is not None]
        if flats:
            tensors = [flat.source.on_disk for flat in flats]
            targets, in_windows = partial(_own_ranges, flats), unit not in blocks
            unit.disk_prefetcher = DiskPrefetcher(disk.gathered, bus, tensors, targets, in_windows=in_windows)


def _own_ranges(flats: list[Flat]) -> list[torch.Tensor]:
    return [flat.full[slice(*flat.owned)] for flat in flats]


def _place_gradients(sharing: list[list[Unit]], comm: Comm) -> None:
    """Assigns memory for gradients to every trainable unit: shared buffers, or its own buffer if that is kept from
    step to step."""
    sizes_by_group = []
    for group in sharing:
        own = [unit for unit in group if unit.gradients and not unit.gradients[0].flat.placement.collects_whole]
        sizes_by_group.append({unit: parts_nbytes([g.flat.slot_part for g in unit.gradients]) for unit in own})
    blocks, vocabulary, root = (max(sizes.values(), default=0) for sizes in sizes_by_group)
    if 2 * max(blocks, vocabulary) < 2 * blocks + vocabulary:  # less than separate buffers
        sizes_by_group = [sizes_by_group[0] | sizes_by_group[1], sizes_by_group[2]]
    for sizes, count in zip(sizes_by_group, (2, 1, 1)):
        slots = GradientSlots(max(sizes.values(), default=0), min(len(sizes), count), comm.shard_group)
        for unit in sizes:
            unit.gradient_slots = slots
    for gradient in (
        g for group in sharing for unit in group for g in unit.gradients if g.flat.placement.collects_whole
    ):
        full = comm.shard_group.empty(gradient.flat.layout.full_numel, gradient.flat.dtype)
        gradient.lend(full)


def _keep_in_fp32(model: nn.Module):
    """Returns a function of a parameter's name: whether the model's class keeps that parameter in fp32."""
    names: list[str] = []
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            names += getattr(module, attribute, None) or ()
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in names)) if names else None
    return lambda name: pattern is not None and pattern.search(name) is not None
