"""The order in which units are gathered and reduced. It is the same on all ranks.

A rank may skip a block (layer drop) or call blocks in another order than other ranks. The order of gathers is
therefore not that of the calls: the blocks of a stack are gathered in a fixed order, skipped blocks included, at the
latest when the forward of the module that owns the stack ends. This needs no communication. If a model has several
stacks, ranks communicate to choose the next one, because a rank may skip a whole stack (`ForwardPass`). A forward
records the units that it uses on a tape, which is the same on all ranks. Backward takes units from the end of the
tape.
"""

from collections import Counter

from torch import Tensor, nn

from hf_zero.engine.unit import Unit
from hf_zero.errors import CommError


class Stack:
    """The units that the forward of one module uses.

    Args:
        units: The units in the expected order.
        head: The last unit, if it is the head. It is unsharded when the stack ends, even if it was not called.
    """

    def __init__(self, units: list[Unit], head: Unit | None = None):
        self.head = head
        self.order(units)
        self.seen: list[Unit] = []  # in the order of their first call
        self.next = 0  # the first unit not yet taken in this pass
        self.carries_grad = False  # whether activations require a gradient at this point of the pass
        self.is_open = False  # whether all ranks have agreed to use it now, until its owner's forward ends

    def order(self, units: list[Unit]) -> None:
        """Sets the expected order of the units. All ranks set the same order."""
        self.units = units
        self.index = {unit: index for index, unit in enumerate(units)}

    def see(self, unit: Unit) -> None:
        """Records that a unit was called."""
        if unit not in self.seen:
            self.seen.append(unit)

    def finish(self) -> list[Unit]:
        """Returns the units that this pass has not reached, and begins the next pass."""
        rest = self.units[self.next :]
        self.next = 0
        return rest

    def reset(self) -> None:
        """Ends the current pass."""
        self.next = 0
        self.carries_grad = self.is_open = False

    def advance(self, unit: Unit) -> list[Unit]:
        """Returns the units to gather for a call of `unit`: the skipped units before it, then `unit`."""
        at = self.index[unit]
        if at == self.next - 1:
            return [unit]  # repeated call: a block that all layers share
        passed = self.finish() if at < self.next else []
        passed += self.units[self.next : at + 1]
        self.next = at + 1
        return passed


LATE = (
    "unit {name!r}: a gradient came after its gradients were reduced; a graph kept by a backward (retain_graph=True) "
    "needs a separate backward, not one loss together with another forward"
)
LATE_WITHIN = (
    "unit {name!r}: a gradient came in a backward within the backward (reentrant checkpointing) after its gradients "
    "were reduced, because no earlier backward was nested; call zero_grad() and run the step's batches again, on all "
    "ranks: from now on gradients are reduced when a backward ends"
)


