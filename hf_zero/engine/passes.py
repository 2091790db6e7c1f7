"""The order of one step: when units are gathered, unsharded, resharded and reduced in a forward and its backward."""

from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock, get_ident, local
from weakref import WeakSet, ref

import torch
from torch import nn

from hf_zero.config import Residency
from hf_zero.engine.away import in_backward
from hf_zero.engine.loan import lend_slots
from hf_zero.engine.model_units import ModelUnits
from hf_zero.engine.schedule import LATE, LATE_WITHIN, Stack, Visit
from hf_zero.engine.unit import Phase, Unit
from hf_zero.errors import LifecycleError


_this_thread = local()  # `is_refused`: `ForwardPass.begin` has refused its forward, whose end comes next


def take_refusal() -> bool:
    """Whether the forward that ends now on this thread was refused when it began, and so is not counted."""
    return vars(_this_thread).pop("is_refused", False)


class ForwardPass:
    """The outermost forward that is under way, or the time between two, in which blocks may be called by hand.

    The outermost forward unshards the root. Before a block runs, its unit is unsharded and the next one's all-gather
    is started; after it, the unit is resharded, its values staying in the slot until another unit comes.
    """

    def __init__(self, engine: ModelUnits):
        self._engine = engine
        self._schedule = engine.schedule
        self.depth = 0  # how many forwards of hooked modules are under way, one in another
        self.has_backward = True  # whether one is to follow
        self.running: list[Unit] = []  # units whose forward is under way
        self._thread = get_ident()  # of the outermost forward
        self._outermost: nn.Module | None = None  # whose forward this is, until it has taken its first unit
        self._agrees = False  # whether ranks agree on the stacks that it takes
        self._has_several = False  # and on its end, since that has several stacks
        self._order = 0  # a number for the order in which it has taken units: ranks with the same number have the same
        self._last_taken: Unit | None = None  # by which that is numbered
        self._last: Unit | None = None  # the block that has just been called, still unsharded

    def begin(self, module: nn.Module, stack: Stack | None) -> None:
        """Begins the forward of the model or of a module that holds blocks (`stack`) or root parameters. The gather of
        the unit that its last forward took first begins behind the root's, before anything waits for that. Raises
        [`LifecycleError`] while another thread's forward is under way."""
        if self.depth == 0:
            self._thread = get_ident()
        elif self._thread != get_ident() and any(
            not unit.num_gathered for unit in self._engine.units if unit.is_sharded
        ):
            _this_thread.is_refused = True
            raise LifecycleError(
                "the model is called by two threads at a time, which use the same parameters when they are gathered; "
                "call it by one after the other, or inside `with hf_zero.gathered(model):`"
            )
        self._engine.root.all_gather()
        if stack is not None:
            stack.is_open = False
        if self.depth == 0:
            self._schedule.begin_pass()
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
        """Ends a forward that `begin` has begun. Units of its stack that were not called are gathered too, so that all
        ranks gather the same; what the user does next may be a collective that begins once all ranks have these."""
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
                stack.head.unshard()  # whoever uses it, and however
        if self.depth == 1 and self._has_several:
            for each in self._schedule.stacks:
                if each.is_open:  # its blocks were called by another module than its owner
                    self._take_rest(each, failed)
            if not failed:
                self._agree_on_stack(None)

    def _take_rest(self, stack: Stack, failed: bool = False) -> None:
        """Takes the units of a stack that were left out, unless the forward has failed."""
        rest = stack.finish()
        self._take([] if failed else rest, stack)
        stack.reset()

    def renewed(self) -> "ForwardPass":
        """Returns the one from now on, at a time when no forward can be under way but in a backward. One that is was
        broken off by a `KeyboardInterrupt`, say: torch calls the hooks behind a forward only for an `Exception`."""
        if in_backward() or not (self.depth or self.running):
            return self
        for stack in self._schedule.stacks:
            stack.reset()
        running, self.running = self.running, []
        for unit in running:
            unit.reshard()
        self.reshard_last()
        self._engine.reshard_around()
        return ForwardPass(self._engine)

    def leaves_alone(self, unit: Unit) -> bool:
        """Whether there is nothing to do around a block: its parameters are whole until a `gathered` context ends,
        and no backward will come to it."""
        return unit.num_gathered > 0 and self.depth > 0 and not self.has_backward and not torch.is_grad_enabled()

    def before_block(self, unit: Unit, inputs_need_grad: bool, sees_order: bool) -> None:
        """Prepares a block's forward: its parameters become whole, and the next unit is on its way before anything
        waits for them, so that the link is not idle between the two.

        Args:
            inputs_need_grad (`bool`): whether gradients flow through what the block is given.
            sees_order (`bool`): whether the order in which blocks are called is still to be found.
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
        """Agrees with the other ranks that all take a stack next, or that the forward ends (`None`). Of what ranks are
        about to take the first in the expected order is next; who leaves it out takes it too, and asks again. Raises
        [`CommError`] on all ranks when they are not in the same forward."""
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
        """Ends a block's forward: its parameters may leave when the next block begins or the forward ends; until then
        hooks that users put on the block still find them."""
        if unit not in self.running:
            self._last = unit
        if unit.is_embedding:
            self._return_head()

    def _return_head(self) -> None:
        """Gathers the head again behind an embedding that was called alone and has taken their slot, while a backward
        is to come that reads the head's values there, for losses that take its weight themselves."""
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
        """Gathers units of a stack, and records those that a backward will come to, also where this rank skips a
        block."""
        if self.depth == 0:
            self.has_backward = torch.is_grad_enabled()  # a block that is called by hand
        if units and self._outermost is not None and not units[0].num_gathered:
            self._schedule.first_of[self._outermost], self._outermost = units[0], None
        for unit in units:
            # what one rank calls again is taken already: at once, or an embedding, which is not on the tape
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
                f"unit {unit.name!r}: is called inside the forward of unit {holder.name!r}, and both use one buffer; "
                "raise prefetch_units by one"
            )
        unit.all_gather()


