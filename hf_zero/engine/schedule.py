"""The order in which units are gathered and reduced. It is the same on all ranks.

A rank may skip a block (layer drop) or call blocks in another order than other ranks. The order of gathers is
therefore not that of the calls: the blocks of a stack are gathered in a fixed order, skipped blocks included, at the
latest when the forward of the module that owns the stack ends. This needs no communication. If a model has several
stacks, ranks communicate to choose the next one, because a rank may skip a whole stack (`ForwardPass`). A forward
records the units that it uses on a tape, which is the same on all ranks. Backward takes units from the end of the
tape.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Visit:
    """One use of a unit that backward passes over. `is_taken`: a recomputation has already passed over it."""

    unit: Unit
    is_taken: bool


class Schedule:
    """The stacks, and the tape on which forward passes record the units that they use."""

    def __init__(self, stacks: list[Stack]):
        self.stacks = stacks
        self.seen: list[Stack] = []  # in the order of their first call
        self.stack_of = {unit: stack for stack in stacks for unit in stack.units}
        self.first_of: dict[nn.Module, Unit] = {}  # the unit that the last outermost forward of a module used first
        self.with_several: set[nn.Module] = set()  # modules with several stacks inside
        self.num_with_several = 0  # outermost forwards of these modules since the last step
        self._passes: list[list[Unit]] = [[]]  # the tape: one list for each outermost forward
        self._opened: list[list[Unit]] = []  # the passes that the current backward has reached
        self._left: Counter[Unit] = Counter()
        # stacks used since the last step, or with a pending backward
        self._recorded: set[Stack] = set()
        self._ahead = 0  # units at the end of the opened pass that recomputation has passed over, and backward has not
        self._rewound: set[Unit] = set()  # units that the current backward has taken off the tape
        self.num_backwards = 0  # begun since the last step
        self._num_expected = 1  # expected number of backwards per step: that of the last step
        self.num_dropped = 0  # backwards of this step whose gradients this rank has dropped
        # whether a backward ran within another (reentrant checkpointing); None before the first one has ended
        self.nests: bool | None = None
        self.was_uneven = False  # whether a warning about different numbers of backwards in a step was logged
        self._is_cleared = True  # since the last step, gradients were dropped, on purpose or after a failure
        self.is_uncleared = False  # a backward ran without that; plain torch would add to the last step's gradients
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
    def current_pass(self) -> list[Unit]:
        """The units that the current outermost forward has recorded."""
        return self._passes[-1]

    def begin_pass(self) -> None:
        """Starts a new pass on the tape. Passes without a backward (inference without `no_grad`) stay on the tape
        until the next step."""
        if self._passes[-1]:
            self._passes.append([])

    def record(self, unit: Unit) -> None:
        """Records that a forward used this unit and that its backward is expected."""
        self._passes[-1].append(unit)
        self._left[unit] += 1
        self._recorded.add(self.stack_of[unit])

    def open_pass(self, units: list[Unit]) -> Iterator[Visit]:
        """Opens a pass that backward has reached. Finishes the passes opened before it and yields their units."""
        if not any(units is opened for opened in self._opened):
            yield from self.finish_passes()
            self._opened.append(units)

    def look_back(self, unit: Unit, count: int) -> Iterator[tuple[Unit, list[Unit]]]:
        """Yields, for a recomputation, the units from the end of the tape to `unit` that no recomputation has passed
        over yet, each with the `count` units that backward will probably use next. They stay on the tape."""
        tape = self._tape_of(unit)
        if tape is None or (self._opened and not any(tape is opened for opened in self._opened)):
            return
        if not self._opened:
            self._opened.append(tape)
        start = len(tape) - self._ahead
        end = next((at for at in reversed(range(start)) if tape[at] is unit), start)
        while len(tape) - self._ahead > end:
            self._ahead += 1
            at = len(tape) - self._ahead
            yield tape[at], tape[max(0, at - count) : at][::-1]

    def rewind_to(self, unit: Unit) -> Iterator[Visit]:
        """Rewinds the tape to the last use of `unit`, and yields the visits in reverse order, that of `unit` last. If
        `unit` is not on the tape, yields only a visit of `unit`."""
        tape = self._tape_of(unit)
        if tape is None:
            yield Visit(unit, is_taken=False)
            return
        yield from self.open_pass(tape)
        last = None
        while last is not unit:
            visit = self._pop(tape)
            last = visit.unit
            yield Visit(unit, is_taken=False) if last is unit else visit

    def finish_passes(self) -> Iterator[Visit]:
        """Rewinds the passes that backward has reached to their beginning, and yields the units."""
        for tape in self._opened:
            while tape:
                yield self._pop(tape)
        self._passes = [units for units in self._passes if units] or [[]]
        self._opened = []

    def begin_backward(self) -> None:
        """Counts a backward. It counts when it begins, because later it may raise on some of the ranks only."""
        self.num_backwards += 1
        self.is_uncleared = self.is_uncleared or not self._is_cleared

    def end_backward(self) -> None:
        """Ends the current backward."""
        self._rewound.clear()
        self.nests = bool(self.nests)

    def drop(self) -> None:
        """Records that this rank has dropped the gradients of all backwards since the last step."""
        self.num_dropped = self.num_backwards
        self._is_cleared, self.is_uncleared = True, False

    def end_step(self) -> None:
        """Resets the counts after a step. All ranks call it together, while `drop` may be called on a single rank."""
        if self.num_backwards:
            self._num_expected, self.num_backwards = self.num_backwards, 0
        self.num_dropped = self.num_with_several = 0
        # after a skipped step, the graphs of earlier forwards still exist
        self._recorded = {stack for stack in self._recorded if any(map(self.expects, stack.units))}
        self._is_cleared = False

    @property
    def is_last_backward(self) -> bool:
        """Whether a step is expected after the latest backward, because the last step had as many backwards. All ranks
        expect the same, but the step need not follow."""
        return self.num_backwards == self._num_expected

    def _tape_of(self, unit: Unit) -> list[Unit] | None:
        """Returns the pass with the next use of `unit`: preferably one that backward has reached, else the latest."""
        candidates = [*reversed(self._opened), *reversed(self._passes)]
        return next((units for units in candidates if unit in units), None)

    def _pop(self, tape: list[Unit]) -> Visit:
        visit = Visit(tape.pop(), is_taken=self._ahead > 0)
        self._ahead = max(0, self._ahead - 1)
        self._left[visit.unit] -= 1
        self._rewound.add(visit.unit)
        return visit

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

    def is_complete(self, unit: Unit) -> bool:
        """Whether the current backward has reached every recorded use of `unit`. False for a unit that was not on the
        tape, because it may be used again."""
        return unit in self._rewound and not self._left[unit]

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """Returns the units that a forward is likely to use next."""
        stack = self.stack_of[unit]
        return stack.units[stack.next : stack.next + count]

    def before(self, count: int) -> list[Unit]:
        """Returns the units that a backward is likely to use next."""
        return self._opened[-1][: -count - 1 : -1] if self._opened else []

    def reset(self) -> None:
        """Drops the tape and restarts all passes."""
        self._passes = [[]]
        self._opened = []
        self._left.clear()
        self._ahead = 0
        self._rewound.clear()
        for stack in self.stacks:
            stack.reset()


def _first_unlike(numbers: Tensor) -> int | None:
    """Returns the first rank whose number differs from rank 0's."""
    return next(iter((numbers != numbers[0]).nonzero().flatten().tolist()), None)
