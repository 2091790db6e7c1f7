"""The engine: when units are unsharded, resharded and reduced, driven by the hooks of forward and backward."""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.config import Residency, ZeroConfig
from hf_zero.engine import writes
from hf_zero.engine.away import PlaceholderGuard, in_backward
from hf_zero.engine.casting import computing_in
from hf_zero.engine.divided import local_grad, with_local
from hf_zero.engine.flat import NamedShard, ParamInfo
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.patch import Uncopyable
from hf_zero.engine.placeholder import Placeholders
from hf_zero.engine.restore import restore
from hf_zero.engine.schedule import Schedule, Stack, Visit
from hf_zero.engine.unit import Phase, Unit, reassign_slots
from hf_zero.errors import CommError, LifecycleError, UnsupportedError
from hf_zero.sharding.arena import Arenas


if TYPE_CHECKING:
    from hf_zero.storage import DiskOffload


logger = logging.getLogger(__name__)


DOUBLE_BACKWARD = (
    "double backward: create_graph=True needs the parameters once more after their gradients are reduced; "
    "compute the gradient penalty on the unsharded model"
)


class Updates(Protocol):
    """The part of an optimizer step that is made outside of `step`: in backward, or beside the next forward."""

    def finish_update(self) -> None:
        """Finishes an update that is under way: masters can then be read, and compute copies have followed."""

    def abandon(self) -> None:
        """Ends a step whose gradients are dropped: what was done of it already stays done."""


def _nothing() -> None:
    """Does nothing, where a callback is optional."""


