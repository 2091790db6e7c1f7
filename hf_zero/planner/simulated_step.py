"""A training step without data: the engine shards a copy of the model on the meta device as one rank of many, and
steps.

[Note: what is not seen] What kernels take inside of one operation, and what a device's libraries take for themselves.
Of values that are not there it is assumed that masks hide nothing and that every branch on them is taken; experts that
are not computed by grouped products then count wrong. Layers compute in the dtype of their parameters: what autocast
casts beside that, such as the outputs of layer norms on GPUs, is left out.
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
from hf_zero.planner.quantized import device_products
from hf_zero.planner.timeline import Timeline
from hf_zero.planner.topology import RANKS_PER_HOST


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# What `Trainer` uses unless told otherwise.
FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)
# What an optimizer is tried on: large enough that its state is kept in blocks, if that is its way.
SAMPLE_SHAPE = (128, 128)
# What a step computes of a batch: the forward that backward comes to, one of the model without gradients, and one of a
# reference, as in DPO. That is of a model with an adapter the model without it, else a frozen twin that stands beside
# it, sharded likewise.
TRAINED, EVALUATED, REFERENCE = "trained", "evaluated", "reference"


@dataclass(frozen=True)
class StepMemory:
    """The bytes of one step in the steady state, on the device unless a field says otherwise."""

    resting_nbytes: int  # held between backward and optimizer step
    kept_nbytes: int  # held from step to step, also while a forward runs
    host_nbytes: int  # held on the host then, but for staging buffers, of which there are more or less
    moments: dict[str, int]  # the most between some moments of the step, by what they end
    activation_nbytes: int  # what forward has added when its last block ends
    head_nbytes: int  # the most that is added to that until backward comes to that block
    sent_nbytes: int  # sent to other ranks; where they share memory, read from it
    copied_nbytes: int  # copied between device and host
    shares_memory: bool = False  # whether ranks share memory

    @property
    def peak_nbytes(self) -> int:
        """The highest number at any moment."""
        return max(self.moments.values())


@dataclass(kw_only=True)
class SimulatedRun:
    """What is trained, and by whom, whatever the settings of ZeRO."""

    # not sharded; on any device, the meta device included, its weights read or not; it is left as it is
    model: nn.Module = field(kw_only=False)
    num_ranks: int
    make_optimizer: MakeOptimizer = FUSED_ADAMW
    on_cpu: bool = False  # whether the ranks train on CPUs, not on an accelerator each
    # what one accelerator has, on which the size of buckets and `shard_size` "auto" depend; 0: not known
    memory_nbytes: int = 0
    ranks_per_host: int | None = None  # by default 8 with an accelerator each, all on CPUs
    forwards: tuple[str, ...] = (TRAINED,)  # that a step computes of a batch, in their order
    # whether a step has several micro-batches: memory is that of its last one, which finds the gradients of those
    # before it; traffic and time are those of a step of one
    accumulates: bool = False

    @property
    def host_size(self) -> int:
        """How many ranks each host has."""
        return self.ranks_per_host or (self.num_ranks if self.on_cpu else RANKS_PER_HOST)


class SimulatedStep:
    """One rank's engine and optimizer, and the meter that counts what they take. `blocks` is the path of the list of
    blocks, of which only the first so many are taken."""

    reference: ZeroEngine | None = None  # None where there is none, or where it is the model itself
    _checkpoints = False  # whether it has switched on that blocks keep their inputs alone

    def __init__(self, run: SimulatedRun, config: ZeroConfig, blocks: tuple[str, int] | None = None):
        for name, param in run.model.named_parameters():
            refuse_what_cannot_be_summed(name, param)
        refuse_impossible(run.model, config, run.num_ranks)
        self._run = run
        self.meter = Meter()
        with self.meter:
            replica = replica_of(run.model, blocks).train()  # as a model that was loaded is not
            self.engine = self._build(replica, config)
            trained = [param for param in self.engine.model.parameters() if param.requires_grad]
            inner = MetaOptimizer(trained, run.make_optimizer, self.meter.timeline)
            self.optimizer = ShardedOptimizer(self.engine, inner)
            # a step without a backward: everything that comes with the first one, and stays, is there then,
            # as does a root of which nothing is trained
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
        return sum(next((flat.rest.masters.transfer.nbytes for flat in engine.flats), 0) for engine in engines)

    def checkpoint_blocks(self, is_on: bool) -> None:
        """Switches the gradient checkpointing of transformers' models, under its newer or older name.

        Raises:
            `UnsupportedError`: for a model without a switch.
        """
        if is_on is self._checkpoints:
            return
        model, verb = self.engine.model, "enable" if is_on else "disable"
        names = (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}")
        switch = next((getattr(model, name) for name in names if hasattr(model, name)), None)
        if switch is None:
            raise UnsupportedError(f"{type(model).__name__}: has no gradient_checkpointing_enable; plan without it")
        try:
            switch()
        except ValueError as error:  # transformers says so of models whose blocks are none
            raise UnsupportedError(
                f"{type(model).__name__}: {' '.join(str(error).split())}; plan without it"
            ) from error
        self._checkpoints = is_on

    def step(self, batch: dict[str, Tensor]) -> StepMemory:
        """Runs a step of one micro-batch, or the last one of a step, with clipping. `batch` is what the model's
        forward is given, with labels."""
        timeline, on_cpu = self.meter.timeline, self._run.on_cpu
        with self.meter, device_attention(on_cpu), device_products(on_cpu), few_parts(timeline):
            if self.reference is not None:  # its first gathers fill what those of each later step read
                self._evaluate(REFERENCE, _without_data(batch))
            if self.engine.config.gather_dtype is not None:  # its first gathers make the memory for what is packed
                with torch.no_grad():
                    self.engine.model(**_without_data(batch))
                self.optimizer.step()  # after which nothing is gathered
            if self._run.accumulates:
                self._collect_gradients()
                self._hold_gradients()
                self._hold_gradients()  # added to the first, through memory that stays from an earlier step
            self.engine.schedule.first_of.clear()  # what an earlier step has left alone, and would gather sooner
            return self._counted_step(batch)

    def _collect_gradients(self) -> None:
        """Leaves what an earlier micro-batch leaves where gradients are added up, and those that are held back."""
        for gradient in self.engine.gradients():
            for index, param in enumerate(gradient.flat.params if gradient.is_reduced_once else ()):
                gradient.receive(index, torch.empty(param.shape, dtype=gradient.flat.dtype, device=META))

    def _hold_gradients(self) -> None:
        """Leaves the gradients that a backward leaves."""
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
            self.engine.schedule.nests = False  # as from the second step on
            with self.engine.reducing_this_backward(loss):
                loss.backward()
            del loss, inputs
            is_last = any(each.is_reduced and each.is_reduced_once for each in self.engine.gradients())
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
        """Computes a forward without gradients, of the model or of the reference."""
        is_reference = kind == REFERENCE
        model = self.engine.model if self.reference is None or not is_reference else self.reference.model
        with model.disable_adapter() if is_reference and self.reference is None else nullcontext():
            model(**inputs)


def refuse_impossible(model: nn.Module, config: ZeroConfig, num_ranks: int) -> None:
    """Refuses settings with which so many ranks cannot train a model, as a run does before it shards. Raises
    [`ConfigError`] where ranks form no equal groups, and [`UnsupportedError`], naming the setting, where it does not
    suit the model."""
    if config.sequence_parallel > 1:
        refuse_group_size(config.sequence_parallel, num_ranks)
    refuse_unsuited(model, config)


def _without_data(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch with tensors on the meta device."""
    return {
        key: torch.empty_like(value, device=META) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def _loss_of(output) -> Tensor:
    """Returns the loss, or the sum of all outputs where a model returns no loss."""
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)
    return loss