class BackwardPass:
    """One backward, from its first gradient until every unit is reduced.

    The hook on a block's outputs makes its unit whole; when the next block's hook fires, the former block's gradients
    are complete and their reduction starts. What is left is closed at the end, in a fixed order, so that every unit is
    reduced once in each backward on every rank. `running`: units whose forward is under way, which may be recomputed;
    `at_end`: called at the end of autograd's backward, unless that breaks off."""

    def __init__(self, engine: ModelUnits, running: list[Unit], at_end: Callable[[], None]):
        self._engine = engine
        self._schedule = engine.schedule
        self._running = running
        self._current: Unit | None = None  # the unit whose backward is under way
        self._closed: set[Unit] = set()  # units whose reduction has begun
        self._waiting: list[Unit] = []  # units that backward has left for good, before the turn of their stack
        callback = partial(at_end)
        self._callback = ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._schedule.begin_backward()
        self._task = torch._C._current_graph_task_id()
        # of several models in one loss the first alone reduces as it goes: its units come before those of the others
        with _passes_lock:
            is_first = not any(each.is_under_way for each in _passes if each._task == self._task)
            _passes.add(self)
        # units that are reduced as this backward goes, in the order of all ranks
        self._early = engine.reduced_early() if is_first and self._schedule.nests is False else []
        self._num_coming = {unit: sum(len(each.flat.params) for each in unit.gradients) for unit in self._early}

    @property
    def is_under_way(self) -> bool:
        """Whether autograd's backward has neither ended nor broken off: as long, it alone keeps its callbacks."""
        return self._callback() is not None

    def open_pass(self, units: list[Unit]) -> None:
        """Notes that the gradient of the model's output has arrived."""
        self._pass_over(self._schedule.open_pass(units))
        if units and units[-1] is self._engine.head:  # it has no hook of its own
            self.visit(units[-1])

    def has_closed(self, unit: Unit) -> bool:
        """Whether the reduction of a unit has begun, after which no gradient may come."""
        return unit in self._closed

    def refuse_late(self, unit: Unit) -> None:
        """Refuses a gradient of a unit that was reduced as this backward goes: it comes in one within this one."""
        if unit in self._num_coming and unit in self._closed:
            self._schedule.nests = True
            raise LifecycleError(LATE_WITHIN.format(name=unit.name))

    def note(self, unit: Unit) -> None:
        """Notes that autograd is done with a parameter. Units whose parameters all are, and those in front of them,
        are reduced. In a backward inside of this one (reentrant checkpointing) a parameter may come again, so then the
        rest waits for the end, and no later backward reduces early."""
        if torch._C._current_graph_task_id() != self._task:
            self._schedule.nests = True
        elif unit in self._num_coming:
            self._num_coming[unit] -= 1
            if not self._schedule.nests:
                self.reduce_early(only_complete=True)

    def reduce_early(self, *, only_complete: bool = False) -> None:
        """Reduces what is to be reduced as this backward goes, and is not. So every rank does, also one whose backward
        broke off: others wait for it."""
        while self._early and not (only_complete and self._num_coming[self._early[0]]):
            unit = self._early.pop(0)
            self._closed.add(unit)
            self._engine.reduce(unit, at_step=not unit.reduces_each_backward)

    def visit(self, unit: Unit) -> None:
        """Makes the parameters of the unit whole that backward has come to, and reduces the units that backward has
        left."""
        if unit is not self._current or unit.phase is not Phase.UNSHARDED:
            self._pass_over(self._schedule.rewind_to(unit))
            unit.fill_slot()
            num_ahead = self._engine.config.prefetch_units
            prefetch(unit, self._schedule.before(num_ahead + 1), self._running, num_ahead)
            unit.unshard()

    def visit_recomputation(self, unit: Unit) -> None:
        """Unshards a block that gradient checkpointing calls again before backward (Chen et al., arXiv 1604.06174)."""
        for passed in self._schedule.look_back(unit) if unit is not self._current else ():
            passed.all_gather()
        unit.all_gather()
        unit.unshard()

    def finish(self) -> None:
        """Reduces all units that are left, in a fixed order, and reshards everything."""
        engine = self._engine
        self._pass_over(self._schedule.finish_passes())
        if self._schedule.is_last_backward:
            lend_slots(engine)
        self._turn_to(None)
        self.reduce_early()
        for unit in engine.reduction_order:
            if unit not in self._closed and unit.reduces_each_backward:
                engine.reduce(unit)
            elif unit in self._closed and unit.has_late:
                raise LifecycleError(LATE.format(name=unit.name))
        engine.wait_for_reductions()
        for unit in engine.units:
            unit.reshard()
        self._schedule.end_backward()
        if engine.head is not None and not self._schedule.expects(engine.head):
            engine.head_stays = False

    def _pass_over(self, visits: Iterator[Visit]) -> None:
        for visit in visits:
            if not visit.is_taken:
                visit.unit.all_gather()
            self._turn_to(visit.unit)

    def _turn_to(self, unit: Unit | None) -> None:
        if unit is self._current:
            return
        done, self._current = self._current, unit
        if done is None or (done is self._engine.head and self._engine.head_stays):
            return
        done.reshard()
        is_known = done in self._closed or done in self._waiting
        if self._engine.plan.grad is Residency.SHARDED and not is_known and self._schedule.is_complete(done):
            self._waiting.append(done)
            self._close_waiting()

    def _close_waiting(self) -> None:
        """Reduces the units that backward has left, as far as the order of all ranks allows: stacks from the last to
        the first. What this rank leaves out is reduced in its place, and what comes before its turn waits."""
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


_passes: WeakSet[BackwardPass] = WeakSet()
_passes_lock = Lock()  # autograd runs the backwards of models on several devices in a thread for each device


def prefetch(unit: Unit, candidates: list[Unit], running: list[Unit], count: int) -> None:
    """Gathers the next units, as far as there is room, and begins to read the unit behind them from disk.
    `candidates`: those that are likely to come next, one more than are gathered; `running`: units whose forward is
    under way."""
    for position, candidate in enumerate(candidates):
        is_taken = candidate.slot is unit.slot or (candidate.slot and candidate.slot.holder in running)
        if is_taken or position == count:
            candidate.prefetch_from_disk()
            break
        candidate.all_gather()