class Tape:
    """The units that one outermost forward has used, in order. The hooks on its outputs hold the tape as long as the
    graph exists, so backwards through a kept graph (retain_graph=True) pass over the units in the same way."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.num_left = 0  # how many of them, from the beginning, no backward has reached


class Schedule:
    """The stacks, and the tape on which forward passes record the units that they use."""

    def __init__(self, stacks: list[Stack]):
        self.stacks = stacks
        self.seen: list[Stack] = []  # in the order of their first call
        self.stack_of = {unit: stack for stack in stacks for unit in stack.units}
        self.first_of: dict[nn.Module, Unit] = {}  # the unit that the last outermost forward of a module used first
        self.with_several: set[nn.Module] = set()  # modules with several stacks inside
        self.num_with_several = 0  # outermost forwards of these modules since the last step
        self._tapes = [Tape()]  # one for each outermost forward that has units left; the last is the current one
        self._left: Counter[Unit] = Counter()  # recorded uses that no backward has reached
        # stacks used since the last step, or with a pending backward
        self._recorded: set[Stack] = set()
        self.num_backwards = 0  # begun since the last step
        self._num_expected = 1  # expected number of backwards per step: that of the last step
        self.num_dropped = 0  # backwards of this step whose gradients this rank has dropped
        # whether a backward ran within another (reentrant checkpointing); None before the first one has ended
        self.nests: bool | None = None
        self.was_uneven = False  # whether a warning about different numbers of backwards in a step was logged
        # since the last step, gradients were dropped, on purpose or after a failure; else plain torch would add the
        # next ones to those of the last step
        self.is_cleared = True
        self.was_uncleared = False  # whether a warning about that was logged

    def see(self, unit: Unit) -> None:
        """Records that a unit was called."""
        stack = self.stack_of[unit]
        stack.see(unit)
        if stack not in self.seen and not unit.is_embedding:  # it may be called long before the blocks
            self.seen.append(stack)

    def seen_indices(self) -> list[list[int]]:
        """Returns the indices of the units called so far, per stack, in the order of their first call."""
        return [[unit.index for unit in stack.seen] for stack in self.seen]

    def expect(self, seen: list[list[Unit]]) -> None:
        """Makes the order in which stacks and their units were called the expected one."""
        called = {self.stack_of[units[0]]: units for units in seen}
        for stack, units in called.items():
            stack.order(units + [unit for unit in stack.units if unit not in units])
        self.stacks.sort(key=lambda stack: list(called).index(stack) if stack in called else len(called))

    def refuse_unlike(self, counts: Tensor, orders: Tensor) -> None:
        """Raises [`CommError`] if ranks have begun different numbers of forwards of modules with several stacks, or
        have used the units of this forward in different orders. Collective."""
        if (rank := _first_unlike(counts)) is not None:
            raise CommError(
                f"the model's forward: rank {rank} has begun {counts[rank]} since the last step, rank 0 {counts[0]}; "
                "at stage 3 call the model equally often on all ranks, or inside `with hf_zero.gathered(model):`; a "
                "rank may skip a tower only within the model's forward"
            )
        if (rank := _first_unlike(orders)) is not None:
            raise CommError(
                f"the model's forward: rank {rank} has called blocks of several towers in another order than rank 0; "
                "at stage 3 all ranks must call the towers in the same order if one is called between the blocks of "
                "another, or if another module calls its blocks than the one that holds them"
            )

    @property
    def current_tape(self) -> Tape:
        """The tape of the current outermost forward."""
        return self._tapes[-1]

    def begin_tape(self) -> None:
        """Starts a new tape. Tapes without a backward (inference without `no_grad`) stay until the next step, so that
        they do not depend on when a rank frees its graphs."""
        if self.current_tape.units:
            self._tapes.append(Tape())

    def record(self, unit: Unit) -> None:
        """Records that a forward used this unit and that its backward is expected."""
        if self.current_tape.num_left < len(self.current_tape.units):  # a block is called directly, after a backward
            self.begin_tape()
        self.current_tape.units.append(unit)
        self.current_tape.num_left += 1
        self._left[unit] += 1
        self._recorded.add(self.stack_of[unit])

    def tape_of(self, unit: Unit) -> Tape | None:
        """Returns the latest tape with a use of `unit` that no backward has reached."""
        return next((tape for tape in reversed(self._tapes) if unit in tape.units[: tape.num_left]), None)

    def open(self, tape: Tape) -> None:
        """Records that a backward has reached the forward of a tape, again if its graph was kept over a step."""
        self._recorded.update(self.stack_of[unit] for unit in tape.units)

    def reach(self, tape: Tape, place: int) -> Unit:
        """Returns the unit at a place of a tape, which a backward has reached."""
        unit = tape.units[place]
        if place < tape.num_left:
            tape.num_left = place
            self._left[unit] -= 1
        return unit

    def begin_backward(self) -> None:
        """Counts a backward. It counts when it begins, because later it may raise on some of the ranks only."""
        self.num_backwards += 1

    def end_backward(self) -> None:
        """Ends the current backward."""
        self._tapes = [tape for tape in self._tapes if tape.num_left] or [Tape()]
        self.nests = bool(self.nests)

    def drop(self) -> None:
        """Records that this rank has dropped the gradients of all backwards since the last step."""
        self.num_dropped = self.num_backwards
        self.is_cleared = True

    def end_step(self) -> None:
        """Resets the counts after a step. All ranks call it together, while `drop` may be called on a single rank."""
        if self.num_backwards:
            self._num_expected, self.num_backwards = self.num_backwards, 0
        self.num_dropped = self.num_with_several = 0
        # after a skipped step, the graphs of earlier forwards still exist
        self._recorded = {stack for stack in self._recorded if any(map(self.expects, stack.units))}
        self.is_cleared = False

    @property
    def is_last_backward(self) -> bool:
        """Whether a step is expected after the latest backward, because the last step had as many backwards. All ranks
        expect the same, but the step need not follow."""
        return self.num_backwards == self._num_expected

    def expects(self, unit: Unit) -> bool:
        """Whether a recorded use of `unit` still needs a backward."""
        return self._left[unit] > 0

    def is_left_out(self, stack: Stack) -> bool:
        """Whether no forward has used a unit of `stack`, neither since the last step nor in an earlier forward whose
        backward is still to come."""
        return stack not in self._recorded

    def is_behind(self, unit: Unit) -> bool:
        """Whether `unit`, the last of its stack, is now used after the others, so that backward reaches this use
        first."""
        return self.stack_of[unit].next == 0 and self.expects(unit)

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """Returns the units that a forward is likely to use next."""
        stack = self.stack_of[unit]
        return stack.units[stack.next : stack.next + count]

    def reset(self) -> None:
        """Drops the tapes and restarts all stacks."""
        for tape in self._tapes:
            tape.num_left = 0
        self._tapes = [Tape()]
        self._left.clear()
        for stack in self.stacks:
            stack.reset()


def _first_unlike(numbers: Tensor) -> int | None:
    """Returns the first rank whose number differs from rank 0's."""
    return next(iter((numbers != numbers[0]).nonzero().flatten().tolist()), None)