class MetaOptimizer(torch.optim.Optimizer):
    """An optimizer that only makes the state of its parameters in its first step, as fused optimizers take no other
    memory. `make` makes the optimizer to be told; `timeline` gets the bytes that an update reads and writes."""

    elementwise = True
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[nn.Parameter], make: MakeOptimizer, timeline: Timeline):
        self._make = make
        self._timeline = timeline
        self._dtypes: dict[torch.dtype, dict[str, torch.dtype]] = {}  # of the state, by the parameter's
        super().__init__(params, {"fused": True})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Makes the state of parameters that have none yet, and counts what an update reads and writes."""
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
    """Returns the state tensors, by key, that an optimizer makes for one parameter in a step with zero gradients.

    Raises:
        `ConfigError`: for one whose state is not shaped like its parameters.
    """
    param = nn.Parameter(torch.zeros(SAMPLE_SHAPE, dtype=dtype))
    param.grad = torch.zeros_like(param)
    optimizer = make([param])
    if hasattr(optimizer, "train"):
        optimizer.train()  # schedule-free ones step in training alone
    optimizer.step()
    tensors: dict[str, Tensor] = {}
    for key, value in optimizer.state[param].items():
        if isinstance(value, Tensor) and value.shape[1:] == param.shape:  # several for each element, as in AdEMAMix
            tensors.update((f"{key}_{index}", row) for index, row in enumerate(value))
        elif isinstance(value, Tensor) and value.dim():
            tensors[key] = value
    strange = [key for key, tensor in tensors.items() if tensor.shape != param.shape]
    if strange:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: its state {strange[0]!r} is not shaped like a parameter, and is "
            "not predicted; plan with one that is elementwise, such as AdamW"
        )
    return tensors


def replica_of(model: nn.Module, blocks: tuple[str, int] | None = None) -> nn.Module:
    """Copies a model that is not sharded on the meta device: nothing of the original changes, and no memory is taken.
    `blocks`: as for [`SimulatedStep`]."""
    path, num_blocks = blocks or ("", None)
    left_out = list(model.get_submodule(path))[num_blocks:] if num_blocks is not None else []
    memo: dict[int, object] = {id(block): nn.Identity() for block in left_out}
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    for param in model.parameters():
        memo[id(param)] = _opaque(param, memo) if is_opaque(param) else _plain(param)
    replica = copy.deepcopy(model, memo)
    if left_out:
        del replica.get_submodule(path)[num_blocks:]
    return replica


def _plain(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)


def _opaque(param: nn.Parameter, memo: dict[int, object]) -> Tensor:
    """A parameter of the same class, with copies of what it carries. It does not know its module."""
    data = torch.empty(param.shape, dtype=param.dtype, device=META)  # to look at `param.data` would count it
    for tensor in tensors_beside(param):
        memo[id(tensor)] = data if is_alias(tensor, param) else torch.empty_like(tensor, device=META)
    copied = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    kept = {name: value for name, value in vars(param).items() if not isinstance(value, nn.Module)}
    vars(copied).update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    return copied
