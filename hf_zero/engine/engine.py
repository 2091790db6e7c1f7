"""The engine: gathers, reshards and reduces a model's units during forward, backward and the optimizer step.

A training step consists of five kinds of events, in this order. The hooks (`hooks.py`) and the optimizer raise them:

1. Before a module's forward (`begin_forward`, `before_block`), its parameters are gathered.
2. After the forward (`after_block`, `end_forward`), they are resharded. The slot keeps the values until another unit
   is gathered into it.
3. During backward, a unit is gathered again when the gradient of its output arrives (`before_backward`). The gradients
   of its parameters follow (`receive`), and the unit is reduced when backward has left it.
4. When backward ends (`_end_backward`), the remaining units are reduced, so that all ranks reduce the same units.
5. In the optimizer step (`finish_gradients`, `begin_update`, `end_step`), the masters are updated, and the compute
   copies follow.

The state of one forward is a `ForwardPass`, that of one backward a `BackwardPass`. Each is dropped when its pass ends
or fails, and its state with it.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident, local
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.comm.bus import LateChecks
from hf_zero.config import MemoryTier, Residency, ZeroConfig
from hf_zero.engine import buffers, guards
from hf_zero.engine.away import Placeholders, in_backward, is_transformed
from hf_zero.engine.divided import local_grad
from hf_zero.engine.flat import NamedShard, ParamInfo
from hf_zero.engine.gradient import AverageMemory, Gradient
from hf_zero.engine.patch import Uncopyable
from hf_zero.engine.schedule import LATE, LATE_WITHIN, Schedule, Stack, Tape
from hf_zero.engine.unit import Unit
from hf_zero.engine.vote import NO_NORM, vote
from hf_zero.errors import CommError, LifecycleError, UnsupportedError


if TYPE_CHECKING:
    from hf_zero.storage import DiskOffload


logger = logging.getLogger(__name__)

TRANSFORMED = (
    "the model's forward: a transform of torch.func (grad, jvp, vmap) cannot gather sharded parameters, because a "
    "gather writes to them; call it inside `with hf_zero.gathered(model):`, or use stage 2"
)
DOUBLE_BACKWARD = (
    "double backward: create_graph=True needs the parameters again after their gradients are reduced; compute "
    "the gradient penalty on the unsharded model"
)

# Replicas of shards are compared every so many updates. Each comparison is an extra collective.
COMPARE_EVERY = 16
OTHER_STREAM = (
    "backward: runs on another stream of the device than the one on which the model was sharded; autograd accumulates "
    "gradients on the latter, so they would be reduced before they are complete; shard the model on the stream that "
    "trains it"
)
HEAD_USED = (
    "{name}: is used before the blocks or between them without calling the head, but its gradients are reduced before "
    "the backward of the blocks; use it after the blocks, or, before the model is sharded, also make the head an "
    "attribute of another module, so that it stays gathered and is reduced at the end"
)


class Updates(Protocol):
    """The part of an optimizer step that runs during backward. It can be finished, so that masters can be read, or
    abandoned on all ranks."""

    def finish_update(self) -> None: ...
    def abandon(self) -> None: ...


class ShardedState(Protocol):
    """The interface of an optimizer over the shards for measuring its memory and detecting interrupted writes."""

    torn: str | None  # the operation that was interrupted while it changed the state; None if there was none

    def state_tensors(self) -> Iterable[tuple[Tensor, MemoryTier]]: ...
    def unsharded_state_nbytes(self) -> int: ...


def _nothing() -> None:
    """Default of an optional callback."""


class ZeroEngine(Uncopyable):
    """The units of a model, the memory and settings that they share, and the events of a step.

    Args:
        modules: The modules of the blocks.
        vocabulary: The modules of the embedding and the head, if they are separate units.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        comm: Comm,
        *,
        root: Unit,
        schedule: Schedule,
        modules: dict[Unit, nn.Module],
        vocabulary: dict[Unit, nn.Module],
        placeholders: Placeholders,
        average_memory: AverageMemory,
        bus: Bus,
    ):
        self.model = model
        self.bus = bus
        self.placeholders = placeholders
        self.average_memory = average_memory
        self.config = config
        self.comm = comm
        self.plan = config.plan(comm.shard_group.num_ranks)
        self.root = root
        self.schedule = schedule
        self.modules = modules
        self.vocabulary = vocabulary
        self.head = next((stack.head for stack in schedule.stacks if stack.head is not None), None)
        self.head_stays = False  # unsharded until backward ends: it was called before or between the blocks
        self.divided_over: Comm | None = None  # the tensor-parallel ranks; None without tensor parallelism
        self.compiled_with: dict | None = None  # options of `torch.compile`; None while blocks run eagerly
        # the units of the stacks: blocks, and embedding and head if they are units
        self.blocks = [unit for stack in schedule.stacks for unit in stack.units]
        self.units = [root, *self.blocks]
        self.order_reductions()
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.gradients = [gradient for unit in self.units for gradient in unit.gradients]
        self.disk: DiskOffload | None = None  # stores the masters between uses; None if they are in memory
        self.sinks: dict[int, Any] = {}  # destinations of weight gradients (`direct.Sink`), by `id` of the weight
        self.handles: list = []  # of everything installed on the model; each has `remove()`
        self.late_checks = LateChecks(bus, reads_at_once=not self.runs_ahead)
        bus.synchronize_before_end(self)
        self.shares_buffers = True  # rank 0's buffers are broadcast after each step
        self._shared_buffers = buffers.SharedBuffers(model, comm) if comm.num_ranks > 1 else None
        # whether the next backward is the last one before the step, so that stages 0 and 1 reduce during it; None: not
        # known, see `reducing_this_backward`
        self.reduces_this_backward: bool | None = None
        self._reducing: list[Pending] = []
        self.on_reduced: Callable[[Unit], None] | None = None  # called when a backward has averaged a unit
        self.updates: weakref.WeakSet[Updates] = weakref.WeakSet()  # of the optimizers
        # parameter name -> the operation that was interrupted while it changed values, so that only some are new
        self.torn: dict[str, str] = {}
        self.optimizer: weakref.ref[ShardedState] | None = None  # the newest; None before the first
        for unit in self.units:
            unit.finish_updates, unit.note_torn = self.finish_updates, partial(guards.note_torn, self)
        # raises for parameters added to the model later; None until `build` is done, and after `unshard`
        self.refuse_new_members: Callable[[], None] | None = None
        self._forward = ForwardPass(self)
        self._backward: BackwardPass | None = None  # None outside of a backward
        self._is_changing = False  # gradients are being changed, or an exception interrupted that
        self._has_voted = False  # the ranks have agreed on the current gradients, see `vote`
        self._is_order_known = self.comm.num_ranks == 1 or not self.blocks
        # 0-d fp32: factor that is still to be applied to the reduced gradients; a fused optimizer may apply it
        self.grad_scale: Tensor | None = None
        self._num_updates = 0  # begun so far
        # the stream of the nodes that accumulate gradients; None if there is only one stream
        self._stream = self.bus.current_stream() if self.comm.runs_ahead else None
        self.grad_norm: Tensor | None = None  # of the current gradients; None if not computed
        self.gradient_reads = guards.GradientReads()

    @property
    def stage(self) -> int:
        return self.config.stage

    @property
    def runs_ahead(self) -> bool:
        """Whether the host runs a step without waiting for the device. With offload it waits, because the host runs
        the update."""
        return self.comm.runs_ahead and not self.plan.is_offloaded

    @property
    def is_cast(self) -> bool:
        """Whether the parameters currently have another dtype, see `ShardedModel.computing_in`."""
        return any(flat.cast for flat in self.flats)

    @property
    def newest_optimizer(self) -> ShardedState | None:
        """The optimizer that was created last; None if it was freed."""
        return self.optimizer() if self.optimizer is not None else None

    # 1 and 2: forward

    def begin_forward(self, module: nn.Module, stack: Stack | None) -> None:
        """Prepares the forward of `module`: the model, or a module with blocks (`stack`) or root parameters."""
        if in_backward():
            self.unshard_around(with_head=self.is_head(module))
            return
        if self._forward.depth == 0:
            self.gradient_reads.end()
            guards.refuse_lost(self)
            if self.has_broken_off:
                self.drop_broken()
            self._refuse_spent()
            if is_transformed() and any(unit.is_sharded and not unit.num_gathered for unit in self.units):
                raise LifecycleError(TRANSFORMED)
        self._forward.begin(module, stack)

    def _refuse_spent(self) -> None:
        """Raises [`LifecycleError`] if backward has updated some units and the others may not be updated yet."""
        if self.plan.is_offloaded and any(gradient.is_spent for gradient in self.gradients):
            raise LifecycleError(
                "forward: the last backward has updated only some of the parameters (in_backward), and the step "
                "updates the others; call optimizer.step() or zero_grad() before the next forward"
            )

    def end_forward(self, stack: Stack | None, failed: bool) -> None:
        """Ends a forward that `begin_forward` prepared."""
        forward = self._forward
        if in_backward() or (failed and take_refusal()):
            return
        forward.end(stack, failed)
        if forward.depth:
            return
        self._forward = ForwardPass(self)
        if failed or not torch.is_grad_enabled():
            self.reshard_around()

    def leaves_alone(self, unit: Unit) -> bool:
        """See `ForwardPass`."""
        return self._forward.leaves_alone(unit)

    def before_block(self, unit: Unit, inputs_need_grad: bool) -> None:
        """Unshards a block's parameters for its forward or its recomputation."""
        if in_backward():
            self._open_backward().visit_recomputation(unit)
        else:
            self._forward.before_block(unit, inputs_need_grad, sees_order=not self._is_order_known)
        self._forward.running.append(unit)

    def after_block(self, unit: Unit) -> None:
        """Ends a block's forward."""
        if unit in self._forward.running:
            self._forward.running.remove(unit)
        if not in_backward():
            self._forward.after_block(unit)

    @property
    def gathers_stacks(self) -> bool:
        """Whether ranks exchange the values of several stacks, some of which a forward may skip. Inside `gathered`
        nothing is exchanged, and a rank may call the model alone."""
        if len(self.schedule.stacks) == 1 or self.comm.shard_group.num_ranks == 1:
            return False
        away = (flat for unit in self.blocks if not unit.num_gathered for flat in unit.flats)
        return any(flat.is_sharded and not flat.is_common for flat in away)

    def unshard_around(self, *, with_head: bool) -> None:
        """Gathers and unshards the root, and `with_head` also the head, if it is a unit."""
        units = [self.root, self.head] if with_head and self.head is not None else [self.root]
        for unit in units:
            unit.all_gather()
        for unit in units:
            unit.unshard()

    def is_head(self, module: nn.Module) -> bool:
        """Whether a module is the head, and the head is a unit."""
        return self.head is not None and self.vocabulary[self.head] is module

    def reshard_around(self) -> None:
        """Puts placeholders into the parameters of root and head."""
        for unit in (self.root, self.head):
            if unit is not None:
                unit.reshard()

    # 3 and 4: backward

    def before_backward(self, *, unit: Unit | None = None, tape: Tape | None = None, is_heads: bool = False) -> None:
        """Handles the arrival of an output's gradient: of the block `unit`, of the model whose forward recorded
        `tape`, or of the head. Raises [`UnsupportedError`] for double backward."""
        backward = self._open_backward(refuse_double=True)
        if tape is not None:
            backward.open_tape(tape)
        if unit is not None:
            backward.visit(unit, tape)
        if is_heads:
            self.unshard_around(with_head=True)  # a recomputation may have gathered the embedding in its slot

    @contextmanager
    def reducing_this_backward(self, loss: Tensor, reduces: bool = True) -> Iterator[None]:
        """See `ShardedModel.reducing_this_backward`. A hook on the loss opens the backward, because its first
        parameter gradient may arrive in a nested backward (reentrant checkpointing)."""
        handle = loss.register_hook(lambda _grad: self.before_backward()) if loss.requires_grad else None
        self.reduces_this_backward = reduces
        try:
            yield
        finally:
            self.reduces_this_backward = None
            if handle is not None:
                handle.remove()

    def _open_backward(self, *, refuse_double: bool = False) -> "BackwardPass":
        """Returns the current backward. The first gradient opens it and unshards the root; gradients of a backward or
        a step that raised are dropped first. With `refuse_double`, raises [`UnsupportedError`] for double
        backward."""
        if refuse_double and torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        if self._is_changing or (self._backward is not None and self._backward.callback() is None):
            self.drop_broken()
        if self._backward is None:
            self._refuse_other_stream()
            self.gradient_reads.end()
            self._backward = BackwardPass(self, self._forward.running, self._end_backward)
            self.grad_norm, self._has_voted = None, False
            self._apply_grad_scale()
            self.unshard_around(with_head=True)
        return self._backward

    def _refuse_other_stream(self) -> None:
        if self._stream is not None and self._stream != self.bus.current_stream():
            raise UnsupportedError(OTHER_STREAM)

    def receive(self, unit: Unit, gradient: Gradient, index: int, param: nn.Parameter, *_) -> None:
        """Takes one parameter's gradient from autograd. Hook of the node that has just accumulated it."""
        if self._backward is None:  # without a hook on an output, a backward begins here
            self.gradient_reads.end()
        grad, param.grad = param.grad, None  # first: opening a backward may drop the gradients of one that raised
        backward = self._open_backward(refuse_double=True)
        if grad is not None:
            self._expect(backward, unit, gradient, index)
            gradient.receive(index, grad if self.divided_over is None else local_grad(param, grad))
        if self.plan.grad is not Residency.SHARDED:
            backward.note(unit)

    def destination(self, unit: Unit, gradient: Gradient, index: int) -> tuple[Tensor, bool]:
        """Returns the memory for a parameter's gradient that is about to be computed, and whether the gradient must be
        added to values that are already there."""
        self._expect(self._open_backward(refuse_double=True), unit, gradient, index)
        self.comm.shard_group.progress()
        return gradient.destination(index)

    def _expect(self, backward: "BackwardPass", unit: Unit, gradient: Gradient, index: int) -> None:
        """Acquires memory for the gradients of a unit before one of them is stored. Raises [`LifecycleError`] if the
        parameters cannot have been unsharded when the gradient was computed."""
        if unit in backward.num_coming:
            backward.refuse_late(unit)
        if unit is self.head and backward.has_closed(unit):
            raise LifecycleError(HEAD_USED.format(name=gradient.flat.infos[index].name))
        if not unit.is_unsharded and not unit.is_embedding:
            raise LifecycleError(
                f"{gradient.flat.infos[index].name}: a gradient reached unit {unit.name!r} by another way than the "
                "outputs of its forward, while its parameters were sharded; return the tensor from the block's "
                "forward, in a tuple or dict, use the parameter nowhere else, or use stage 2"
            )
        if gradient.full is None:
            unit.lend_gradients()

    @property
    def sums_this_backward_locally(self) -> bool:
        """Whether the next backward keeps its gradients on this rank, because a later one reduces them together."""
        return self.reduces_this_backward is False and self._can_reduce_later

    @property
    def _can_reduce_later(self) -> bool:
        return self.comm.num_ranks > 1 and self.plan.grad is not Residency.SHARDED and not self.plan.is_offloaded

    def reduced_early(self) -> list[Unit]:
        """Returns the units that stages 0 and 1 reduce during a backward, in the order of all ranks: the units that
        every backward reduces, or if there are none, those that this backward reduces (`reduces_this_backward`)."""
        exchanges = self.divided_over is not None or self.config.sequence_parallel > 1  # collectives during backward
        if not self._can_reduce_later or exchanges or self.sums_this_backward_locally:
            return []
        each = [unit for unit in self.reduction_order if unit.reduces_each_backward]
        return each or [unit for unit in self.reduction_order if unit.is_trainable and self.reduces_this_backward]

    def order_reductions(self) -> None:
        """Sets the order in which units are reduced when the tape does not determine it. It is the same on all ranks:
        from the last unit to the first, then embeddings, whose gradients arrive after those of all blocks, then the
        root."""
        expected = [unit for stack in self.schedule.stacks for unit in stack.units]
        self.reduction_order = [*sorted(reversed(expected), key=lambda unit: unit.is_embedding), self.root]

    def reduce(self, unit: Unit, at_step: bool = False) -> None:
        """Starts the reduction of a unit's gradients, after its backward or `at_step`."""
        if at_step:
            self._reducing.append(unit.reduce_gradients(at_step=True))
        else:
            on_reduced = partial(self.on_reduced, unit) if self.on_reduced else _nothing
            self._reducing.append(unit.reduce_gradients(on_reduced))

    def _end_backward(self) -> None:
        self._refuse_other_stream()  # backward may have begun at a node that accumulates
        if self._backward is not None:  # else it was dropped meanwhile
            self._backward.finish()
            self._backward = None
            self.gradient_reads.watch(flat for flat in self.flats if flat.trainable)

    def lend_slots(self) -> None:
        """Lets the remaining averages of this step reuse the slots, after the last gather before the step. Slots whose
        values the step does not change keep them."""
        gradients = [gradient for gradient in self.gradients if not (gradient.is_in_place or gradient.is_on_host)]
        # the root's slot last, so that the averages of blocks leave it to the root's
        units = [unit for unit in [*self.blocks, self.root] if unit.slot is not None]
        for slot in {id(unit.slot): unit.slot for unit in units}.values() if gradients else ():
            holder = slot.holder
            if isinstance(holder, Unit) and not holder.is_trainable:
                continue
            if holder is not None:
                holder.evict()
            self.average_memory.lend(slot, gradients)

    def wait_for_reductions(self) -> None:
        """Waits for all pending reductions. Copies to the host may still be pending."""
        for pending in self._reducing:
            pending.wait()
        self._reducing.clear()
        for slots in dict.fromkeys(unit.gradient_slots for unit in self.units if unit.gradient_slots is not None):
            slots.wait_for_all()

    @property
    def has_broken_off(self) -> bool:
        """Whether a backward, or work on the gradients after it, has begun and not ended."""
        return self._backward is not None or self._is_changing

    def recover(self) -> None:
        """Cleans up after a backward or a forward that did not end: after `KeyboardInterrupt`, for example, torch does
        not call forward hooks."""
        if self.has_broken_off:
            self.drop_broken()
        elif self._forward.depth or self._forward.running:
            self._end_passes()

    def _end_passes(self) -> None:
        """Ends all forwards and backwards, wherever they are."""
        for unit in self.units:
            unit.reshard()
        for stack in self.schedule.stacks:
            stack.reset()
        self._forward, self._backward = ForwardPass(self), None

    def drop_broken(self) -> None:
        """Drops the gradients of this step after a backward or a reduction raised. If only some ranks do so, the next
        vote raises on all of them."""
        logger.warning("hf_zero: the last backward did not finish; the gradients since the last step are dropped")
        if self._backward is not None:
            self._backward.reduce_early()
        self.wait_for_reductions()
        try:
            self.bus.wait_for_jobs()
        except Exception as error:
            logger.warning("hf_zero: gradients already copied to the host are dropped too: %s", error)
        sums_locally = self._backward is not None and self._backward.sums_locally
        for unit in self.units:
            unit.drop_gradients(sums_locally)
        self._end_passes()
        self.schedule.reset()
        self.schedule.drop()
        self.head_stays = False
        self._is_changing = self._has_voted = False
        for updates in list(self.updates):
            updates.abandon()

    # 5: the optimizer's step

    def finish_gradients(self, *clips: float, applies_scale: bool = True) -> None:
        """Reduces all gradients that no backward has reduced (stages 0 and 1), and votes on them, unless that is done.

        Args:
            clips: Order of the norm and bound, if the caller clips. Each call compares them between the ranks.
            applies_scale: If False, the caller applies the scale, see `take_grad_scale`.
        """
        self.recover()
        with self.changing_gradients():
            # first: other ranks may wait for these reductions in a backward
            for unit in self.reduction_order:
                if any(gradient.is_due_at_step for gradient in unit.gradients):
                    self.reduce(unit, at_step=True)
            self.wait_for_reductions()
            self.wait_for_host()
        if clips or not self._has_voted:
            self.vote(*clips)
        if applies_scale:
            with self.changing_gradients():
                self._apply_grad_scale()

    def vote(self, norm_type: float = NO_NORM, max_norm: float = float("inf")) -> None:
        """Agrees with the other ranks on the gradients of this step, see `hf_zero.engine.vote`. The arguments are how
        the caller clips."""
        self.recover()
        vote(self, norm_type, max_norm)
        self._has_voted = True

    @contextmanager
    def changing_gradients(self) -> Iterator[None]:
        """Wraps work on the gradients. If it raises, some may have changed, and the next event drops all of them."""
        self._is_changing = True
        yield
        self._is_changing = False

    def take_grad_scale(self) -> Tensor | None:
        """Returns and clears `grad_scale`. The caller applies it."""
        scale, self.grad_scale = self.grad_scale, None
        return scale

    def _apply_grad_scale(self) -> None:
        scale = self.take_grad_scale()
        reduced = [gradient.reduced for gradient in self.gradients if gradient.is_reduced]
        for device in {grad.device for grad in reduced} if scale is not None else ():
            torch._foreach_mul_([grad for grad in reduced if grad.device == device], scale.to(device))

    def take_writes(self) -> None:
        """Applies user writes to the parameters to the masters before an update, see `guards`. Collective. Raises
        [`LifecycleError`] on all ranks if ranks have written different values or a write cannot take effect."""
        self.recover()
        if not self.is_cast:
            guards.take(self)
        self._num_updates += 1
        if self._num_updates % COMPARE_EVERY == 0:
            guards.compare_replicas(self)

    def begin_update(self, finish: Callable[[], None] = lambda: None) -> None:
        """Waits until no rank and no copy to its device reads the masters, which are about to be updated. Collective.
        Calls `finish` before it waits, because other ranks may wait for that. Raises [`LifecycleError`] inside
        `hf_zero.gathered` or `computing_in`, after `unshard`, and if a sharded parameter was written or used while its
        values were away."""
        if not self.handles:
            raise LifecycleError("the model was unsharded: shard it again, and build its optimizer anew")
        self.gradient_reads.end()
        guards.refuse_lost(self)
        guards.refuse_in_context(self, "new values")
        finish()
        self._wait_for_readers()
        self.wait_for_copies()

    def _wait_for_readers(self) -> None:
        memory = self.comm.shard_group.shared_memory
        if memory is not None:
            memory.barrier()

    def wait_for_copies(self) -> None:
        """Blocks the host until no copy to the device reads host memory that is about to be updated: parameters copied
        for a gather, and masters copied to compute copies. `Pending.wait` makes the device wait, not the host."""
        if self.plan.is_offloaded:
            self.bus.synchronize()

    def wait_for_host(self) -> None:
        """Waits for the jobs of the bus's threads. If a job fails, its rank raises that error, and all others raise
        [`CommError`]."""
        if self.plan.is_offloaded:
            run_on_all_ranks(self.comm, "an update on the host", self.bus.wait_for_jobs, CommError)

    def finish_updates(self) -> None:
        """Finishes pending updates before the masters are read, and raises the results of late checks. Collective."""
        self.finish_host_updates()
        self.late_checks.settle()

    def finish_host_updates(self) -> None:
        """Finishes pending updates on the host. Collective."""
        for updates in list(self.updates):
            updates.finish_update()

    def mark_updated(self, only_trained: bool = False, only_used: bool = False) -> None:
        """Updates the compute copies after the masters changed. Collective.

        Args:
            only_trained: Skip frozen parameters, because they did not change.
            only_used: Skip parameters without a gradient, because they did not change.
        """
        for pending in [pending for unit in self.units for pending in unit.refresh(only_trained, only_used)]:
            pending.wait()
        for flat in self.flats:
            flat.mark_clean()
        self._wait_for_readers()
        self.schedule.reset()  # a backward through the old values would be wrong anyway

    def end_step(self) -> None:
        """Ends an optimizer step: updates the compute copies and drops the gradients."""
        self.mark_updated(only_trained=True, only_used=True)
        self.drop_step()
        if not self._is_order_known:
            self._agree_on_order()

    def drop_step(self) -> None:
        """Drops the gradients of a step that all ranks have taken or skip together."""
        self.clear_gradients()
        self.schedule.end_step()
        self.share_buffers()

    def clear_gradients(self, zeroed: bool | None = None) -> None:
        """Drops all gradients and frees the memory of their shards. `zeroed`: see `Gradient.clear`."""
        if not in_backward():
            self.recover()
        self.gradient_reads.end()
        self.grad_scale = self.grad_norm = None
        self._has_voted = False
        for updates in list(self.updates):
            updates.abandon()
        self.schedule.drop()
        for gradient in self.gradients:
            gradient.clear(zeroed)

    def share_buffers(self) -> None:
        """Broadcasts rank 0's buffers, as DDP does before the first forward of a step."""
        if self.shares_buffers and self._shared_buffers is not None:
            self._shared_buffers.share()

    def evict_all(self) -> None:
        """Drops the contents of all slots before the values change, so that none keeps old values if the change is
        interrupted."""
        for unit in self.units:
            unit.evict()

    def _agree_on_order(self) -> None:
        """Makes the order in which the ranks have called the blocks the expected one, if all ranks that have called
        the most stacks agree. Otherwise the ranks compare again after the next step, unless all ranks have called as
        many stacks."""
        seen = self.comm.all_gather_object(self.schedule.seen_indices(), what="the end of a step")
        most = max(map(len, seen))
        full = [each for each in seen if len(each) == most]
        is_same = all(each == full[0] for each in full)
        if is_same:
            self.schedule.expect([[self.units[index] for index in indices] for indices in full[0]])
            self.order_reductions()
            in_order = [unit for stack in self.schedule.stacks for unit in stack.units]
            self._reassign_slots([unit for unit in in_order if unit in self.modules and unit.slot is not None])
        self._is_order_known = is_same or len(full) == len(seen)

    def _reassign_slots(self, units: list[Unit]) -> None:
        """Assigns different slots to neighbours in a new order, so that one can be gathered while the other is used.
        Called between steps, when autograd holds no views of the slots."""
        slots = list({id(unit.slot): unit.slot for unit in units}.values())
        for unit in units:
            unit.evict()
        for slot in slots:
            if slot.holder is not None:
                slot.holder.evict()
            slot.holder = None
        for position, unit in enumerate(units):
            unit.use_slot(slots[position % len(slots)])

    # Values of the masters

    def check_before_save(self) -> None:
        """Checks before a save that all values belong to the same step. Collective. Raises [`LifecycleError`] on all
        ranks if a write was interrupted, or if ranks with the same shard have different values."""
        self.compare_before_save()
        run_on_all_ranks(self.comm, "saving", partial(guards.refuse_torn, self), LifecycleError)

    def compare_before_save(self) -> None:
        """Finishes updates, and checks that ranks with the same shard have the same values. Collective."""
        self.finish_updates()
        guards.compare_replicas(self)
        self.late_checks.settle()

    def param_infos(self) -> list[ParamInfo]:
        """Returns the infos of all parameters in the model's order, tied ones once. Equal on all ranks."""
        self._refuse_divided()
        by_name = {info.name: info for flat in self.flats for info in flat.infos}
        return [by_name[name] for name, _ in self.model.named_parameters() if name in by_name]

    def named_shards(
        self, resident: bool = False, values: bool = True, only: Collection[str] | None = None
    ) -> Iterator[NamedShard]:
        """Yields this rank's ranges of the masters. Over all ranks, the ranges cover each parameter exactly once.

        Args:
            resident: Yield all ranges that this rank holds (at stage 0, everything). Writes to them take effect.
            values: Whether values are needed. If not, only shapes and dtypes are valid, and nothing is read from disk.
            only: Names of the parameters to yield. Buffers with none of them are not read.
        """
        self._refuse_divided()
        self.finish_updates()
        flats = [flat for flat in self.flats if only is None or any(info.name in only for info in flat.infos)]
        if values and not self.is_cast:
            guards.take_here(self, flats)
        for flat in flats:
            masters = flat.masters.pieces(writes=resident) if values else [(flat.masters.values, flat.masters.covers)]
            for master, covers in masters:
                for shard in flat.named_shards(master, covers, flat.masters.covers if resident else flat.part):
                    if only is None or shard.name in only:
                        yield shard

    def _refuse_divided(self) -> None:
        if self.divided_over is not None:
            raise UnsupportedError(
                "checkpoints of tensor-parallel models are not supported; save the weights with "
                "`with hf_zero.gathered(model): model.save_pretrained(folder)` on all ranks"
            )


