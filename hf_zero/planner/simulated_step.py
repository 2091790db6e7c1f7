"""A training step without data: the engine shards a copy of the model on the meta device as one of many ranks, and
runs a step.

[Note: limitations] Memory that kernels allocate internally, and memory of a device's libraries, is not counted. Values
are not available, so masks are assumed to hide nothing and all data-dependent branches to be taken; experts that are
not computed by grouped products are then counted incorrectly. Layers compute in the dtype of their parameters:
additional casts by autocast, such as the outputs of layer norms on GPUs, are not counted.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.activation import refuse_group_size
from hf_zero.activation.shard_model import place_and_divide_activations, refuse_unsuited
from hf_zero.config import MemoryTier, ZeroConfig
from hf_zero.engine.build import build
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.opaque import is_alias, is_opaque, tensors_beside
from hf_zero.engine.partition import refuse_what_cannot_be_summed
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.optim import ShardedOptimizer
from hf_zero.planner.lone_rank import META, LoneBus, LoneNeighbours, lone_rank
from hf_zero.planner.meter import Meter, PeakRecorder, device_attention, few_parts
from hf_zero.planner.timeline import Timeline
from hf_zero.planner.topology import RANKS_PER_HOST


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# Trainer's default optimizer.
FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)
# Shape of the parameter that an optimizer is tried on, large enough for blockwise state.
SAMPLE_SHAPE = (128, 128)
# The forwards of a step: the trained one, one of the model without gradients, and one of a reference model (DPO). The
# reference of a model with an adapter is the model without it; otherwise it is a frozen copy, sharded like the model.
TRAINED, EVALUATED, REFERENCE = "trained", "evaluated", "reference"


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step in the steady state, in bytes, on the device unless stated otherwise."""

    resting_nbytes: int  # between backward and optimizer step
    kept_nbytes: int  # between steps, and throughout the forward
    host_nbytes: int  # on the host between backward and step, without staging buffers, whose number varies
    moments: dict[str, int]  # peaks between moments of the step, by the name of the moment that ends each interval
    activation_nbytes: int  # added by the forward up to the end of the last block
    head_nbytes: int  # maximum that is added to that before the backward of the last block
    sent_nbytes: int  # sent to other ranks, or read from shared memory, with one micro-batch
    copied_nbytes: int  # copied between device and host
    shares_memory: bool = False  # whether ranks share memory

    @property
    def peak_nbytes(self) -> int:
        """The peak of the step."""
        return max(self.moments.values())


@dataclass(kw_only=True)
class SimulatedRun:
    """A run to simulate, independent of the settings of ZeRO."""

    # not sharded, on any device including the meta device; not modified
    model: nn.Module = field(kw_only=False)
    num_ranks: int
    make_optimizer: MakeOptimizer = FUSED_ADAMW
    on_cpu: bool = False  # whether ranks train on CPUs instead of one accelerator each
    # memory of an accelerator, which determines bucket sizes and `shard_size="auto"`; 0 if unknown
    memory_nbytes: int = 0
    ranks_per_host: int | None = None  # default: 8 with accelerators, all ranks on CPUs
    forwards: tuple[str, ...] = (TRAINED,)  # of a step, in order
    reads_logits: bool = False  # whether the loss needs all logits, whatever `chunked_loss` says
    # whether a step has several micro-batches: memory is that of the last one, with the gradients of the earlier ones;
    # communication and time are those of a step with one
    accumulates: bool = False

    @property
    def host_size(self) -> int:
        """The number of ranks per host."""
        return self.ranks_per_host or (self.num_ranks if self.on_cpu else RANKS_PER_HOST)


