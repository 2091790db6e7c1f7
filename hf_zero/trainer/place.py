"""The position of a run in its data, so that a resumed run continues with the next sample.

The position is a number of samples, so a run can resume with another number of ranks or another batch size. A sampler
draws the order of an epoch's samples, so checkpoints also save the state of its generator before the draw. For
streams, the position is a number of batches.
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
    """How a run splits its samples into epochs, optimizer steps and batches."""

    num_samples: int  # per epoch, over all ranks
    per_batch: int  # samples per global batch
    accumulation: int = 1  # batches per optimizer step; an epoch's last step may have fewer
    drop_last: bool = False  # drop an incomplete last global batch

    @property
    def per_step(self) -> int:
        return self.per_batch * self.accumulation

    def batches(self, first: int = 0) -> int:
        """Returns the number of batches in an epoch that resumes at sample `first`. Complete steps before it are
        included; samples of an incomplete step before it are not."""
        num_samples = self.num_samples - first % self.per_step
        return num_samples // self.per_batch if self.drop_last else math.ceil(num_samples / self.per_batch)

    def steps(self, first: int = 0) -> int:
        """Returns the number of optimizer steps in an epoch that resumes at sample `first`, including earlier ones."""
        return math.ceil(self.batches(first) / self.accumulation)


@dataclass(frozen=True)
class Position:
    """A position in the global order of samples. It does not depend on batch size, ranks or accumulation."""

    epoch: int  # complete passes over the data
    sample: int  # samples of the current epoch that were trained on
    step: int  # optimizer steps of the run so far

    def left(self, data: Epochs) -> int:
        """Returns the number of optimizer steps until the end of the epoch."""
        return data.steps(self.sample) - self.sample // data.per_step

    def within(self, data: Epochs) -> "Position":
        """Returns this position, or the start of the next epoch if too few samples remain for a batch."""
        return self if self.left(data) > 0 else Position(self.epoch + 1, 0, self.step)

    def after(self, step: int, data: Epochs) -> "Position":
        """Returns the position at a later step, counted from the start of the run."""
        start = self.within(data)
        taken, left = step - start.step, start.left(data)
        if taken < left:
            return Position(start.epoch, start.sample + taken * data.per_step, step)
        epochs, steps = divmod(taken - left, data.steps())
        return Position(start.epoch + 1 + epochs, steps * data.per_step, step)

    def steps_until(self, num_epochs: float, data: Epochs) -> int:
        """Returns the number of optimizer steps until `num_epochs` epochs are complete."""
        start = self.within(data)
        return max(0, start.left(data) + math.ceil((num_epochs - start.epoch - 1) * data.steps()))

    def epochs_until(self, num_steps: int, data: Epochs) -> int:
        """Returns the number of epochs, counted from the first, that the next `num_steps` optimizer steps reach."""
        start = self.within(data)
        return start.epoch + 1 + max(0, math.ceil((num_steps - start.left(data)) / data.steps()))


def epochs_of(dataloader, accumulation: int) -> Epochs | None:
    """Returns how a prepared data loader splits its samples, or `None` if that is unknown."""
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
    """Makes a data loader continue at `position`, after the complete steps before it are skipped."""
    count = position.sample % data.per_step
    if count:
        first = position.sample - count
        dataloader.set_sampler(Remaining(dataloader.get_sampler(), epoch=position.epoch, first=first, count=count))


def _tell_epochs(dataloader) -> None:
    """Forwards `set_epoch` to a sampler or batch sampler in a resumed epoch. accelerate's loader that skips batches
    calls it on this rank's batch sampler, not on the wrapped global one."""
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
    """Makes Trainer skip the right number of batches with `dispatch_batches`, where rank 0 reads the batches of all
    ranks: Trainer counts batches per rank, but accelerate counts batches read."""

    def skip(dataloader, num_batches: int = 0):
        is_dealt = isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches
        is_dealt = is_dealt and dataloader.submesh_tp is None  # with tensor parallelism, all ranks get the same batch
        if is_dealt and not isinstance(dataloader.dataset, IterableDataset):  # accelerate counts streams per rank
            num_batches *= dataloader.state.num_processes
        return skip_first_batches(dataloader, num_batches)

    with replaced(trainer_module, skip_first_batches=skip):
        yield


