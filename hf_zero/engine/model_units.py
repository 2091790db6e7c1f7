"""The units of one model, and what they share."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.comm.bus import LateChecks
from hf_zero.config import MemoryTier, Residency, ZeroConfig
from hf_zero.engine import buffers
from hf_zero.engine.away import Placeholders
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.patch import Uncopyable
from hf_zero.engine.rest import ShardedRest
from hf_zero.engine.schedule import Schedule
from hf_zero.engine.unit import Unit
from hf_zero.errors import CommError, LifecycleError
from hf_zero.sharding.arena import Arenas


if TYPE_CHECKING:
    from hf_zero.storage import DiskOffload


logger = logging.getLogger(__name__)


class Updates(Protocol):
    """The part of an optimizer step that is made in backward. It can be finished, so that masters can be read;
    abandoned by all ranks; or lost on one, until the others know of it."""

    def finish_update(self) -> None: ...
    def abandon(self) -> None: ...
    def lose_gradients(self) -> None: ...


class ShardedState(Protocol):
    """An optimizer over the shards, as far as its memory is measured, and its loads are watched."""

    torn: str | None  # what broke off while it changed the state; None: nothing has

    def state_tensors(self) -> Iterable[tuple[Tensor, MemoryTier]]: ...
    def unsharded_state_nbytes(self) -> int: ...


def _nothing() -> None:
    """Does nothing: the default of an optional callback."""


class ModelUnits(Uncopyable):
    """A model's units, with the ranks, the settings and the memory that they share. `modules` are those of the blocks,
    `vocabulary` those of the embedding and of the head, where they are units of their own."""

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
        bus: Bus,
    ):
        self.model = model
        self.bus = bus
        self.placeholders = placeholders
        self.config = config
        self.comm = comm
        self.plan = config.plan(comm.shard_group.num_ranks)
        self.root = root
        self.schedule = schedule
        self.modules = modules
        self.vocabulary = vocabulary
        self.head = next((stack.head for stack in schedule.stacks if stack.head is not None), None)
        self.head_stays = False  # in a backward until its end: it was called before the blocks, or between them
        self.divided_over: Comm | None = None  # the tensor-parallel ranks; None where each holds whole parameters
        self.compiled_with: dict | None = None  # options of `torch.compile`; None while blocks run eagerly
        # those of the stacks: blocks, and embedding and head where they are units
        self.blocks = [unit for stack in schedule.stacks for unit in stack.units]
        self.units = [root, *self.blocks]
        self.order_reductions()
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.disk: DiskOffload | None = None  # where masters rest between uses; None where they rest in memory
        self.arenas: Arenas | None = None  # until `build` is done, and after `unshard`
        self.sinks: dict[int, Any] = {}  # where weights' gradients go (`direct.Sink`), by `id` of the weight
        self.handles: list = []  # of all that was put onto the model: each has `remove()`
        self.late_checks = LateChecks(bus, reads_at_once=not self.runs_ahead)
        bus.synchronize_before_end(self)
        self.shares_buffers = True  # each step gives all ranks the first one's
        self._shared_buffers = buffers.SharedBuffers(model, comm) if comm.num_ranks > 1 else None
        # whether stages 0 and 1 reduce while the next backward goes, known to be the last before the step
        self.reduces_this_backward = False
        self._reducing: list[Pending] = []
        self.on_reduced: Callable[[Unit], None] | None = None  # called when a backward has a unit's average
        self.updates: weakref.WeakSet[Updates] = weakref.WeakSet()  # of the optimizers
        # by name of a parameter: what broke off while it changed values, so that some are new and others not
        self.torn: dict[str, str] = {}
        self.optimizer: weakref.ref[ShardedState] | None = None  # the last that was made; None before
        for unit in self.units:
            unit.finish_updates, unit.note_torn = self.finish_updates, self.note_torn
        # refuses what came into the model later; None until `build` is done, and after `unshard`
        self.refuse_new_members: Callable[[], None] | None = None

    def share_buffers(self) -> None:
        """Gives all ranks the buffers of rank 0, as DDP does before the first forward of a step."""
        if self.shares_buffers and self._shared_buffers is not None:
            self._shared_buffers.share()

    def order_reductions(self) -> None:
        """Sets the order, the same on all ranks, in which is reduced what no pass orders: units from the last to the
        first, then embeddings, whose gradients come behind those of all blocks, and the root."""
        expected = [unit for stack in self.schedule.stacks for unit in stack.units]
        self.reduction_order = [*sorted(reversed(expected), key=lambda unit: unit.is_embedding), self.root]

    @property
    def stage(self) -> int:
        return self.config.stage

    @property
    def runs_ahead(self) -> bool:
        """Whether the host waits for nothing that the device does in a step. With offload it does: the update is its
        own work."""
        return self.comm.runs_ahead and not self.plan.is_offloaded

    def reduced_early(self) -> list[Unit]:
        """Returns the units that stages 0 and 1 reduce as a backward goes, in the order of all ranks: those that each
        backward reduces, or, where there are none, those that this one does (`reduces_this_backward`)."""
        is_whole = self.plan.grad is not Residency.SHARDED and not self.plan.is_offloaded
        exchanges = self.divided_over is not None or self.config.sequence_parallel > 1  # in backward, with others
        if self.comm.num_ranks == 1 or not is_whole or exchanges:
            return []
        each = [unit for unit in self.reduction_order if unit.reduces_each_backward]
        return each or [unit for unit in self.reduction_order if unit.is_trainable and self.reduces_this_backward]

    @property
    def gathers_stacks(self) -> bool:
        """Whether ranks exchange the values of several stacks, of which a forward need not call all. Inside `gathered`
        they do not, and a rank may call the model alone."""
        if len(self.schedule.stacks) == 1 or self.comm.shard_group.num_ranks == 1:
            return False
        away = (flat.rest for unit in self.blocks if not unit.num_gathered for flat in unit.flats)
        return any(isinstance(rest, ShardedRest) for rest in away)

    @property
    def is_cast(self) -> bool:
        """Whether the parameters are shown in another dtype, see `ShardedModel.computing_in`."""
        return any(flat.cast for flat in self.flats)

    def gradients(self) -> Iterator[Gradient]:
        """Yields the gradients of all trainable buffers, in a fixed order."""
        for unit in self.units:
            yield from unit.gradients

    def unshard_around(self, *, with_head: bool) -> None:
        """Makes the parameters of the root whole; `with_head` those of the head too, if it is a unit."""
        units = [self.root, self.head] if with_head and self.head is not None else [self.root]
        for unit in units:
            unit.all_gather()
        for unit in units:
            unit.unshard()

    def is_head(self, module: nn.Module) -> bool:
        """Whether a module is the head, and its parameters are a unit."""
        return self.head is not None and self.vocabulary[self.head] is module

    def reshard_around(self) -> None:
        """Puts placeholders into the parameters of root and head."""
        for unit in (self.root, self.head):
            if unit is not None:
                unit.reshard()

    def reduce(self, unit: Unit, at_step: bool = False) -> None:
        """Begins to reduce a unit's gradients, after its backward or `at_step`."""
        if at_step:
            self._reducing.append(unit.reduce_gradients(at_step=True))
        else:
            on_reduced = partial(self.on_reduced, unit) if self.on_reduced else _nothing
            self._reducing.append(unit.reduce_gradients(on_reduced))

    def reduce_collected(self) -> None:
        """Begins to reduce what is reduced once in a step, and is not yet. Where there is nothing it is zero."""
        for unit in self.reduction_order:
            if any(not gradient.is_reduced for gradient in unit.gradients if gradient.is_reduced_once):
                self.reduce(unit, at_step=True)
        # what each backward reduces, all ranks have reduced as often: who has dropped it does not do so alone
        for gradient in self.gradients():
            if not gradient.is_reduced:
                gradient.become_zero()

    def wait_for_reductions(self) -> None:
        """Waits for all reductions under way; what goes to the host may still be on its way."""
        for pending in self._reducing:
            pending.wait()
        self._reducing.clear()
        for slots in {
            id(unit.gradient_slots): unit.gradient_slots for unit in self.units if unit.gradient_slots
        }.values():
            slots.wait_for_all()

    def wait_for_host(self) -> None:
        """Waits for the jobs of the bus's threads. When one rank's have failed, all ranks raise: others [`CommError`],
        that one whatever it was."""
        if self.plan.is_offloaded:
            run_on_all_ranks(self.comm, "an update on the host", self.bus.wait_for_jobs, CommError)

    def finish_updates(self) -> None:
        """Finishes updates that are under way, before the masters are read, and raises what was found out about
        earlier ones. All ranks call it."""
        self.finish_host_updates()
        self.late_checks.settle()

    def finish_host_updates(self) -> None:
        """Finishes updates that are under way on the host. All ranks call it."""
        for updates in list(self.updates):
            updates.finish_update()

    def wait_for_copies(self) -> None:
        """Lets the host wait until no copy to the device reads what rests in the host's memory and is about to get new
        values: parameters on their way to a gather, masters on their way to compute copies. Who has waited for either
        has made the device wait, and not the host."""
        if self.plan.is_offloaded:
            self.bus.synchronize()

    def evict_all(self) -> None:
        """Drops what the slots hold, before the values change. If the change breaks off, none keeps former values."""
        for unit in self.units:
            unit.evict()

    @property
    def newest_optimizer(self) -> ShardedState | None:
        """The optimizer that was made last, while it is there."""
        return self.optimizer() if self.optimizer is not None else None

    @contextmanager
    def noting_torn(self, what: str) -> Iterator[None]:
        """Notes that the parameters and the optimizer's state are torn if the context raises. `what`: what changes
        them, the beginning of the message."""
        try:
            yield
        except BaseException:
            self.note_torn(what)
            logger.warning("hf_zero: %s broke off; nothing is saved before a whole checkpoint was loaded", what)
            raise

    def note_torn(self, what: str) -> None:
        """Notes that the parameters and the optimizer's state are torn."""
        for info in (info for flat in self.flats if flat.trainable for info in flat.infos):
            self.torn.setdefault(info.name, what)
        if (optimizer := self.newest_optimizer) is not None:
            optimizer.torn = optimizer.torn or what

    def drop_torn(self, what: str) -> None:
        """Drops a note that says `what`, which has been made good since."""
        self.torn = {name: why for name, why in self.torn.items() if why != what}
        optimizer = self.newest_optimizer
        if optimizer is not None and optimizer.torn == what:
            optimizer.torn = None

    def refuse_torn(self) -> None:
        """Raises [`LifecycleError`] where values or state are torn: they must not be saved."""
        optimizer = self.newest_optimizer
        for name, what in self.torn.items():
            raise LifecycleError(
                f"saving: {what} broke off, so some parameters have its values and others not ({name}, "
                f"{len(self.torn)} in all); load a whole checkpoint, or these weights with hf_zero.load_weights"
            )
        if optimizer is not None and optimizer.torn is not None:
            raise LifecycleError(
                f"saving: {optimizer.torn} broke off, so a part of the optimizer's state has its values and the rest "
                "not; load a whole checkpoint, or make a new optimizer"
            )

    def refuse_other_optimizer(self, optimizer: object) -> None:
        """Refuses the step of an optimizer after which another one was made on the model."""
        newest = self.newest_optimizer
        if newest is not None and newest is not optimizer:
            raise LifecycleError(
                f"step: {type(self.model).__name__} has another optimizer, which was made later, and a step takes the "
                "gradients of the whole model; make one with all parameter groups, or one of several: "
                "hf_zero.ShardedOptimizer(model, [first, second])"
            )

    def refuse_held(self, what: str) -> None:
        """Refuses an act, by the words of the message, inside `hf_zero.gathered` or `computing_in`."""
        if self.is_cast:
            raise LifecycleError(f"{what} inside computing_in(...): leave it first")
        for unit in self.units:
            if unit.num_gathered:
                raise LifecycleError(
                    f"unit {unit.name!r}: {what} inside hf_zero.gathered(...); leave the context first"
                )
