"""The place of a run in its data, so that a resumed run goes on with the next sample.

The place is counted in samples: a run goes on there with any number of ranks and batches of any size. The order of an
epoch's samples is what its sampler draws, so the state of the generator from which it was drawn is saved too. Of a
stream, the batches are counted.
"""

import base64
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler
from transformers import trainer as trainer_module
from transformers.trainer_utils import has_length

from hf_zero.accelerator.shared_batches import none_borrows
from hf_zero.compat import replaced
from hf_zero.trainer.uneven import Supply


if TYPE_CHECKING:
    from hf_zero.trainer.resumable import Resumed
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Epochs:
    """The way in which a run takes its samples."""

    num_samples: int  # in an epoch, over all ranks
    per_batch: int  # in a batch of all ranks
    accumulation: int = 1  # batches in an optimizer step; an epoch's last step may have fewer
    drop_last: bool = False  # leaves out an epoch's last samples where they do not fill a batch of all ranks

    @property
    def per_step(self) -> int:
        return self.per_batch * self.accumulation

    def batches(self, first: int = 0) -> int:
        """Returns how many batches an epoch has that goes on at sample `first`. Whole steps before it are skipped and
        count. Samples of a later step that were used already do not."""
        num_samples = self.num_samples - first % self.per_step
        return num_samples // self.per_batch if self.drop_last else math.ceil(num_samples / self.per_batch)

    def steps(self, first: int = 0) -> int:
        """Returns how many optimizer steps an epoch has that goes on at sample `first`, those before it included."""
        return math.ceil(self.batches(first) / self.accumulation)


@dataclass(frozen=True)
class Position:
    """A place in the order of samples that all ranks share; batches, ranks and accumulation only cut it up."""

    epoch: int  # whole passes over the data before it
    sample: int  # samples of this epoch that have been trained on
    step: int  # optimizer steps that the run had taken when it was there

    def left(self, data: Epochs) -> int:
        """Returns how many optimizer steps are left until the end of the epoch."""
        return data.steps(self.sample) - self.sample // data.per_step

    def within(self, data: Epochs) -> "Position":
        """Returns this position, or the beginning of the next epoch where too few samples are left for a batch."""
        return self if self.left(data) > 0 else Position(self.epoch + 1, 0, self.step)

    def after(self, step: int, data: Epochs) -> "Position":
        """Returns the position at a later step, counted from the beginning of the run."""
        start = self.within(data)
        taken, left = step - start.step, start.left(data)
        if taken < left:
            return Position(start.epoch, start.sample + taken * data.per_step, step)
        epochs, steps = divmod(taken - left, data.steps())
        return Position(start.epoch + 1 + epochs, steps * data.per_step, step)

    def steps_until(self, num_epochs: float, data: Epochs) -> int:
        """Returns how many optimizer steps are left until so many epochs are done."""
        start = self.within(data)
        return max(0, start.left(data) + math.ceil((num_epochs - start.epoch - 1) * data.steps()))

    def epochs_until(self, num_steps: int, data: Epochs) -> int:
        """Returns in how many epochs, from the first on, the next `num_steps` optimizer steps end."""
        start = self.within(data)
        return start.epoch + 1 + max(0, math.ceil((num_steps - start.left(data)) / data.steps()))


def epochs_of(dataloader, accumulation: int) -> Epochs | None:
    """Returns how a prepared data loader takes its samples, or `None` where that is unknown."""
    if not isinstance(dataloader, DataLoaderShard):
        return None
    sampler, shard = own_sampler(dataloader.get_sampler()), dataloader.batch_sampler
    batches = getattr(shard, "batch_sampler", shard)  # of all ranks
    if not isinstance(sampler, (RandomSampler, SequentialSampler)) or not isinstance(batches, BatchSampler):
        return None
    if getattr(shard, "split_batches", False):
        return None
    per_batch = batches.batch_size * getattr(shard, "num_processes", 1)
    epochs = Epochs(len(sampler), per_batch, accumulation, batches.drop_last)
    return epochs if epochs.batches() == len(dataloader) > 0 else None


def leave_out(dataloader: DataLoaderShard, position: Position, data: Epochs) -> None:
    """Makes a data loader go on at `position`, once the whole steps before it are skipped."""
    count = position.sample % data.per_step
    if count:
        first = position.sample - count
        dataloader.set_sampler(Remaining(dataloader.get_sampler(), epoch=position.epoch, first=first, count=count))