class Around(Sampler):
    """A wrapper of a sampler that exposes its attributes, which batch samplers may read."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not set yet while a worker unpickles it
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)


def own_sampler(sampler: Any) -> Any:
    """Returns a loader's original sampler, without wrappers of this or an earlier training."""
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    return sampler


class Remaining(Around):
    """The order of another sampler without samples that were already trained on in one epoch.

    Trainer can only skip complete batches. If the earlier run used another batch size, it may have taken part of the
    next batch; this sampler excludes those `count` samples, starting at position `first` of epoch `epoch`.
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
        excludes = self._current == self._epoch
        for position, index in enumerate(self.sampler):
            if not (excludes and self._first <= position < self._first + self._count):
                yield index


class Drawn(Around):
    """A sampler that records the state of its generator before it draws an order, and can set the state for the next.

    The order is drawn when the sampler is iterated. A loader draws a seed for its workers from the generator before
    that, unless the workers persist between epochs (`dataloader_persistent_workers`).
    """

    def __init__(self, sampler: Sampler, generator: torch.Generator):
        super().__init__(sampler)
        self.generator = generator
        self.state: Tensor | None = None  # uint8, for the last order; None before the first
        self.next_state: Tensor | None = None  # None: use the generator's current state

    def __iter__(self) -> Iterator:
        if self.next_state is not None:
            self.generator.set_state(self.next_state)
        self.state, self.next_state = self.generator.get_state(), None
        return iter(self.sampler)


def note_order(dataloader) -> Drawn | None:
    """Prepares a loader for resuming: forwards `set_epoch` to its sampler, and wraps a sampler that draws from a
    generator into [`Drawn`]. Returns the wrapper, or `None` if the sampler has no generator or depends only on a seed
    and the epoch."""
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
    """The current pass over the data."""

    epoch: int
    rows: int  # per global batch
    num_batches: int  # taken so far
    length: int | None  # None for a stream of unknown length
    order: Drawn | None  # None if no generator draws the order
    keeps_workers: bool  # workers persist between passes
    drawn: Tensor | None = None  # generator state from which the order was drawn; None before the first batches
    is_drawn: bool = True  # `drawn` is the state before the sampler is iterated; False: before the loader is iterated

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Records the generator state of the order while the first batches are taken, since a later iteration over the
        loader draws another order. A batch sampler may use its sampler's generator without iterating the sampler."""
        order = self.order
        if order is None or self.drawn is not None:
            yield
            return
        begun, order.state = order.generator.get_state(), None
        yield
        self.drawn, self.is_drawn = (begun, False) if order.state is None else (order.state, True)

    def facts(self) -> dict[str, Any]:
        """Returns the record for resuming here: epoch, batches to skip, rows per batch, and the generator state of the
        epoch's order as base64. After the last batch this is the start of the next epoch, whose loader first draws a
        seed for its workers unless they persist."""
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
    """Converts the position in a stream (`Pass.facts`) to a number of batches of `rows` rows. If the batch size or the
    accumulation has changed, the position is rounded down to complete steps. If `tells`, logs a warning about rows
    that are therefore trained on again."""
    rows_before = facts.get("rows", rows)
    if (rows_before, accumulation_before) == (rows, accumulation):
        return facts["batch"]
    had, per_step = facts["batch"] * rows_before, rows * accumulation
    steps, again = divmod(had, per_step)
    if again and facts["batch"] % (accumulation_before or 1):  # an incomplete last step: the pass was over
        return (steps + 1) * accumulation
    if again and tells:
        logger.warning(
            "the stream resumes at a complete step of %d rows, so %d rows are trained on again; to avoid that, resume "
            "with the previous batch size, accumulation and number of ranks",
            per_step,
            again,
        )
    return steps * accumulation


def draw_same_order(order: Drawn | None, epoch: int, facts: dict) -> None:
    """Restores the sample order of the resumed epoch from the checkpoint's `Pass.facts`. Trainer restores the
    generators themselves after it has skipped batches."""
    if order is None or facts["order"] is None or facts["epoch"] != epoch:
        return
    state = torch.frombuffer(bytearray(base64.b64decode(facts["order"])), dtype=torch.uint8)
    if facts.get("is_drawn", False):  # otherwise, and in older checkpoints: the state before the loader is iterated
        order.next_state = state
    else:
        order.generator.set_state(state)