class ZeroEngine(Uncopyable):
    """Holds a model's units and brings them where forward, backward and the optimizer need them.

    [Note: the order of one step at stage 3]
    The outermost forward unshards the root. Before a block runs, its unit is unsharded and the next one's all-gather
    is started; after it, the unit is resharded, its values staying in the slot until another unit comes. In
    backward, the hook on a block's outputs does the same in the opposite order; when the next block's hook fires, the
    former block's gradients are complete and their reduction starts. A callback at the end of backward closes what is
    left, in a fixed order, so that every unit is reduced once in each backward on every rank.

    Args:
        model (`nn.Module`): the model, whose parameters the units hold.
        config (`ZeroConfig`): the settings.
        comm (`Comm`): the data-parallel ranks.
        root (`Unit`): the parameters outside of all blocks.
        schedule (`Schedule`): the blocks' units.
        modules (`dict[Unit, nn.Module]`): each block's module.
        placeholders (`Placeholders`): what parameters read while their data is away.
        bus (`Bus`): the way to the host's memory.
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
        placeholders: Placeholders,
        bus: Bus,
    ):
        self.model = model
        self.bus = bus
        self.placeholders = placeholders
        self.config = config
        self.comm = comm
        self.plan = config.plan(comm.num_ranks)
        self.root = root
        self.schedule = schedule
        self.modules = modules
        self.divided_over: Comm | None = None  # the tensor-parallel ranks; None where each holds whole parameters
        self.compiled_with: dict | None = None  # options of `torch.compile`; None while blocks run eagerly
        self.blocks = [unit for stack in schedule.stacks for unit in stack.units]
        self.units = [root, *self.blocks]
        self.disk: DiskOffload | None = None  # where masters rest between uses; None where they rest in memory
        self.arenas: Arenas | None = None  # until `build` is done, and after `unshard`
        self.handles: list = []  # of all that was put onto the model: each has `remove()`
        self._depth = 0  # how many forwards of hooked modules are under way, one in another
        self._is_order_known = comm.num_ranks == 1 or not self.blocks
        self._notes = True  # whether the outermost forward under way is to be followed by a backward
        self._guard: PlaceholderGuard | None = None  # None but from the first forward of each kind to its backward
        self._guarded_kinds: set[tuple[bool, bool]] = set()  # forwards in training or not, with gradients or not
        self._running: list[Unit] = []  # units whose forward is under way
        self._last: Unit | None = None  # the block that has just been called, still unsharded
        self._is_backward_open = False
        self._current: Unit | None = None  # the unit whose backward is under way; None outside of backward
        self._closed: set[Unit] = set()  # units whose reduction has begun in this backward
        self._reducing: list[Pending] = []
        self.on_reduced: Callable[[Unit], None] | None = None  # called when a backward has a unit's average
        self.updates: weakref.WeakSet[Updates] = weakref.WeakSet()  # of the optimizers
        for unit in self.units:
            unit.finish_updates = self.finish_updates
        # of the trainable parameters: the dict of the module that has it, its key there, itself, its name
        self.registered: list[tuple[dict, str, nn.Parameter, str]] = []
        self._grad_scale: Tensor | None = None  # by what the reduced gradients are still to be multiplied
        self.grad_norm: Tensor | None = None  # of the gradients there are; None where nobody has measured it

    @property
    def stage(self) -> int:
        return self.config.stage

    # Forward

    def begin_forward(self) -> None:
        """Prepares the forward of the model or of a module that holds blocks or root parameters."""
        if in_backward():
            self._unshard_root()
            return
        if self._depth == 0:
            self._end_guard()
            writes.refuse_lost(self)
            if self._is_backward_open:
                self.recover()
            self.schedule.begin_pass()
            self._notes = torch.is_grad_enabled()
        self._depth += 1
        self._unshard_root()
        if self._depth == 1 and self.blocks:
            self.blocks[0].prefetch_from_disk()
            self._open_guard()

    def end_forward(self, stack: Stack | None, failed: bool) -> None:
        """Ends such a forward: what is left of its stack is passed over, so that all ranks gather the same."""
        if in_backward():
            return
        if stack is not None:
            rest = stack.finish()
            self._take([] if failed else rest, stack)
            stack.carries_grad = False
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._guard is not None:
            if failed:
                self._guarded_kinds.clear()
            if failed or not (self.model.training and torch.is_grad_enabled() and self._guard.stay()):
                self._end_guard()  # else it sees what the loss is made of, until the backward
        if stack is not None or self._depth == 0:
            self._reshard_last()
        if self._depth == 0 and (failed or not torch.is_grad_enabled()):
            self.root.reshard()
        if self._depth == 0 and not failed:
            self.refuse_misuse()  # while the graph still holds what it took: backward lets go of it, the latest first

    def _open_guard(self) -> None:
        """Looks in the first forward of each kind whether it uses parameters that are away."""
        kind = (self.model.training, self._notes)
        if kind not in self._guarded_kinds and any(unit.is_sharded for unit in self.blocks):
            self._guarded_kinds.add(kind)
            self._guard = PlaceholderGuard(self)
            self._guard.__enter__()

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.is_over = True
            if guard.has_refused:
                self._guarded_kinds.clear()
        PlaceholderGuard.remove_those_over()

    def leaves_alone(self, unit: Unit) -> bool:
        """Whether there is nothing to do around a block: its parameters are whole until a `gathered` context ends,
        and no backward will come to it."""
        return unit.num_gathered > 0 and self._depth > 0 and not self._notes and not torch.is_grad_enabled()

    def before_block(self, unit: Unit, inputs_need_grad: bool) -> None:
        """Prepares a block's forward: its parameters become whole, and the next unit is on its way."""
        if in_backward():
            self._visit_recomputation(unit)
        else:
            self._reshard_last()
            stack = self.schedule.stack_of[unit]
            if not self._is_order_known:
                stack.see(unit)
            stack.carries_grad = stack.carries_grad or inputs_need_grad
            self._take(stack.advance(unit), stack)
            unit.unshard()
            self._prefetch(unit, self.schedule.after(unit, self.config.prefetch_units + 1))
        self._running.append(unit)

    def after_block(self, unit: Unit) -> None:
        """Ends a block's forward: its parameters may leave when the next block begins or the forward ends; until then
        hooks that users put on the block still find them."""
        if unit in self._running:
            self._running.remove(unit)
        if not in_backward() and unit not in self._running:
            unit.end_use()
            self._last = unit

    def _reshard_last(self) -> None:
        last, self._last = self._last, None
        if last is not None and last not in self._running:
            last.reshard()

    def _take(self, units: list[Unit], stack: Stack) -> None:
        """Gathers units of a stack. Those that a backward will come to are noted: by what all ranks know, whether or
        not this one skips a block."""
        if self._depth == 0:
            self._notes = torch.is_grad_enabled()  # a block that is called by hand
        for unit in units:
            stack.carries_grad = stack.carries_grad or unit.is_trainable
            if self._notes and stack.carries_grad:
                self.schedule.record(unit)
            self._all_gather(unit)

    def _all_gather(self, unit: Unit) -> None:
        holder = unit.slot.holder if unit.slot is not None else None
        if holder is not unit and holder in self._running:
            raise LifecycleError(
                f"unit {unit.name!r}: is called inside the forward of unit {holder.name!r}, and both use one buffer; "
                "raise prefetch_units by one"
            )
        unit.all_gather()

    def _prefetch(self, unit: Unit, candidates: list[Unit]) -> None:
        """Gathers the units that come next, as far as there is room, and has the one behind them read from disk."""
        for position, candidate in enumerate(candidates):
            is_taken = candidate.slot is unit.slot or (candidate.slot and candidate.slot.holder in self._running)
            if is_taken or position == self.config.prefetch_units:
                candidate.prefetch_from_disk()
                break
            candidate.all_gather()

    def _unshard_root(self) -> None:
        self.root.all_gather()
        self.root.unshard()

    # Backward

    def before_backward(self, *, unit: Unit | None = None, units: list[Unit] | None = None) -> None:
        """Notes that the gradient of an output has arrived.

        Args:
            unit (`Unit`, *optional*): the block whose output it is.
            units (`list[Unit]`, *optional*): what the model's forward noted, when the output is the model's.

        Raises:
            `UnsupportedError`: when the backward itself is to be differentiated.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        self.open_backward()
        if units is not None:
            self._pass_over(self.schedule.open_pass(units))
        if unit is not None:
            self.visit_backward(unit)

    def open_backward(self) -> None:
        """Opens a backward, once in each: the root is made whole, and a callback at its end is queued."""
        if not self._is_backward_open:
            self._is_backward_open = True
            self._end_guard()
            self.grad_norm = None
            self._apply_grad_scale()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            self._unshard_root()

    def visit_backward(self, unit: Unit) -> None:
        """Notes that backward has come to a unit: its parameters become whole, and what came before it is complete."""
        self.open_backward()
        if unit is not self._current or unit.phase is not Phase.UNSHARDED:
            self._pass_over(self.schedule.rewind_to(unit))
            unit.fill_slot()
            unit.unshard()
            self._prefetch(unit, self.schedule.before(self.config.prefetch_units + 1))

    def _visit_recomputation(self, unit: Unit) -> None:
        """Unshards a block that gradient checkpointing calls again before backward (Chen et al., arXiv 1604.06174)."""
        self.open_backward()
        for passed in self.schedule.look_back(unit) if unit is not self._current else ():
            passed.all_gather()
        unit.all_gather()
        unit.unshard()

    def end_backward(self) -> None:
        """Reduces every unit that has not been reduced, in a fixed order; nothing stays unsharded."""
        self._pass_over(self.schedule.finish_passes())
        self._turn_to(None)
        for unit in [*reversed(self.blocks), self.root]:
            if unit not in self._closed and unit.reduces_each_backward:
                self._reduce(unit)
            elif unit in self._closed and unit.has_collected:
                raise LifecycleError(f"unit {unit.name!r}: a gradient came after its gradients were reduced")
        self._wait_for_reductions()
        for unit in self.units:
            unit.reshard()
        self.schedule.end_backward()
        self._closed.clear()
        self._is_backward_open = False

    def _pass_over(self, visits: Iterator[Visit]) -> None:
        for visit in visits:
            if not visit.is_taken:
                visit.unit.all_gather()
            self._turn_to(visit.unit)

    def _turn_to(self, unit: Unit | None) -> None:
        if unit is self._current:
            return
        done, self._current = self._current, unit
        if done is None:
            return
        done.reshard()
        if self.plan.grad is Residency.SHARDED and done not in self._closed and self.schedule.is_complete(done):
            self._closed.add(done)
            self._reduce(done)

    def _reduce(self, unit: Unit) -> None:
        """Begins to reduce a unit's gradients: its backward is over."""
        self._reducing.append(unit.reduce_gradients(partial(self.on_reduced, unit) if self.on_reduced else _nothing))

    def receive(self, unit: Unit, gradient: Gradient, index: int, param: nn.Parameter, *_) -> None:
        """Takes one parameter's gradient from autograd: the hook of the node that has just accumulated it."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        self.expect(unit, gradient, index)
        gradient.receive(index, local_grad(param, grad))

    def expect(self, unit: Unit, gradient: Gradient, index: int) -> None:
        """Prepares memory for a parameter's gradient that is about to come.

        Raises:
            `UnsupportedError`: when the backward itself is to be differentiated.
            `LifecycleError`: when it comes at a time when the parameters cannot have been right.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        if not self._is_backward_open and not gradient.is_reduced_once:
            self.open_backward()
        if unit.phase is not Phase.UNSHARDED:
            raise LifecycleError(
                f"{gradient.flat.infos[index].name}: a gradient came into unit {unit.name!r} otherwise than through "
                "the outputs of its forward, so its parameters were away; return the tensor from the block's forward, "
                "in a tuple or dict, use the parameter nowhere else, or use stage 2"
            )
        if gradient.full is None:
            unit.lend_gradients()

    def recover(self) -> None:
        """Recovers from a backward that failed: what it collected is dropped, and all is as before the step."""
        logger.warning("hf_zero: the last backward did not finish; the gradients since the last step are dropped")
        for unit in self.units:
            unit.wait_for_all_gather()
        self._wait_for_reductions()
        try:
            self.bus.wait_for_jobs()
        except Exception as error:
            logger.warning("hf_zero: what had been sent to the host is dropped too: %s", error)
        for unit in self.units:
            unit.drop_gradients()
            unit.reshard()
        self.schedule.reset()
        self._depth = 0
        self._last = None
        self._running.clear()
        self._closed.clear()
        self._current = None
        self._is_backward_open = False
        for updates in list(self.updates):
            updates.abandon()

    def _wait_for_reductions(self) -> None:
        """Waits for all reductions under way; what goes to the host may still be on its way."""
        for pending in self._reducing:
            pending.wait()
        self._reducing.clear()
        for slots in {
            id(unit.gradient_slots): unit.gradient_slots for unit in self.units if unit.gradient_slots
        }.values():
            slots.wait_for_all()

    # The optimizer's side

    def gradients(self) -> Iterator[Gradient]:
        """The gradients of all trainable buffers, in a fixed order."""
        for unit in self.units:
            yield from unit.gradients

    def finish_gradients(self) -> None:
        """Reduces every gradient that is not reduced yet: stages 0 and 1 have left it until now."""
        if self._is_backward_open:
            self.recover()
        for unit in self.units:
            if any(not gradient.is_reduced for gradient in unit.gradients):
                self._reducing.append(unit.reduce_gradients(at_step=True))
        self._wait_for_reductions()
        self.wait_for_host()
        self._apply_grad_scale()

    def wait_for_host(self) -> None:
        """Waits for what the bus's threads do. Where one rank's have failed, all ranks raise.

        Raises:
            `CommError`: another rank's have failed; on that one, whatever it was.
        """
        if self.plan.is_offloaded:
            run_on_all_ranks(self.comm, "an update on the host", self.bus.wait_for_jobs, CommError)

    def finish_updates(self) -> None:
        """Finishes updates that are under way, before the masters are read. All ranks call it."""
        for updates in list(self.updates):
            updates.finish_update()

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiplies the reduced gradients: at once, when they are next looked at, or by who takes the scale.

        Args:
            scale (`Tensor`): 0-d fp32.
        """
        self.finish_gradients()
        self._grad_scale = scale

    def take_grad_scale(self) -> Tensor | None:
        """Returns the factor by which the reduced gradients are still to be multiplied, by the caller from now on."""
        scale, self._grad_scale = self._grad_scale, None
        return scale

    def _apply_grad_scale(self) -> None:
        scale = self.take_grad_scale()
        reduced = [gradient.reduced for gradient in self.gradients() if gradient.is_reduced]
        for device in {grad.device for grad in reduced} if scale is not None else ():
            torch._foreach_mul_([grad for grad in reduced if grad.device == device], scale.to(device))

    def clear_gradients(self) -> None:
        """Forgets all gradients, and gives back the shards of them."""
        if self._is_backward_open and not in_backward():
            self.recover()
        self._grad_scale = self.grad_norm = None
        self._end_guard()
        for updates in list(self.updates):
            updates.abandon()
        for gradient in self.gradients():
            gradient.clear()

    def take_writes(self) -> None:
        """Takes over, before an update, what user code has written to the parameters, see `writes`. All ranks call it.

        Raises:
            `LifecycleError`: on all ranks, when not all have written the same, or when it cannot count.
        """
        if self._is_backward_open:
            self.recover()  # what a backward that failed has updated counts first
        self._end_guard()
        if not self.is_cast:
            writes.take(self)

    def begin_update(self) -> None:
        """Waits until no rank reads the masters, which are about to get new values. All ranks call it.

        Raises:
            `LifecycleError`: inside `hf_zero.gathered` or `computing_in`, after `unshard`, or when someone wrote to a
                parameter whose data is away, or used it.
        """
        if not self.handles:
            raise LifecycleError("the model was unsharded: shard it again, and build its optimizer anew")
        writes.refuse_lost(self)
        self._refuse_held("new values")
        if self.comm.shared_memory is not None:
            self.comm.shared_memory.barrier()

    def refuse_misuse(self) -> None:
        """Looks whether parameters were used or written to while their data was away. Before a backward it still finds
        what a loss has taken of them: that backward would begin with it, and then let go of it.

        Raises:
            `LifecycleError`: with a parameter's name.
        """
        for unit in self.units:
            if not unit.is_unsharded:
                unit.refuse_misuse()

    def _refuse_held(self, what: str) -> None:
        if self.is_cast:
            raise LifecycleError(f"{what} inside computing_in(...): leave it first")
        for unit in self.units:
            if unit.num_gathered:
                raise LifecycleError(
                    f"unit {unit.name!r}: {what} inside hf_zero.gathered(...); leave the context first"
                )

    def mark_updated(self, only_trained: bool = False) -> None:
        """Lets the compute copies follow masters that have new values. All ranks call it.

        Args:
            only_trained (`bool`): frozen parameters have kept their values.
        """
        pendings: list[Pending] = []
        for unit in self.units:
            pendings += unit.refresh(only_trained)
        for pending in pendings:
            pending.wait()
        for flat in (flat for unit in self.units for flat in unit.flats):
            flat.mark_clean()
        if self.comm.shared_memory is not None:
            self.comm.shared_memory.barrier()
        self.schedule.reset()  # a backward through the old values would be wrong anyway

    def end_step(self, is_late: bool = False) -> None:
        """Ends an optimizer step: its gradients are dropped.

        Args:
            is_late (`bool`): the masters get their new values later; else they have them.
        """
        if not is_late:
            self.mark_updated(only_trained=True)
        self.clear_gradients()
        if not self._is_order_known:
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Makes the order in which all ranks called the blocks in the first step the one that is expected."""
        own = [[unit.index for unit in stack.seen] for stack in self.schedule.stacks]
        if all(other == own for other in self.comm.all_gather_object(own, what="the end of a step")):
            for stack in self.schedule.stacks:
                stack.order(stack.seen + [unit for unit in stack.units if unit not in stack.seen])
            reassign_slots([unit for stack in self.schedule.stacks for unit in stack.units])
        self._is_order_known = True

    @property
    def is_cast(self) -> bool:
        """Whether the parameters are shown in another dtype, see `computing_in`."""
        return any(flat.cast for unit in self.units for flat in unit.flats)

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Shows the floating-point parameters and buffers in another dtype, for evaluation: masters, and what the
        optimizer holds, stay as they are. All ranks enter it together; there are no gradients inside.

        Where the parameters rest whole (stages 0 to 2), the context holds a second copy of them in `dtype`; at stage 3
        one of the root and of the block under way.

        Args:
            dtype (`torch.dtype`): such as `torch.bfloat16`.

        Raises:
            `LifecycleError`: inside another one.
        """
        return computing_in(self, dtype)

    def unshard(self) -> nn.Module:
        """Gives the model back as it was before `hf_zero.shard`: a plain module, whole on every rank, with the present
        values in the dtypes that it came with. All ranks call it.

        What had no master and was cast by `compute_dtype`, as frozen parameters are, comes back rounded. Gradients
        since the last step are dropped. Optimizers on this engine can step no more.

        Returns:
            `nn.Module`: the model, which can be copied, pickled, or sharded again.

        Raises:
            `LifecycleError`: inside `hf_zero.gathered` or `computing_in`, or when someone wrote to a parameter whose
                data is away.
        """
        self.finish_updates()
        self._refuse_held("unshard")
        writes.take_here(self)
        self.clear_gradients()
        restore(self)
        return self.model

    def param_infos(self) -> list[ParamInfo]:
        """All parameters in the model's order, tied ones once; the same on every rank."""
        self._refuse_divided()
        by_name = {info.name: info for unit in self.units for flat in unit.flats for info in flat.infos}
        return [by_name[name] for name, _ in self.model.named_parameters() if name in by_name]

    def named_shards(self, resident: bool = False, values: bool = True) -> Iterator[NamedShard]:
        """The parameters' values as the optimizer has them.

        Args:
            resident (`bool`): `False` gives the ranges that this rank owns, which over all ranks tile every parameter
                exactly once; `True` those that it holds, which at stage 0 is everything, and what is written to them
                lasts.
            values (`bool`): `False` where the tensors' shapes and dtypes are enough: what rests on disk stays there.
        """
        self._refuse_divided()
        self.finish_updates()
        if values and not self.is_cast:
            writes.take_here(self)
        for unit in self.units:
            for flat in unit.flats:
                masters = flat.rest.masters.pieces(writes=resident) if values else [(flat.master, flat.held)]
                for master, covers in masters:
                    yield from flat.named_shards(master, covers, flat.held if resident else flat.owned)

    def _refuse_divided(self) -> None:
        if self.divided_over is not None:
            raise UnsupportedError(
                "checkpoints of a model that is also divided over tensor-parallel ranks are not written or read here; "
                "save its weights with `with hf_zero.gathered(model): model.save_pretrained(folder)` on all ranks"
            )

    def full_grad(self, name: str) -> Tensor | None:
        """The whole averaged gradient of one parameter, on every rank; all ranks call it, after backward.

        Args:
            name (`str`): a name of `param_infos()`.

        Returns:
            `Tensor`, in the parameter's shape, or `None` when it has had no gradient since the last step.

        Raises:
            `KeyError`: when no trainable parameter has this name.
        """
        for unit in self.units:
            for gradient in unit.gradients:
                for index, info in enumerate(gradient.flat.infos):
                    if info.name == name:
                        return self._full_grad(unit, gradient, index)
        raise KeyError(f"{name}: no trainable parameter has this name")

    def _full_grad(self, unit: Unit, gradient: Gradient, index: int) -> Tensor | None:
        used = torch.tensor([gradient.used[index]], dtype=torch.uint8, device=self.comm.device)
        if not self.comm.all_gather_vector(used).any():
            return None
        self.finish_gradients()
        span = gradient.flat.layout.spans[index]
        grad = gradient.whole(unit.name)[span.offset : span.stop].view(span.shape)
        return with_local(gradient.flat.params[index], grad)