def _tell_epochs(dataloader) -> None:
    """Lets a sampler, of rows or of batches, hear of the epoch in which a run goes on: where batches are skipped it is
    looked for at the batches of this rank, and not at those of all ranks."""
    shard: Any = getattr(dataloader, "batch_sampler", None)
    if isinstance(dataloader, DataLoaderDispatcher) and hasattr(getattr(shard, "sampler", None), "set_epoch"):
        shard.set_epoch = shard.sampler.set_epoch
    if not isinstance(shard, BatchSamplerShard):
        return
    if hasattr(shard.batch_sampler, "set_epoch"):  # transformers' `BatchRebalanceSampler`
        shard.set_epoch = shard.batch_sampler.set_epoch
    if hasattr(getattr(shard.batch_sampler, "sampler", None), "set_epoch"):
        shard.sampler = shard.batch_sampler.sampler


@contextmanager
def skipping_dealt_batches() -> Iterator[None]:
    """Lets Trainer skip as many batches as each rank has had, also where rank 0 reads those of all ranks, and deals
    them out (`dispatch_batches`): accelerate counts the ones that it reads."""

    def skip(dataloader, num_batches: int = 0):
        is_dealt = isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches
        is_dealt = is_dealt and dataloader.submesh_tp is None  # else it gives all ranks the one that it reads
        if is_dealt and not isinstance(dataloader.dataset, IterableDataset):  # of a stream it counts right
            num_batches *= dataloader.state.num_processes
        return skip_first_batches(dataloader, num_batches)

    with replaced(trainer_module, skip_first_batches=skip):
        yield


class Around(Sampler):
    """A sampler around another one, whose attributes it shows: samplers of batches may read them."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet, where workers unpickle it
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)


def own_sampler(sampler: Any) -> Any:
    """Returns a loader's own sampler, without what this or an earlier training put around it."""
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    return sampler


class Remaining(Around):
    """The order of another sampler, but without a few samples of one epoch that have been trained on already.

    Batches can be skipped whole. What a run with other batches had taken from the next one is left out here: `count`
    samples, the first of them at position `first`.
    """

    def __init__(self, sampler: Sampler, *, epoch: int, first: int, count: int):
        super().__init__(sampler)
        self._epoch, self._first, self._count = epoch, first, count
        self._current = epoch

    def set_epoch(self, epoch: int) -> None:
        self._current = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator:
        leaves_out = self._current == self._epoch
        for position, index in enumerate(self.sampler):
            if not (leaves_out and self._first <= position < self._first + self._count):
                yield index


class Drawn(Around):
    """A sampler that notes from which state of its generator it draws an order, or is told it for the next one.

    That is when it is iterated. When a loader is, it draws a number for its workers before, but where these stay from
    one epoch to the next (`dataloader_persistent_workers`).
    """

    def __init__(self, sampler: Sampler, generator: torch.Generator):
        super().__init__(sampler)
        self.generator = generator
        self.state: Tensor | None = None  # uint8, of the last order; None before the first
        self.next_state: Tensor | None = None  # None: whatever the generator has then

    def __iter__(self) -> Iterator:
        if self.next_state is not None:
            self.generator.set_state(self.next_state)
        self.state, self.next_state = self.generator.get_state(), None
        return iter(self.sampler)


def note_order(dataloader) -> Drawn | None:
    """Prepares a loader to be resumed: its sampler hears of epochs. Puts a [`Drawn`] into one whose order a generator
    draws, and returns it. `None` where a seed and the number of the epoch say the order, or nothing does."""
    _tell_epochs(dataloader)
    if not isinstance(dataloader, DataLoaderShard):
        return None
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)  # of all ranks
    present = getattr(batches, "sampler", None)
    sampler = own_sampler(present)
    if sampler is not present:
        dataloader.set_sampler(sampler)
    if sampler is None or not hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        return None
    drawn = Drawn(sampler, sampler.generator or torch.default_generator)
    dataloader.set_sampler(drawn)
    return drawn