class SimulatedStep:
    """The engine and the optimizer of one rank, with the meter that counts their memory. `blocks` is the path of the
    list of blocks and the number of them to keep. Raises [`UnsupportedError`] if the model does not support gradient
    checkpointing and it is asked for."""

    reference: ZeroEngine | None = None  # None if there is none, or if it is the model itself

    def __init__(
        self,
        run: SimulatedRun,
        config: ZeroConfig,
        blocks: tuple[str, int] | None = None,
        gradient_checkpointing: bool = False,
    ):
        for name, param in run.model.named_parameters():
            refuse_what_cannot_be_summed(name, param)
        refuse_group_size(config.sequence_parallel, run.num_ranks)
        refuse_unsuited(run.model, config)
        self._run = run
        self.meter = Meter()
        with self.meter:
            replica = replica_of(run.model, blocks).train()  # loaded models are in evaluation mode
            self.engine = self._build(replica, config)
            if gradient_checkpointing:
                _checkpoint_blocks(replica)
            trained = [param for param in self.engine.model.parameters() if param.requires_grad]
            inner = MetaOptimizer(trained, run.make_optimizer, self.meter.timeline)
            self.optimizer = ShardedOptimizer(self.engine, inner)
            # take a step without a backward first, to allocate everything that is allocated in the first step and
            # kept, including a root without trained parameters
            self.engine.unshard_around(with_head=False)
            self.engine.root.reshard()
            self._hold_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if REFERENCE in run.forwards and not hasattr(run.model, "disable_adapter"):
                twin = replica_of(run.model, blocks).requires_grad_(False).eval()
                self.reference = self._build(twin, config)
                self.reference.comm.counters.counted_by = self.engine.comm.counters

    def _build(self, replica: nn.Module, config: ZeroConfig) -> ZeroEngine:
        run = self._run
        comm = lone_rank(
            self.meter, run.num_ranks, run.host_size, config, on_cpu=run.on_cpu, device_nbytes=run.memory_nbytes
        )
        engine = build(replica, config, comm, bus=LoneBus(comm.counters, self.meter))
        place_and_divide_activations(engine, partial(LoneNeighbours, comm, self.meter.timeline))
        return engine

    @property
    def _staging_nbytes(self) -> int:
        engines = filter(None, (self.engine, self.reference))
        return sum(next((flat.masters.transfer.nbytes for flat in engine.flats), 0) for engine in engines)

    def step(self, batch: dict[str, Tensor]) -> StepMemory:
        """Simulates a step of one micro-batch, or the last micro-batch of a step, with clipping. `batch` is the input
        of the model's forward, with labels."""
        with self.meter, device_attention(self._run.on_cpu), few_parts(self.meter.timeline):
            if self.reference is not None:  # its first gathers allocate memory that later steps reuse
                self._evaluate(REFERENCE, _without_data(batch))
            if self.engine.config.gather_dtype is not None:  # the first gathers allocate the quantization buffers
                with torch.no_grad():
                    self.engine.model(**_without_data(batch))
                self.optimizer.step()  # afterwards nothing is gathered
                self.optimizer.zero_grad()
                self.engine.schedule.first_of.clear()  # prefetches learned from this forward
            if self._run.accumulates:
                self._collect_gradients()
                self._hold_gradients()
                self._hold_gradients()  # added to the first, using memory kept from an earlier step
            return self._counted_step(batch)

    def _collect_gradients(self) -> None:
        """Creates the gradients that an earlier micro-batch leaves to be accumulated, or to be reduced later."""
        for gradient in self.engine.gradients:
            for index, param in enumerate(gradient.flat.params if gradient.is_reduced_once else ()):
                gradient.receive(index, torch.empty(param.shape, dtype=gradient.flat.dtype, device=META))

    def _hold_gradients(self) -> None:
        """Creates the gradients that a backward leaves."""
        for unit in self.engine.units:
            if unit.reduces_each_backward:
                self.engine.reduce(unit)
        self.engine.wait_for_reductions()

    def _counted_step(self, batch: dict[str, Tensor]) -> StepMemory:
        before = dict(self.engine.comm.counters.sent_nbytes)
        watch = PeakRecorder(self.meter)
        for module in self.engine.modules.values():
            watch.follow(module)
        with self.meter.timeline.record():
            inputs = _without_data(batch)
            for kind in self._run.forwards:
                if kind == TRAINED:
                    loss = _loss_of(self.engine.model(**inputs))
                    watch.lap("head")
                    continue
                with watch.paused():
                    self._evaluate(kind, inputs)
                watch.lap(kind)
            self.engine.schedule.nests = False  # its value from the second step on
            with self.engine.reducing_this_backward(loss):
                loss.backward()
            del loss, inputs
            is_last = any(each.is_reduced and each.is_reduced_once for each in self.engine.gradients)
            self.meter.timeline.end_pass(is_last=is_last)
            self.optimizer.clip_grad_norm_(1.0)
            watch.lap("backward")
            resting, on_host = (
                self.meter.held[MemoryTier.DEVICE],
                self.meter.held[MemoryTier.HOST] - self._staging_nbytes,
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            watch.end()
            kept = self.meter.held[MemoryTier.DEVICE]
        after = self.engine.comm.counters.sent_nbytes
        moved = {verb: nbytes - before.get(verb, 0) for verb, nbytes in after.items()}
        copied = sum(moved.pop(verb, 0) for verb in ("up", "down"))
        return StepMemory(
            resting,
            kept,
            on_host,
            watch.moments(),
            activation_nbytes=watch.activations,
            head_nbytes=watch.head,
            sent_nbytes=sum(moved.values()),
            copied_nbytes=copied,
            shares_memory=self.engine.comm.shard_group.shared_memory is not None,
        )

    @torch.no_grad()
    def _evaluate(self, kind: str, inputs: dict[str, Any]) -> None:
        """Runs a forward without gradients, of the model or of the reference."""
        is_reference = kind == REFERENCE
        model = self.engine.model if self.reference is None or not is_reference else self.reference.model
        with model.disable_adapter() if is_reference and self.reference is None else nullcontext():
            model(**inputs)


def _checkpoint_blocks(model: nn.Module) -> None:
    """Switches gradient checkpointing of a transformers model on, under its current or older name."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switch = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if switch is None:
        raise UnsupportedError(f"{type(model).__name__}: has no gradient_checkpointing_enable; plan without it")
    try:
        switch()
    except ValueError as error:  # raised by transformers if the model does not support it
        raise UnsupportedError(f"{type(model).__name__}: {' '.join(str(error).split())}; plan without it") from error


def _without_data(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with its tensors on the meta device."""
    return {
        key: torch.empty_like(value, device=META) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def _loss_of(output) -> Tensor:
    """Returns the loss, or the sum of all outputs if the model returns no loss."""
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)
    return loss


class MetaOptimizer(torch.optim.Optimizer):
    """An optimizer that only creates the state of its parameters, in its first step; fused optimizers take no other
    memory. `make` creates the optimizer to simulate; `timeline` records the bytes that updates read and write."""

    elementwise = True
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[nn.Parameter], make: MakeOptimizer, timeline: Timeline):
        self._make = make
        self._timeline = timeline
        self._dtypes: dict[torch.dtype, dict[str, torch.dtype]] = {}  # of the state, by dtype of the parameter
        super().__init__(params, {"fused": True})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Creates missing state and records the bytes that the update reads and writes."""
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if param not in self.state:
                self.state[param] = {
                    key: torch.empty(param.shape, dtype=dtype, device=param.device)
                    for key, dtype in self._dtypes_of(param.dtype).items()
                }
            width = param.dtype.itemsize + sum(dtype.itemsize for dtype in self._dtypes_of(param.dtype).values())
            self._timeline.compute(0, param.numel() * (2 * width + param.grad.dtype.itemsize))

    def _dtypes_of(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if dtype not in self._dtypes:
            self._dtypes[dtype] = {key: tensor.dtype for key, tensor in _sample(self._make, dtype).items()}
        return self._dtypes[dtype]


def _sample(make: MakeOptimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the state tensors, by key, that an optimizer creates for one parameter in a step with zero gradients.

    Raises:
        `ConfigError`: if the state is not shaped like the parameter.
    """
    param = nn.Parameter(torch.zeros(SAMPLE_SHAPE, dtype=dtype))
    param.grad = torch.zeros_like(param)
    optimizer = make([param])
    if hasattr(optimizer, "train"):
        optimizer.train()  # schedule-free optimizers only step in training mode
    optimizer.step()
    tensors: dict[str, Tensor] = {}
    for key, value in optimizer.state[param].items():
        if isinstance(value, Tensor) and value.shape[1:] == param.shape:  # several values per element (AdEMAMix)
            tensors.update((f"{key}_{index}", row) for index, row in enumerate(value))
        elif isinstance(value, Tensor) and value.dim():
            tensors[key] = value
    strange = [key for key, tensor in tensors.items() if tensor.shape != param.shape]
    if strange:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: its state {strange[0]!r} is not shaped like a parameter and "
            "cannot be predicted; plan with an elementwise optimizer, such as AdamW"
        )
    return tensors