_this_thread = local()  # `is_refused`: `ForwardPass.begin` has raised for a forward that has not ended yet


def take_refusal() -> bool:
    """Returns whether the forward that ends now on this thread was refused when it began, and clears the flag."""
    return vars(_this_thread).pop("is_refused", False)


class ForwardPass:
    """State of the current outermost forward. Between forwards, an idle instance tracks blocks that are called
    directly.

    The outermost forward unshards the root. Before a block runs, its unit is unsharded, and the all-gather of the next
    unit starts. After the block, its unit is resharded. The slot keeps the values until another unit is gathered into
    it.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._schedule = engine.schedule
        self.depth = 0  # number of nested forwards of hooked modules
        self.has_backward = True  # whether a backward may follow
        self.running: list[Unit] = []  # units whose forward is running
        self._thread = get_ident()  # of the outermost forward
        self._outermost: nn.Module | None = None  # the outermost module, until its first unit is gathered
        self._agrees = False  # whether the ranks agree on each stack of this forward
        self._has_several = False  # whether they also agree on its end, because the module has several stacks
        self._order = 0  # hash of the order in which units were gathered, to compare it between ranks
        self._last_taken: Unit | None = None  # the last unit in that hash
        self._last: Unit | None = None  # the block that was called last and is still unsharded

    def begin(self, module: nn.Module, stack: Stack | None) -> None:
        """Begins the forward of the model or of a module with blocks (`stack`) or root parameters. After the gather of
        the root, that of the unit with which the module's last forward began starts too, before anything waits for the
        root. Raises [`LifecycleError`] during another thread's forward."""
        if self.depth == 0:
            self._thread = get_ident()
        elif self._thread != get_ident() and any(
            not unit.num_gathered for unit in self._engine.units if unit.is_sharded
        ):
            _this_thread.is_refused = True
            raise LifecycleError(
                "the model is called by two threads at a time, but both would use the same gathered parameters; call "
                "it from one thread at a time, or inside `with hf_zero.gathered(model):`"
            )
        self._engine.root.all_gather()
        if stack is not None:
            stack.is_open = False
        if self.depth == 0:
            self._schedule.begin_tape()
            self._agrees = self._engine.gathers_stacks
            self._has_several = self._agrees and module in self._schedule.with_several
            self._schedule.num_with_several += self._has_several
            self._order, self._last_taken = 0, None
            self.has_backward = torch.is_grad_enabled()
            self._outermost, first = module, self._schedule.first_of.get(module)
            if first is not None and first.disk_prefetcher is None:
                prefetch(self._engine.root, [first], self.running, 1)
        self.depth += 1
        is_head = self._engine.is_head(module)
        if is_head and torch.is_grad_enabled() and not self._schedule.is_behind(self._engine.head):
            self._engine.head_stays = True
        self._engine.unshard_around(with_head=is_head)
        if self.depth == 1 and self._engine.blocks:
            self._engine.blocks[0].prefetch_from_disk()

    def end(self, stack: Stack | None, failed: bool) -> None:
        """Ends a forward. Gathers the units of its stack that were not called too, so that all ranks gather the same
        units before any collective that user code issues next."""
        try:
            self._end_stacks(stack, failed)
        finally:
            self.depth = max(0, self.depth - 1)
        if not failed:
            self._return_head()
        if stack is not None or self.depth == 0:
            self.reshard_last()

    def _end_stacks(self, stack: Stack | None, failed: bool) -> None:
        if stack is not None:
            if not failed:
                self._agree_on_stack(stack)
            self._take_rest(stack, failed)
            if stack.head is not None and not failed:
                stack.head.unshard()  # user code may read its weight without calling it
        if self.depth == 1 and self._has_several:
            for each in self._schedule.stacks:
                if each.is_open:  # another module than its owner called its blocks
                    self._take_rest(each, failed)
            if not failed:
                self._agree_on_stack(None)

    def _take_rest(self, stack: Stack, failed: bool = False) -> None:
        """Gathers the skipped units of a stack, unless the forward failed."""
        rest = stack.finish()
        self._take([] if failed else rest, stack)
        stack.reset()

    def leaves_alone(self, unit: Unit) -> bool:
        """Whether nothing is to be done around a block: a `gathered` context keeps its parameters gathered, and the
        forward has no backward."""
        return unit.num_gathered > 0 and self.depth > 0 and not self.has_backward and not torch.is_grad_enabled()

    def before_block(self, unit: Unit, inputs_need_grad: bool, sees_order: bool) -> None:
        """Unshards a block for its forward. The gather of the next unit starts before this one is waited for, which
        keeps the link busy.

        Args:
            inputs_need_grad (`bool`): Whether an input of the block requires a gradient.
            sees_order (`bool`): Whether to record the order in which blocks are called.
        """
        self.reshard_last()
        stack = self._schedule.stack_of[unit]
        if sees_order:
            self._schedule.see(unit)
        stack.carries_grad = stack.carries_grad or inputs_need_grad
        self._agree_on_stack(stack)
        self._take(stack.advance(unit), stack)
        num_ahead = self._engine.config.prefetch_units
        prefetch(unit, self._schedule.after(unit, num_ahead + 1), self.running, num_ahead)
        unit.unshard()

    def _agree_on_stack(self, stack: Stack | None) -> None:
        """Agrees with the other ranks that `stack` is next, or that the forward ends (`None`). The ranks choose the
        earliest requested stack. Ranks that skip it gather it anyway, then ask again. Raises [`CommError`] on all
        ranks if they are not in the same forward."""
        engine, stacks = self._engine, self._schedule.stacks
        if not (self._agrees and self.depth) or (stack is not None and stack.is_open):
            return
        place = len(stacks) if stack is None else stacks.index(stack)
        carries_grad = stack is not None and stack.carries_grad
        while True:
            own = torch.tensor([self._schedule.num_with_several, self._order, place, carries_grad])
            rows = engine.comm.on_host.all_gather_vector(own, what="the order of a forward")
            counts, orders, places, carry = rows.unbind(1)
            self._schedule.refuse_unlike(counts, orders)
            first = int(places.min())
            if first == len(stacks):
                return
            found = stacks[first]
            found.carries_grad = bool(carry[places == first].any())
            if found is stack:
                stack.is_open = True
                return
            self._take_rest(found)

    def after_block(self, unit: Unit) -> None:
        """Ends a block's forward. The block is resharded when the next block begins or the forward ends, so that user
        hooks on the block still find its parameters."""
        if unit not in self.running:
            self._last = unit
        if unit.is_embedding:
            self._return_head()

    def _return_head(self) -> None:
        """Gathers the head again after a separate call of the embedding, which shares its slot, if a backward is
        expected: losses that use the head's weight directly read its values from the slot."""
        head = self._engine.head
        if self.depth == 0 and head is not None and self._schedule.expects(head):
            head.all_gather()
            head.unshard()

    def reshard_last(self) -> None:
        """Reshards the block that was called last."""
        last, self._last = self._last, None
        if last is not None and last not in self.running:
            last.reshard()

    def _take(self, units: list[Unit], stack: Stack) -> None:
        """Gathers units of a stack, also those that this rank skips, and records the units that backward will need."""
        if self.depth == 0:
            self.has_backward = torch.is_grad_enabled()  # the block was called directly
        if units and self._outermost is not None and not units[0].num_gathered:
            self._schedule.first_of[self._outermost], self._outermost = units[0], None
        for unit in units:
            # a repeated call, of the last unit or of an embedding still in its slot, does not change the order
            is_there = unit.is_embedding and unit.slot is not None and unit.slot.holder is unit
            if unit is not self._last_taken and not is_there:
                self._order, self._last_taken = (31 * self._order + unit.index + 1) % 2**31, unit
            stack.carries_grad = stack.carries_grad or unit.is_trainable
            if self.has_backward and stack.carries_grad and not unit.is_embedding:
                self._schedule.record(unit)
            self._all_gather(unit)

    def _all_gather(self, unit: Unit) -> None:
        holder = unit.slot.holder if unit.slot is not None else None
        if holder is not unit and holder in self.running:
            raise LifecycleError(
                f"unit {unit.name!r}: is called inside the forward of unit {holder.name!r}, and both use the same "
                "buffer; increase prefetch_units by one"
            )
        unit.all_gather()


