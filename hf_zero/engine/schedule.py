"""The order in which units are gathered and reduced, which all ranks keep.

A rank may skip a block (layer drop) or call blocks in an order of its own. So the order is not that of the calls:
blocks of a stack are taken in their order, a block that was not called is passed over (gathered and left), and the
stack is finished when its owner's forward ends. This needs no communication. If a model has several stacks, ranks
communicate to choose the next one, because a rank may skip a whole stack (`ForwardPass`). A forward records the units
that it takes on a tape, and backward takes the tape from its end; the ranks' tapes are equal.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from hf_zero.engine.unit import Unit
from hf_zero.errors import CommError


class Stack:
    """The units that the forward of one module uses in their order. `units`: in the order in which they are expected;
    `head`: the last of them, which no call comes to: it is whole when the stack has ended."""

    def __init__(self, units: list[Unit], head: Unit | None = None):
        self.head = head
        self.order(units)
        self.seen: list[Unit] = []  # in the order of their first call
        self.next = 0  # the first unit not yet taken in this pass
        self.carries_grad = False  # whether gradients flow through what the stack hands on, so far in this pass
        self.is_open = False  # whether all ranks have agreed to take it now, until its owner's forward ends

    def order(self, units: list[Unit]) -> None:
        """Sets the order in which the units are expected; all ranks set the same."""
        self.units = units
        self.index = {unit: index for index, unit in enumerate(units)}

    def see(self, unit: Unit) -> None:
        """Records that a unit was called."""
        if unit not in self.seen:
            self.seen.append(unit)

    def finish(self) -> list[Unit]:
        """Returns the units that this pass has left out, and begins the next pass."""
        rest = self.units[self.next :]
        self.next = 0
        return rest

    def reset(self) -> None:
        """Ends the pass under way."""
        self.next = 0
        self.carries_grad = self.is_open = False

    def advance(self, unit: Unit) -> list[Unit]:
        """Returns the units to use next: those that this pass has left out before `unit`, and `unit` last."""
        at = self.index[unit]
        if at == self.next - 1:
            return [unit]  # called again at once: a block that is shared by all layers
        passed = self.finish() if at < self.next else []
        passed += self.units[self.next : at + 1]
        self.next = at + 1
        return passed


LATE = (
    "unit {name!r}: a gradient came after its gradients were reduced; a graph that a backward has kept "
    "(retain_graph=True) has its next backward alone, and not in one loss with that of another forward"
)
LATE_WITHIN = (
    "unit {name!r}: a gradient came in a backward within the backward (reentrant checkpointing) after its gradients "
    "were reduced, as there was no such backward before; call zero_grad() and run the step's batches again, on all "
    "ranks: from now on gradients are reduced when a backward ends"
)


@dataclass(frozen=True)
class Visit:
    """One use of a unit to which backward comes. `is_taken`: a recomputation has passed over it already."""

    unit: Unit
    is_taken: bool


class Schedule:
    """The stacks, and the tape on which forward passes record the units that they use."""

    def __init__(self, stacks: list[Stack]):
        self.stacks = stacks
        self.seen: list[Stack] = []  # in the order of their first call
        self.stack_of = {unit: stack for stack in stacks for unit in stack.units}
        self.first_of: dict[nn.Module, Unit] = {}  # what the last outermost forward of a module took first
        self.with_several: set[nn.Module] = set()  # modules with several stacks inside
        self.num_with_several = 0  # outermost forwards of those since the last step
        self._passes: list[list[Unit]] = [[]]  # the tape: one list for each outermost forward
        self._opened: list[list[Unit]] = []  # the passes that the backward under way has come to
        self._left: Counter[Unit] = Counter()
        # stacks used since the last step, or with a pending backward
        self._recorded: set[Stack] = set()
        self._ahead = 0  # how many units at the end of the opened pass a recomputation has taken, and not yet backward
        self._rewound: set[Unit] = set()  # units that the backward under way has taken off the tape
        self.num_backwards = 0  # that have begun since the last step
        self._num_expected = 1  # backwards before a step: as many as before the last one
        self.num_dropped = 0  # of them, those whose gradients this rank has dropped
        # whether a backward ran within another (reentrant checkpointing); None before the first one has ended
        self.nests: bool | None = None
        self.was_uneven = False  # whether a warning was logged that not all ranks had as many backwards in a step
        self._is_cleared = True  # since the last step: gradients were dropped, on purpose or after a failure
        self.is_uncleared = False  # a backward has come without that, and torch alone would add to the last step's
        self.was_uncleared = False  # whether that was said

    def see(self, unit: Unit) -> None:
        """Records that a unit was called."""
        stack = self.stack_of[unit]
        stack.see(unit)
        if stack not in self.seen and not unit.is_embedding:  # that may be called long before the blocks
            self.seen.append(stack)

    def seen_indices(self) -> list[list[int]]:
        """Returns what was called so far: the units' indices, by stack in the order of their first call."""
        return [[unit.index for unit in stack.seen] for stack in self.seen]

    def expect(self, seen: list[list[Unit]]) -> None:
        """Makes the order in which stacks, and units within them, were called the one that is expected."""
        called = {self.stack_of[units[0]]: units for units in seen}
        for stack, units in called.items():
            stack.order(units + [unit for unit in stack.units if unit not in units])
        self.stacks.sort(key=lambda stack: list(called).index(stack) if stack in called else len(called))

    def refuse_unlike(self, counts: Tensor, orders: Tensor) -> None:
        """Refuses ranks that have begun unlike numbers of forwards of a module with several stacks, or have taken the
        units of this one in unlike orders. All ranks call it."""
        if (rank := _first_unlike(counts)) is not None:
            raise CommError(
                f"the model's forward: rank {rank} has begun {counts[rank]} since the last step, rank 0 {counts[0]}; "
                "at stage 3 call the model equally often on all ranks, or inside `with hf_zero.gathered(model):`, and "
                "a part that a rank leaves out within the model's forward alone"
            )
        if (rank := _first_unlike(orders)) is not None:
            raise CommError(
                f"the model's forward: rank {rank} has called blocks of several towers in another order than rank 0; "
                "at stage 3 call a tower that is called between the blocks of another, or whose blocks are called by "
                "another module than the one that holds them, on all ranks alike"
            )

    @property
    def current_pass(self) -> list[Unit]:
        """The units that the outermost forward under way has recorded."""
        return self._passes[-1]

    def begin_pass(self) -> None:
        """Starts a new pass on the tape. Passes whose backward never comes (inference without `no_grad`) stay on it
        until the next step."""
        if self._passes[-1]:
            self._passes.append([])

    def record(self, unit: Unit) -> None:
        """Records that a forward took this unit and that its backward is to come."""
        self._passes[-1].append(unit)
        self._left[unit] += 1
        self._recorded.add(self.stack_of[unit])

    def open_pass(self, units: list[Unit]) -> Iterator[Visit]:
        """Notes that backward has come to this pass, and drops the rest of the passes before it."""
        if not any(units is opened for opened in self._opened):
            yield from self.finish_passes()
            self._opened.append(units)

    def look_back(self, unit: Unit, count: int) -> Iterator[tuple[Unit, list[Unit]]]:
        """Yields the units from the tape's end to `unit` that were not taken yet, each with as many that are likely to
        come next, for a recomputation, which comes before backward. They stay on the tape."""
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
        """Rewinds the tape to the last use of `unit` and returns the units, `unit` last. A unit that is not on the
        tape is returned alone."""
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
        """Rewinds the tape to the beginning of the passes that backward has come to, and returns the units."""
        for tape in self._opened:
            while tape:
                yield self._pop(tape)
        self._passes = [units for units in self._passes if units] or [[]]
        self._opened = []

    def begin_backward(self) -> None:
        """Counts a backward. It counts from its beginning, which all ranks have in common; it may raise on one."""
        self.num_backwards += 1
        self.is_uncleared = self.is_uncleared or not self._is_cleared

    def end_backward(self) -> None:
        """Notes that the backward under way has ended."""
        self._rewound.clear()
        self.nests = bool(self.nests)

    def drop(self) -> None:
        """Notes that the gradients of all backwards since the last step are dropped on this rank."""
        self.num_dropped = self.num_backwards
        self._is_cleared, self.is_uncleared = True, False

    def end_step(self) -> None:
        """Ends the count of backwards. All ranks call it together; a rank alone may drop its gradients at any time."""
        if self.num_backwards:
            self._num_expected, self.num_backwards = self.num_backwards, 0
        self.num_dropped = self.num_with_several = 0
        # a step that was left out keeps the graphs of forwards before it
        self._recorded = {stack for stack in self._recorded if any(map(self.expects, stack.units))}
        self._is_cleared = False

    @property
    def is_last_backward(self) -> bool:
        """Whether a step is expected behind the backward that began last: it comes after as many as the last time. All
        ranks expect the same, and may expect it in vain."""
        return self.num_backwards == self._num_expected

    def _tape_of(self, unit: Unit) -> list[Unit] | None:
        """Returns the pass with the next use of `unit`: one that backward has come to, else the latest."""
        candidates = [*reversed(self._opened), *reversed(self._passes)]
        return next((units for units in candidates if unit in units), None)

    def _pop(self, tape: list[Unit]) -> Visit:
        visit = Visit(tape.pop(), is_taken=self._ahead > 0)
        self._ahead = max(0, self._ahead - 1)
        self._left[visit.unit] -= 1
        self._rewound.add(visit.unit)
        return visit

    def expects(self, unit: Unit) -> bool:
        """Whether a backward is to come to a recorded use of `unit`."""
        return self._left[unit] > 0

    def is_left_out(self, stack: Stack) -> bool:
        """Whether no forward since the last step has recorded a unit of a stack, nor one before whose backward is to
        come."""
        return stack not in self._recorded

    def is_behind(self, unit: Unit) -> bool:
        """Whether the last unit of a stack is used behind the others now: backward will come to this use first."""
        return self.stack_of[unit].next == 0 and self.expects(unit)

    def is_complete(self, unit: Unit) -> bool:
        """Whether the backward under way has come to every recorded use of `unit`. A unit that is not on the tape may
        come again."""
        return unit in self._rewound and not self._left[unit]

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """Returns the units that a forward is likely to use next."""
        stack = self.stack_of[unit]
        return stack.units[stack.next : stack.next + count]

    def before(self, count: int) -> list[Unit]:
        """Returns the units that a backward is likely to use next."""
        return self._opened[-1][: -count - 1 : -1] if self._opened else []

    def reset(self) -> None:
        """Drops the tape and starts all passes anew."""
        self._passes = [[]]
        self._opened = []
        self._left.clear()
        self._ahead = 0
        self._rewound.clear()
        for stack in self.stacks:
            stack.reset()


def _first_unlike(numbers: Tensor) -> int | None:
    """Returns the first rank whose number is not rank 0's."""
    return next(iter((numbers != numbers[0]).nonzero().flatten().tolist()), None)