def replica_of(model: nn.Module, blocks: tuple[str, int] | None = None) -> nn.Module:
    """Copies a model to the meta device, without changing the original or allocating memory. `blocks` is that of
    [`SimulatedStep`]."""
    path, num_blocks = blocks or ("", None)
    omitted = list(model.get_submodule(path))[num_blocks:] if num_blocks is not None else []
    memo: dict[int, object] = {id(block): nn.Identity() for block in omitted}
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    for param in model.parameters():
        memo[id(param)] = _opaque(param, memo) if is_opaque(param) else _plain(param)
    replica = copy.deepcopy(model, memo)
    if omitted:
        del replica.get_submodule(path)[num_blocks:]
    return replica


def _plain(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)


def _opaque(param: nn.Parameter, memo: dict[int, object]) -> Tensor:
    """Returns a parameter of the same class, with copies of its attributes except the reference to its module."""
    data = torch.empty(param.shape, dtype=param.dtype, device=META)  # accessing `param.data` would be counted
    for tensor in tensors_beside(param):
        memo[id(tensor)] = data if is_alias(tensor, param) else torch.empty_like(tensor, device=META)
    copied = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    kept = {name: value for name, value in vars(param).items() if not isinstance(value, nn.Module)}
    vars(copied).update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    return copied