class BackwardPass:
    """One backward, from its first gradient until every unit is reduced.

    The hook on a block's outputs unshards its unit. When the hook of the next block fires, the gradients of the
    previous one are complete, and their reduction starts. Remaining units are reduced at the end, in a fixed order, so
    that every rank reduces every unit once per backward.

    Args:
        running: Units whose forward is running; they may be recomputed.
        at_end: Called at the end of autograd's backward, unless that raises.
    """

    def __init__(self, engine: ZeroEngine, running: list[Unit], at_end: Callable[[], None]):
        self._engine = engine
        self._schedule = engine.schedule
        self._num_ahead = engine.config.prefetch_units
        self._running = running
        self._current: Unit | None = None  # the unit whose backward is running
        self._tapes: list[Tape] = []  # of the forwards that it has reached; it has passed over all but the last
        self._place = 0  # on the last tape: the number of units that it has not reached
        self._num_recomputed = 0  # how many of them, from the end, a recomputation has passed over
        self._rewound: set[Unit] = set()  # units that it has reached on a tape
        self._closed: set[Unit] = set()  # units whose reduction has begun
        self._waiting: list[Unit] = []  # complete units that wait for the turn of their stack
        callback = partial(at_end)
        # Autograd holds the only strong reference, so the weak one is alive exactly while autograd's backward runs.
        self.callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._schedule.begin_backward()
        self._task = torch._C._current_graph_task_id()
        # If one loss combines several models, only the first reduces early, so that the order is fixed.
        with _passes_lock:
            is_first = not any(each.callback() for each in _passes if each._task == self._task)
            _passes.add(self)
        self.sums_locally = engine.sums_this_backward_locally
        # units that are reduced during this backward, in the order of all ranks; none at stages 2 and 3
        self._early = engine.reduced_early() if is_first and self._schedule.nests is False else []
        # by unit: number of parameters whose gradients are not accumulated yet
        self.num_coming = {unit: sum(len(each.flat.params) for each in unit.gradients) for unit in self._early}

    def open_tape(self, tape: Tape) -> None:
        """Handles the arrival of the gradient of the output of a model or block whose forward recorded `tape`. Passes
        over the rest of the last tape."""
        if not any(tape is opened for opened in self._tapes):
            self._rewind(None)
            self._schedule.open(tape)
            self._tapes.append(tape)
            self._place = len(tape.units)
        head = self._engine.head
        if head is not None and self._left_on(tape)[-1:] == [head]:  # it has no hook of its own
            self.visit(head, tape)

    def has_closed(self, unit: Unit) -> bool:
        """Whether the reduction of a unit has begun. No gradient may arrive after that."""
        return unit in self._closed

    def refuse_late(self, unit: Unit) -> None:
        """Raises [`LifecycleError`] for a gradient that arrives, in a nested backward, after its unit was reduced."""
        if unit in self._closed:
            self._schedule.nests = True
            raise LifecycleError(LATE_WITHIN.format(name=unit.name))

    def note(self, unit: Unit) -> None:
        """Counts a parameter whose gradient autograd has accumulated, and reduces the complete units, in order. In a
        nested backward (reentrant checkpointing) a parameter may get another gradient. The remaining units are then
        reduced at the end, and no later backward reduces early."""
        if torch._C._current_graph_task_id() != self._task:
            self._schedule.nests = True
        elif unit in self.num_coming:
            self.num_coming[unit] -= 1
            if not self._schedule.nests:
                self.reduce_early(only_complete=True)

    def reduce_early(self, *, only_complete: bool = False) -> None:
        """Reduces the remaining units in `_early`. A rank whose backward raised also calls this, because other ranks
        wait for it."""
        while self._early and not (only_complete and self.num_coming[self._early[0]]):
            unit = self._early.pop(0)
            self._closed.add(unit)
            self._engine.reduce(unit, at_step=not unit.reduces_each_backward)

    def visit(self, unit: Unit, tape: Tape | None) -> None:
        """Unshards the unit that backward has reached, and reduces the units that backward has left. `tape`: that of
        the forward that used the unit; `None` in a recomputation."""
        if unit is not self._current or not unit.is_unsharded:
            tape = tape or self._find_tape(unit)
            if unit in self._left_on(tape):
                self._rewind(unit)
            else:
                self._come_to(unit, self._coming())
            unit.fill_slot()
            unit.unshard()

    def visit_recomputation(self, unit: Unit) -> None:
        """Unshards a block that gradient checkpointing calls again before backward (Chen et al., arXiv 1604.06174).
        Passes over the uses from the end of the tape to that of the block. They stay on the tape."""
        if unit is not self._current and (self._tapes or self._find_tape(unit)):
            units, start = self._tapes[-1].units, self._place - self._num_recomputed
            end = next((at for at in reversed(range(start)) if units[at] is unit), start)
            while start > end:
                start -= 1
                self._num_recomputed += 1
                if units[start] is not unit:
                    self._come_to(units[start], self._coming(start))
        unit.all_gather()
        unit.unshard()

    def finish(self) -> None:
        """Reduces all remaining units, in a fixed order, and reshards everything."""
        engine = self._engine
        self._rewind(None)
        if self._schedule.is_last_backward:
            engine.lend_slots()
        self._turn_to(None)
        self.reduce_early()
        for unit in engine.reduction_order:
            if self.sums_locally:
                unit.sum_gradients_locally()
            elif unit not in self._closed and unit.reduces_each_backward:
                engine.reduce(unit)
            elif unit in self._closed and unit.has_late:
                raise LifecycleError(LATE.format(name=unit.name))
        engine.wait_for_reductions()
        for unit in engine.units:
            unit.reshard()
        self._schedule.end_backward()
        if engine.head is not None and not self._schedule.expects(engine.head):
            engine.head_stays = False

    def _find_tape(self, unit: Unit) -> Tape | None:
        """Returns the tape with the next use of a unit, opened: preferably the last one."""
        if self._tapes and unit in self._left_on(self._tapes[-1]):
            return self._tapes[-1]
        tape = self._schedule.tape_of(unit)
        if tape is not None:
            self.open_tape(tape)
        return tape

    def _left_on(self, tape: Tape | None) -> list[Unit]:
        """Returns the units of a tape that this backward has not reached."""
        return tape.units[: self._place] if tape is not None and tape is self._tapes[-1] else []

    def _rewind(self, to: Unit | None) -> None:
        """Rewinds the last tape to the last use of a unit, or to its beginning (`None`)."""
        unit = None
        while self._place and (to is None or unit is not to):
            self._place -= 1
            unit = self._schedule.reach(self._tapes[-1], self._place)
            self._rewound.add(unit)
            was_passed, self._num_recomputed = self._num_recomputed > 0, max(0, self._num_recomputed - 1)
            if unit is to or not was_passed:
                self._come_to(unit, self._coming())

    def _coming(self, stop: int | None = None) -> list[Unit]:
        """Returns the units that backward is likely to use next: those on the last tape before `stop`."""
        stop = self._place if stop is None else stop
        return self._tapes[-1].units[max(0, stop - self._num_ahead - 1) : stop][::-1] if self._tapes else []

    def _come_to(self, unit: Unit, coming: list[Unit]) -> None:
        """Gathers a unit, reduces the previous one, and prefetches the `coming` units, whether or not this rank uses
        the unit. So all ranks issue the same sequence of collectives, as one communicator requires."""
        unit.all_gather()
        self._turn_to(unit)
        prefetch(unit, coming, self._running, self._num_ahead)

    def _turn_to(self, unit: Unit | None) -> None:
        if unit is self._current:
            return
        done, self._current = self._current, unit
        if done is None or (done is self._engine.head and self._engine.head_stays):
            return
        done.reshard()
        is_known = done in self._closed or done in self._waiting
        # a unit that was not on a tape may be used again
        is_left = self._schedule.expects(done) or (self._tapes and done in self._left_on(self._tapes[-1]))
        is_complete = done in self._rewound and not is_left
        if self._engine.plan.grad is Residency.SHARDED and is_complete and not is_known:
            self._waiting.append(done)
            self._close_waiting()

    def _close_waiting(self) -> None:
        """Reduces complete units as far as the order of all ranks allows: stacks from the last to the first. Units of
        a skipped stack are reduced in its turn, and units of earlier stacks wait for theirs."""
        behind: Stack | None = None
        for stack in reversed(self._schedule.stacks):
            left = [] if behind is None else [unit for unit in behind.units if unit not in self._closed]
            if any(unit.is_trainable and not unit.is_embedding for unit in left):
                return
            units = [unit for unit in self._waiting if self._schedule.stack_of[unit] is stack]
            if self._schedule.is_left_out(stack):
                units = [u for u in reversed(stack.units) if not (u.is_embedding or u in self._closed)]
            for unit in units:
                self._closed.add(unit)
                self._engine.reduce(unit)
            self._waiting = [unit for unit in self._waiting if unit not in self._closed]
            behind = stack


_passes: weakref.WeakSet[BackwardPass] = weakref.WeakSet()
_passes_lock = Lock()  # autograd runs one thread per device


def prefetch(unit: Unit, candidates: list[Unit], running: list[Unit], count: int) -> None:
    """Gathers the next units while slots are free, and starts reading the unit after them from disk.

    Args:
        candidates: The `count + 1` units that are likely to be used next.
        running: Units whose forward is running.
        count: How many of them to gather.
    """
    for position, candidate in enumerate(candidates):
        is_taken = candidate.slot is unit.slot or (candidate.slot and candidate.slot.holder in running)
        if is_taken or position == count:
            candidate.prefetch_from_disk()
            break
        candidate.all_gather()
