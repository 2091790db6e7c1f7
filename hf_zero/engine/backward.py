"""A backward: when units are unsharded, resharded and reduced in it."""

from collections.abc import Iterator

from hf_zero.config import Residency
from hf_zero.engine.forward import prefetch
from hf_zero.engine.model_units import ModelUnits
from hf_zero.engine.schedule import Visit
from hf_zero.engine.unit import Phase, Unit
from hf_zero.errors import LifecycleError


class BackwardPass:
    """One backward, from its first gradient until every unit is reduced.

    The hook on a block's outputs makes its unit whole; when the next block's hook fires, the former block's gradients
    are complete and their reduction starts. What is left is closed at the end, in a fixed order, so that every unit is
    reduced once in each backward on every rank.

    Args:
        engine (`ModelUnits`): the model.
        running (`list[Unit]`): units whose forward is under way, which may be recomputed.
    """

    def __init__(self, engine: ModelUnits, running: list[Unit]):
        self._engine = engine
        self._schedule = engine.schedule
        self._running = running
        self._current: Unit | None = None  # the unit whose backward is under way
        self._closed: set[Unit] = set()  # units whose reduction has begun

    def open_pass(self, units: list[Unit]) -> None:
        """Notes that the gradient of the model's output has arrived.

        Args:
            units (`list[Unit]`): what the model's forward noted.
        """
        self._pass_over(self._schedule.open_pass(units))

    def visit(self, unit: Unit) -> None:
        """Notes that backward has come to a unit: its parameters become whole, and what came before it is complete."""
        if unit is not self._current or unit.phase is not Phase.UNSHARDED:
            self._pass_over(self._schedule.rewind_to(unit))
            unit.fill_slot()
            unit.unshard()
            num_ahead = self._engine.config.prefetch_units
            prefetch(unit, self._schedule.before(num_ahead + 1), self._running, num_ahead)

    def visit_recomputation(self, unit: Unit) -> None:
        """Unshards a block that gradient checkpointing calls again before backward (Chen et al., arXiv 1604.06174)."""
        for passed in self._schedule.look_back(unit) if unit is not self._current else ():
            passed.all_gather()
        unit.all_gather()
        unit.unshard()

    def finish(self) -> None:
        """Reduces every unit that has not been reduced, in a fixed order; nothing stays unsharded."""
        engine = self._engine
        self._pass_over(self._schedule.finish_passes())
        self._turn_to(None)
        for unit in [*reversed(engine.blocks), engine.root]:
            if unit not in self._closed and unit.reduces_each_backward:
                engine.reduce(unit)
            elif unit in self._closed and unit.has_collected:
                raise LifecycleError(f"unit {unit.name!r}: a gradient came after its gradients were reduced")
        engine.wait_for_reductions()
        for unit in engine.units:
            unit.reshard()
        self._schedule.end_backward()

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
        is_sharded = self._engine.plan.grad is Residency.SHARDED
        if is_sharded and done not in self._closed and self._schedule.is_complete(done):
            self._closed.add(done)
            self._engine.reduce(done)