@dataclass
class Pass:
    """A pass over the data that is under way, as its loader gives it."""

    epoch: int
    rows: int  # of a batch of all ranks
    num_batches: int  # that were taken so far
    length: int | None  # None for a stream, which nobody knows the end of
    order: Drawn | None  # None where no generator draws the order
    keeps_workers: bool  # from one pass to the next
    drawn: Tensor | None = None  # the generator's state from which the order is drawn, once batches were taken
    is_drawn: bool = True  # in that state the sampler is iterated; otherwise, the loader begins

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Notes from what the order is drawn while the first batches are taken: whoever goes over the loader later
        draws another. A batch sampler may draw by its sampler's generator, and never iterate the sampler."""
        order = self.order
        if order is None or self.drawn is not None:
            yield
            return
        begun, order.state = order.generator.get_state(), None
        yield
        self.drawn, self.is_drawn = (begun, False) if order.state is None else (order.state, True)

    def facts(self) -> dict[str, Any]:
        """Returns what a run needs to go on here: epoch, batches to skip and the rows of each, and from what the order
        of the epoch is drawn, as base64. Behind its last batch it is the next epoch, whose loader draws numbers for
        its workers first, unless these stay."""
        is_over = self.num_batches == self.length
        state = None
        if self.order is not None:
            state = self.order.generator.get_state() if is_over else self.drawn
        text = None if state is None else base64.b64encode(state.numpy().tobytes()).decode()
        is_drawn = self.is_drawn and (not is_over or self.keeps_workers)
        batch = 0 if is_over else self.num_batches
        place = {"epoch": self.epoch + is_over, "batch": batch, "rows": self.rows}
        return {**place, "order": text, "is_drawn": is_drawn}


def batches_had(
    facts: dict, rows: int, accumulation: int, accumulation_before: int | None, *, tells: bool = True
) -> int:
    """Returns how many batches of so many rows a pass over a stream has had, by `Pass.facts`. Other batches than those
    of before are counted in whole steps; if it `tells`, it warns of rows that these do not have, and come again."""
    rows_before = facts.get("rows", rows)
    if (rows_before, accumulation_before) == (rows, accumulation):
        return facts["batch"]
    had, per_step = facts["batch"] * rows_before, rows * accumulation
    steps, again = divmod(had, per_step)
    if again and facts["batch"] % (accumulation_before or 1):  # of the last step alone: the pass was over
        return (steps + 1) * accumulation
    if again and tells:
        logger.warning(
            "the stream goes on at a whole step of %d rows, so %d rows come again; to avoid that, resume with the "
            "batches, accumulation and ranks of before",
            per_step,
            again,
        )
    return steps * accumulation


def draw_same_order(order: Drawn | None, epoch: int, facts: dict) -> None:
    """Gives the epoch in which a run goes on the order that it had, by `Pass.facts` of the checkpoint. Trainer sets
    the generators to what they were at the checkpoint once the batches before it are skipped."""
    if order is None or facts["order"] is None or facts["epoch"] != epoch:
        return
    state = torch.frombuffer(bytearray(base64.b64decode(facts["order"])), dtype=torch.uint8)
    if facts.get("is_drawn", False):  # else, and in older checkpoints: of the moment before the loader begins
        order.next_state = state
    else:
        order.generator.set_state(state)


def draw_as_before(order: Drawn | None, dataloader) -> None:
    """Lets a loader whose workers stay draw the order of a further epoch as if they were there. Where a run goes on
    within an epoch, another loader skips batches, and this one starts its workers in the next."""
    own = getattr(dataloader, "base_dataloader", None)
    if order is not None and own is not None and own._iterator is None:
        order.next_state = order.generator.get_state()