def draw_as_before(order: Drawn | None, dataloader) -> None:
    """Makes a loader with persistent workers draw a later epoch's order as if the workers were already running. If a
    run resumes within an epoch, another loader skips the batches, and this one starts its workers, and draws a seed
    for them, in the next epoch."""
    own = getattr(dataloader, "base_dataloader", None)
    if order is not None and own is not None and own._iterator is None:
        order.next_state = order.generator.get_state()


class Place:
    """Tracks a trainer's position in its data, and where a resumed run continues.

    The trainer calls the methods in this order: `resume`, `look_at`, `counted`, `first_batch`; for each epoch
    `begin_epoch`; for each step `next` and `took`.
    """

    _supply: Supply

    def __init__(self, trainer: "ZeroTrainerMixin"):
        self._trainer = trainer
        self._start = Position(0, 0, 0)  # where this run starts in the data
        self._resumed_pass: dict[str, Any] | None = None  # `Pass.facts` of the resumed run, if known
        self._accumulation_before: int | None = None  # micro-batches per step of the resumed run
        self._data: Epochs | None = None  # None before training, and if the split of samples is unknown
        self._order: Drawn | None = None  # None before training, and if no generator draws the order
        self._pass: Pass | None = None  # None before training
        self._is_stream = False

    def resume(self, resumed: "Resumed") -> None:
        """Sets the position at which the run continues from the checkpoint's record."""
        self._start, self._resumed_pass = resumed.position, resumed.passed
        self._accumulation_before = resumed.accumulation

    def look_at(self, dataloader) -> None:
        """Compares the number of batches of the ranks. All ranks must call it. Raises [`DataError`] if a rank has
        none."""
        accelerator = self._trainer.accelerator
        self._supply = Supply(dataloader, accelerator.is_one_group)
        # tells trainers that gather rows themselves that the ranks' batches may differ in size
        accelerator.borrows = None if self._supply.is_even else none_borrows
        self._is_stream = not has_length(dataloader)

    def counted(self, values: tuple, args, dataloader) -> tuple:
        """Corrects Trainer's numbers of epochs and steps for a resumed run, possibly with another batch size."""
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
        """Returns the epoch in which the run continues, and the number of its batches to skip. Trainer's own numbers,
        the arguments, are right for a new run."""
        args = self._trainer.args
        if (data := self._resumed_data()) is not None:
            return self._start.epoch, self._start.sample // data.per_step * data.accumulation
        if self._is_stream and self._resumed_pass is not None and not args.ignore_data_skip:
            rows, before, tells = self._rows_per_batch(), self._accumulation_before, args.process_index == 0
            had = batches_had(self._resumed_pass, rows, args.gradient_accumulation_steps, before, tells=tells)
            return self._resumed_pass["epoch"], had  # Trainer assumes the first pass
        return epoch, batches

    def begin_epoch(self, epoch: int, dataloader, num_batches: int, num_steps: int, *, skips: int | None) -> dict:
        """Starts a pass over the data.

        Args:
            num_batches (`int`), num_steps (`int`): Trainer's numbers for a full epoch.
            skips (`int`, *optional*): Batches to skip in the run's first epoch; `None` in later epochs.

        Returns:
            `dict`: Both numbers for this epoch, which is shorter if the run resumes within it.
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
        """Context in which a step's batches are taken, see `Pass.taking`."""
        with nullcontext() if self._pass is None else self._pass.taking():
            yield

    def next(self, batches: Iterator, count: int) -> Iterator:
        """Returns the batches of one step. Raises [`DataError`] on all ranks if a rank has fewer than others."""
        return self._supply.next(batches, count, self._trainer._engine.comm, self._trainer.state.global_step)

    def took(self, count: int) -> None:
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
        """Returns how the data is split, if the run was resumed at a known position."""
        return None if self._start.step == 0 or self._trainer.args.ignore_data_skip else self._data

    def _rows_per_batch(self) -> int:
        """Returns the rows of a global batch. Rows that ranks share count once."""
        trainer = self._trainer
        if trainer.accelerator.split_batches:
            return trainer._train_batch_size
        return trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps
