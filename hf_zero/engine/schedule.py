"""In which order units are gathered and reduced, so that all ranks do the same without asking one another.

Collectives must be issued in one order on all ranks, while a rank may skip a block (layer drop) or call blocks in an
order of its own. So the order is not that of the calls: blocks of a stack are taken in their order, a block that was
not called is passed over (gathered and left), and the stack is finished when its owner's forward ends. Every rank then
issues the same gathers whatever it called. What forward took is noted on a tape, and backward takes the tape from its
end; the ranks' tapes are equal for the same reason.
"""

from collections import Counter

from hf_zero.engine.unit import Unit


class Stack:
    """Units that are used one after the other.

    Args:
        units (`list[Unit]`): in their order.
    """

    def __init__(self, units: list[Unit]):
        self.units = units
        self.index = {unit: index for index, unit in enumerate(units)}
        self.next = 0  # the first unit not yet taken in this pass

    def finish(self) -> list[Unit]:
        """The units left over in this pass; the next pass begins anew."""
        rest = self.units[self.next :]
        self.next = 0
        return rest

    def advance(self, unit: Unit) -> list[Unit]:
        """The units to take so that `unit` is the last of them."""
        at = self.index[unit]
        if at == self.next - 1:
            return [unit]  # called again at once: a block that is shared by all layers
        passed = self.finish() if at < self.next else []
        passed += self.units[self.next : at + 1]
        self.next = at + 1
        return passed


class Schedule:
    """The stacks, and the tape of what the forward passes took.

    Args:
        stacks (`list[Stack]`): the model's towers.
    """

    def __init__(self, stacks: list[Stack]):
        self.stacks = stacks
        self.stack_of = {unit: stack for stack in stacks for unit in stack.units}
        self._passes: list[list[Unit]] = []  # the tape: one list per outermost forward
        self._left: Counter[Unit] = Counter()
        self._rewinding: list[Unit] | None = None  # the pass that backward is in; None outside of backward

    def begin_pass(self) -> None:
        """Starts a new pass on the tape."""
        if not self._passes or self._passes[-1]:
            self._passes.append([])

    def note(self, unit: Unit) -> None:
        """Records that a forward took this unit and that its backward is to come."""
        if not self._passes:
            self._passes.append([])
        self._passes[-1].append(unit)
        self._left[unit] += 1

    def rewind_to(self, unit: Unit) -> list[Unit]:
        """Takes the tape back to the last use of `unit`: the units passed, `unit` last. One off the tape comes alone."""
        if not self._left[unit]:
            return [unit]
        passed = [self._pop()]
        while passed[-1] is not unit:
            passed.append(self._pop())
        return passed

    def rewind_pass(self) -> list[Unit]:
        """Takes the tape back to the beginning of the pass that backward is in: the units passed."""
        passed = []
        while self._rewinding:
            passed.append(self._pop())
        self._rewinding = None
        return passed

    def _pop(self) -> Unit:
        while not self._passes[-1]:
            self._passes.pop()
        self._rewinding = self._passes[-1]
        unit = self._rewinding.pop()
        self._left[unit] -= 1
        return unit

    def uses_left(self, unit: Unit) -> int:
        """How many noted uses of `unit` the backward has not come to."""
        return self._left[unit]

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """The units that a forward is likely to take next."""
        stack = self.stack_of[unit]
        return stack.units[stack.next : stack.next + count]

    def before(self, count: int) -> list[Unit]:
        """The units that a backward is likely to take next."""
        tape = next((units for units in reversed(self._passes) if units), [])
        return tape[: -count - 1 : -1]

    def reset(self) -> None:
        """Drops the tape and starts all passes anew."""
        self._passes.clear()
        self._left.clear()
        self._rewinding = None
        for stack in self.stacks:
            stack.next = 0
