"""The engine: a model's units, driven through forward, backward and the optimizer's step."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.engine import writes
from hf_zero.engine.away import in_backward, is_transformed
from hf_zero.engine.divided import local_grad
from hf_zero.engine.flat import NamedShard, ParamInfo
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.gradient_reads import GradientReads
from hf_zero.engine.model_units import ModelUnits
from hf_zero.engine.passes import BackwardPass, ForwardPass, take_refusal
from hf_zero.engine.schedule import Stack
from hf_zero.engine.unit import Phase, Unit
from hf_zero.errors import LifecycleError, UnsupportedError


logger = logging.getLogger(__name__)

TRANSFORMED = (
    "the model's forward: a transform of torch.func (grad, jvp, vmap) cannot gather sharded parameters, which writes "
    "to them; call it inside `with hf_zero.gathered(model):`, or use stage 2"
)
DOUBLE_BACKWARD = (
    "double backward: create_graph=True needs the parameters once more after their gradients are reduced; "
    "compute the gradient penalty on the unsharded model"
)

# After so many updates, replicas of shards are compared, which takes an exchange of its own.
COMPARE_EVERY = 16
OTHER_STREAM = (
    "backward: runs on another stream of the device than the one on which the model was sharded, where autograd "
    "accumulates its gradients; they would be reduced before they are complete; shard the model on the stream that "
    "trains it"
)
HEAD_USED = (
    "{name}: is used before the blocks or between them, otherwise than by a call of the head, and its gradients are "
    "reduced before the blocks' backward; use it behind them, or make the head an attribute of another module too, "
    "before the model is sharded, so that it stays whole and is reduced at the end"
)


class ZeroEngine(ModelUnits):
    """Brings a model's units where forward, backward and the optimizer need them. What is known of a forward, and of a
    backward, is one object each (`ForwardPass`, `BackwardPass`, which tell the order of one step at stage 3); it goes
    when that has ended or failed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._forward = ForwardPass(self)
        self._backward: BackwardPass | None = None  # None outside of a backward
        # `finish_gradients`, or what scales gradients on all ranks, is under way, or broke off
        self.is_reducing = False
        self.leaves_step_out = False  # the ranks have agreed to, as some have dropped gradients that others hold
        self._is_order_known = self.comm.num_ranks == 1 or not self.blocks
        # 0-d fp32, by what the reduced gradients are still to be multiplied; a fused optimizer may do it
        self.grad_scale: Tensor | None = None
        self._num_updates = 0  # that were begun
        # of the nodes that accumulate gradients; None where there is but one
        self._stream = self.bus.current_stream() if self.comm.runs_ahead else None
        self.grad_norm: Tensor | None = None  # of the gradients there are; None where nobody has measured it
        self._gradient_reads = GradientReads()

    # Forward

    def begin_forward(self, module: nn.Module, stack: Stack | None) -> None:
        """Prepares the forward of `module`: the model, or one that holds blocks (`stack`) or root parameters."""
        if in_backward():
            self.unshard_around(with_head=self.is_head(module))
            return
        if self._forward.depth == 0:
            self._gradient_reads.end()
            writes.refuse_lost(self)
            if self.has_broken_off:
                self.drop_broken()
            self._refuse_spent()
            if is_transformed() and any(unit.is_sharded and not unit.num_gathered for unit in self.units):
                raise LifecycleError(TRANSFORMED)
        self._forward.begin(module, stack)

    def _refuse_spent(self) -> None:
        """Refuses a forward while some units are updated in backward and the others not, or not known to be."""
        if self.plan.is_offloaded and any(gradient.is_spent for gradient in self.gradients()):
            raise LifecycleError(
                "forward: the last backward has updated a part of the parameters (in_backward), and the rest follows "
                "in the step; call optimizer.step(), or zero_grad(), before it"
            )

    def end_forward(self, stack: Stack | None, failed: bool) -> None:
        """Ends a forward that `begin_forward` has prepared."""
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
        """Prepares a block's forward, or its recomputation: its parameters become whole."""
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

    # Backward

    def before_backward(
        self, *, unit: Unit | None = None, units: list[Unit] | None = None, is_heads: bool = False
    ) -> None:
        """Notes that the gradient of an output has arrived: of the block `unit`, of the model whose forward noted
        `units`, or of the head. Raises [`UnsupportedError`] when the backward itself is to be differentiated."""
        if torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        backward = self._open_backward()
        if units is not None:
            backward.open_pass(units)
        if unit is not None:
            backward.visit(unit)
        if is_heads:
            self.unshard_around(with_head=True)  # a recomputation may have gathered the embedding in its slot

    @contextmanager
    def reducing_this_backward(self, loss: Tensor) -> Iterator[None]:
        """Inside runs the last backward before a step, that of `loss`: stages 0 and 1 reduce while it goes, and not in
        the step. It opens here: its first gradient may come in a backward within (reentrant checkpointing)."""
        handle = loss.register_hook(lambda _grad: self.before_backward()) if loss.requires_grad else None
        self.reduces_this_backward = True
        try:
            yield
        finally:
            self.reduces_this_backward = False
            if handle is not None:
                handle.remove()

    def _open_backward(self) -> BackwardPass:
        """Opens a backward when its first gradient comes: the root becomes whole. What one before it has left, which
        raised, is dropped first."""
        if self._backward is not None and not self._backward.is_under_way:
            self.drop_broken()
        if self._backward is None:
            self._refuse_other_stream()
            self._gradient_reads.end()
            self._backward = BackwardPass(self, self._forward.running, self._end_backward)
            self.grad_norm = None
            self._apply_grad_scale()
            self.unshard_around(with_head=True)
        return self._backward

    def _refuse_other_stream(self) -> None:
        if self._stream is not None and self._stream != self.bus.current_stream():
            raise UnsupportedError(OTHER_STREAM)

    def _end_backward(self) -> None:
        self._refuse_other_stream()  # it may have begun at a node that accumulates
        if self._backward is not None:  # else it was given up meanwhile
            self._backward.finish()
            self._backward = None
            self._gradient_reads.watch(flat for flat in self.flats if flat.trainable)

    def receive(self, unit: Unit, gradient: Gradient, index: int, param: nn.Parameter, *_) -> None:
        """Takes one parameter's gradient from autograd: the hook of the node that has just accumulated it."""
        self._gradient_reads.end()  # where no output's hook came first, this is how a backward begins
        grad, param.grad = param.grad, None
        if grad is not None:
            self.expect(unit, gradient, index)
            gradient.receive(index, local_grad(param, grad))
        self._open_backward().note(unit)

    def expect(self, unit: Unit, gradient: Gradient, index: int) -> None:
        """Prepares memory for a parameter's gradient that is about to come. Raises [`LifecycleError`] when it comes at
        a time when the parameters cannot have been right, and what `before_backward` does."""
        if torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        backward = self._open_backward()
        backward.refuse_late(unit)
        if unit is self.head and backward.has_closed(unit):
            raise LifecycleError(HEAD_USED.format(name=gradient.flat.infos[index].name))
        if unit.phase is not Phase.UNSHARDED and not unit.is_embedding:
            raise LifecycleError(
                f"{gradient.flat.infos[index].name}: a gradient came into unit {unit.name!r} otherwise than through "
                "the outputs of its forward, so its parameters were away; return the tensor from the block's forward, "
                "in a tuple or dict, use the parameter nowhere else, or use stage 2"
            )
        if gradient.full is None:
            unit.lend_gradients()

    @property
    def has_broken_off(self) -> bool:
        """Whether a backward, or what reduces gradients behind it, was begun and has not ended."""
        return self._backward is not None or self.is_reducing

    def drop_broken(self, *, alone: bool = False) -> None:
        """Drops the gradients of this step after a backward, or a reduction, that raised. Other ranks need not have
        raised, and learn of it in the next vote, which leaves the step out (`Schedule.num_dropped`); with `alone` they
        are not here now, and nothing is exchanged."""
        logger.warning("hf_zero: the last backward did not finish; the gradients since the last step are dropped")
        if self._backward is not None:
            self._backward.reduce_early()
        self.wait_for_reductions()
        try:
            self.bus.wait_for_jobs()
        except Exception as error:
            logger.warning("hf_zero: what had been sent to the host is dropped too: %s", error)
        for unit in self.units:
            unit.drop_gradients()
            unit.reshard()
        self.schedule.reset()
        self.schedule.drop()
        self.head_stays = False
        self._forward, self._backward, self.is_reducing = ForwardPass(self), None, False
        for updates in list(self.updates):
            updates.lose_gradients() if alone else updates.abandon()

    # The optimizer's step

    def finish_gradients(self, applies_scale: bool = True) -> None:
        """Reduces all gradients that are not reduced yet: of stages 0 and 1, those that no last backward has. Without
        `applies_scale`, `take_grad_scale` follows."""
        if self.has_broken_off:
            self.drop_broken(alone=True)
        self.is_reducing = True
        self.reduce_collected()
        self.wait_for_reductions()
        self.wait_for_host()
        if applies_scale:
            self._apply_grad_scale()
        self.is_reducing = False

    def take_grad_scale(self) -> Tensor | None:
        """Returns `grad_scale`, which from now on the caller applies."""
        scale, self.grad_scale = self.grad_scale, None
        return scale

    def _apply_grad_scale(self) -> None:
        scale = self.take_grad_scale()
        reduced = [gradient.reduced for gradient in self.gradients() if gradient.is_reduced]
        for device in {grad.device for grad in reduced} if scale is not None else ():
            torch._foreach_mul_([grad for grad in reduced if grad.device == device], scale.to(device))

    def clear_gradients(self, zeroed: bool | None = None) -> None:
        """Drops all gradients, and frees the memory of their shards; `zeroed` as in `Gradient.clear`."""
        if self.has_broken_off and not in_backward():
            self.drop_broken()
        self._gradient_reads.end()
        self._forward = self._forward.renewed()
        self.grad_scale = self.grad_norm = None
        for updates in list(self.updates):
            updates.abandon()
        self.schedule.drop()
        for gradient in self.gradients():
            gradient.clear(zeroed)

    def take_writes(self) -> None:
        """Takes over, before an update, what user code has written to the parameters, see `writes`. All ranks call it.
        Raises [`LifecycleError`] on all ranks, when not all have written the same, or when it cannot count."""
        if self.has_broken_off:
            self.drop_broken()
        self._forward = self._forward.renewed()
        if not self.is_cast:
            writes.take(self)
        self._num_updates += 1
        if self._num_updates % COMPARE_EVERY == 0:
            writes.compare_replicas(self)

    def check_before_save(self) -> None:
        """Checks that the values are those after one step. All ranks call it before they save. Raises
        [`LifecycleError`] on all ranks, when a step was interrupted, or two that hold the same shard have other
        values."""
        self.finish_updates()
        run_on_all_ranks(self.comm, "saving", self.refuse_torn, LifecycleError)
        writes.compare_replicas(self)
        self.late_checks.settle()

    def begin_update(self, finish: Callable[[], None] = lambda: None) -> None:
        """Waits until no rank, and no copy to its device, reads the masters, which are about to get new values. All
        ranks call it. Before it waits it calls `finish`, for which other ranks may wait. Raises [`LifecycleError`]
        inside `hf_zero.gathered` or `computing_in`, after `unshard`, or when someone wrote to a parameter whose data
        is away, or used it."""
        if not self.handles:
            raise LifecycleError("the model was unsharded: shard it again, and build its optimizer anew")
        self._gradient_reads.end()
        writes.refuse_lost(self)
        self.refuse_held("new values")
        finish()
        self._wait_for_readers()
        self.wait_for_copies()

    def _wait_for_readers(self) -> None:
        memory = self.comm.shard_group.shared_memory
        if memory is not None:
            memory.barrier()

    def mark_updated(self, only_trained: bool = False, only_used: bool = False) -> None:
        """Lets the compute copies follow masters that have new values; `only_trained`, `only_used`: what is frozen, or
        has no gradient now, has kept them. All ranks call it."""
        for pending in [pending for unit in self.units for pending in unit.refresh(only_trained, only_used)]:
            pending.wait()
        for flat in self.flats:
            flat.mark_clean()
        self._wait_for_readers()
        self.schedule.reset()  # a backward through the old values would be wrong anyway

    def end_step(self) -> None:
        """Ends an optimizer step: the masters have new values, and its gradients are dropped."""
        self.mark_updated(only_trained=True, only_used=True)
        self.drop_step()
        if not self._is_order_known:
            self._agree_on_order()

    def drop_step(self) -> None:
        """Drops the gradients of a step that all ranks have taken, or leave out together."""
        self.clear_gradients()
        self.schedule.end_step()
        self.leaves_step_out = False
        self.share_buffers()

    def _agree_on_order(self) -> None:
        """Makes the order in which the ranks called the blocks so far the one that is expected, if it is the same on
        all that have called the most stacks. Else it is asked again, unless all have."""
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
        """Gives neighbours in a new order different slots, so that one can be gathered while the other is used. It is
        called between steps, when autograd's views of the slots are gone."""
        slots = list({id(unit.slot): unit.slot for unit in units}.values())
        for unit in units:
            unit.evict()
        for slot in slots:
            if slot.holder is not None:
                slot.holder.evict()
            slot.holder = None
        for position, unit in enumerate(units):
            unit.use_slot(slots[position % len(slots)])

    # What the masters and gradients hold

    def param_infos(self) -> list[ParamInfo]:
        """Returns the facts of all parameters in the model's order, tied ones once. They are the same on every
        rank."""
        self._refuse_divided()
        by_name = {info.name: info for flat in self.flats for info in flat.infos}
        return [by_name[name] for name, _ in self.model.named_parameters() if name in by_name]

    def named_shards(
        self, resident: bool = False, values: bool = True, only: Collection[str] | None = None
    ) -> Iterator[NamedShard]:
        """Yields the parameters' values as the optimizer has them: the ranges for which this rank is responsible,
        which over all ranks tile every parameter exactly once; or those that it holds (`resident`), which at stage 0
        is everything, and what is written to them lasts. Without `values`, for shapes and dtypes alone, what rests on
        disk stays there. With `only`, names, no buffer is read that has none of them."""
        self._refuse_divided()
        self.finish_updates()
        flats = [flat for flat in self.flats if only is None or any(info.name in only for info in flat.infos)]
        if values and not self.is_cast:
            writes.take_here(self, flats)
        for flat in flats:
            masters = flat.rest.masters.pieces(writes=resident) if values else [(flat.master, flat.held)]
            for master, covers in masters:
                for shard in flat.named_shards(master, covers, flat.held if resident else flat.part):
                    if only is None or shard.name in only:
                        yield shard

    def _refuse_divided(self) -> None:
        if self.divided_over is not None:
            raise UnsupportedError(
                "checkpoints of a model that is also divided over tensor-parallel ranks are not written or read here; "
                "save its weights with `with hf_zero.gathered(model): model.save_pretrained(folder)` on all ranks"
            )