class Place:
    """Follows where a trainer's run is in its data, and where a resumed run goes on.

    Trainer calls its methods in this order: `resume`, `look_at`, `counted`, `first_batch`, and for each epoch
    `begin_epoch`, then for each step `next` and `took`.
    """

    _supply: Supply

    def __init__(self, trainer: "ZeroTrainerMixin"):
        self._trainer = trainer
        self._start = Position(0, 0, 0)  # where this run's data begins
        self._resumed_pass: dict[str, Any] | None = None  # `Pass.facts` of the resumed run, where they are known
        self._accumulation_before: int | None = None  # micro-batches in a step of the resumed run
        self._data: Epochs | None = None  # None where batches are not known to follow an order, and before training
        self._order: Drawn | None = None  # None where no generator draws the order of the samples, and before training
        self._pass: Pass | None = None  # None before training
        self._is_stream = False

    def resume(self, resumed: "Resumed") -> None:
        """Sets the place at which the run goes on, by the record of its checkpoint."""
        self._start, self._resumed_pass = resumed.position, resumed.passed
        self._accumulation_before = resumed.accumulation

    def look_at(self, dataloader) -> None:
        """Compares the ranks' batches. All ranks call it. Raises [`DataError`] where some have none."""
        accelerator = self._trainer.accelerator
        self._supply = Supply(dataloader, accelerator.is_one_group)
        # where ranks may have unlike numbers of rows in a batch, trainers that gather rows do so too
        accelerator.borrows = None if self._supply.is_even else none_borrows
        self._is_stream = not has_length(dataloader)

    def counted(self, values: tuple, args, dataloader) -> tuple:
        """Corrects Trainer's counts of epochs and steps for a run that goes on from its position, possibly with
        batches of another size than before."""
        epochs, per_epoch, examples, samples, per_step, in_epoch, steps = self._supply.longest(values)
        self._data = epochs_of(dataloader, args.gradient_accumulation_steps)
        self._order = note_order(dataloader)
        if (data := self._resumed_data()) is not None:
            self._start = start = self._start.within(data)
            leave_out(dataloader, start, data)
            if args.max_steps > 0:
                epochs = start.epochs_until(steps - start.step, data)
            else:
                steps = start.step + start.steps_until(args.num_train_epochs, data)
        return epochs, per_epoch, examples, samples, per_step, in_epoch, steps

    def first_batch(self, epoch: int, batches: int) -> tuple[int, int]:
        """Returns the epoch in which the run goes on, and how many of its batches to skip. Trainer's own numbers are
        right for a run that starts."""
        args = self._trainer.args
        if (data := self._resumed_data()) is not None:
            return self._start.epoch, self._start.sample // data.per_step * data.accumulation
        if self._is_stream and self._resumed_pass is not None and not args.ignore_data_skip:
            rows, before, tells = self._rows_per_batch(), self._accumulation_before, args.process_index == 0
            had = batches_had(self._resumed_pass, rows, args.gradient_accumulation_steps, before, tells=tells)
            return self._resumed_pass["epoch"], had  # Trainer knows no pass but the first
        return epoch, batches

    def begin_epoch(self, epoch: int, dataloader, num_batches: int, num_steps: int, *, skips: int | None) -> dict:
        """Begins a pass over the data.

        Args:
            num_batches (`int`), num_steps (`int`): of a whole epoch, as Trainer counts them.
            skips (`int`, *optional*): batches that are skipped in the run's first epoch; `None` in later ones.

        Returns:
            `dict`: both numbers for this epoch, which may be shorter where it was begun before.
        """
        args = self._trainer.args
        if skips is not None:
            if self._resumed_pass is not None and not args.ignore_data_skip:
                draw_same_order(self._order, epoch, self._resumed_pass)
        elif args.dataloader_persistent_workers:
            draw_as_before(self._order, dataloader)
        if (data := self._resumed_data()) is not None and epoch == self._start.epoch:
            num_batches, num_steps = data.batches(self._start.sample), data.steps(self._start.sample)
        length = None if self._is_stream else num_batches
        keeps_workers = args.dataloader_persistent_workers
        self._pass = Pass(epoch, self._rows_per_batch(), skips or 0, length, self._order, keeps_workers)
        return {"steps_in_epoch": num_batches, "num_update_steps_per_epoch": num_steps}

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Wraps the taking of a step's batches."""
        with nullcontext() if self._pass is None else self._pass.taking():
            yield

    def next(self, batches: Iterator, count: int) -> Iterator:
        """Returns the batches of one step. Raises [`DataError`], on all ranks, where a rank has fewer than others."""
        return self._supply.next(batches, count, self._trainer._engine.comm, self._trainer.state.global_step)

    def took(self, count: int) -> None:
        """Counts batches that were taken."""
        if self._pass is not None:
            self._pass.num_batches += count

    def facts(self) -> dict[str, Any]:
        """Returns the record for a checkpoint."""
        position = None if self._data is None else self._start.after(self._trainer.state.global_step, self._data)
        return {
            "position": asdict(position) if position is not None else None,
            "pass": self._pass.facts() if self._pass is not None else None,
            "accumulation": self._trainer.args.gradient_accumulation_steps,
        }

    def _resumed_data(self) -> Epochs | None:
        """Returns how the data is taken, if the run goes on from a known place in it."""
        return None if self._start.step == 0 or self._trainer.args.ignore_data_skip else self._data

    def _rows_per_batch(self) -> int:
        """Returns the rows of a batch of all ranks, those that ranks share once."""
        trainer = self._trainer
        if trainer.accelerator.split_batches:
            return trainer._train_batch_size
        return trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps
