"""The batches of a run: its position among them, and batches for ranks that have unequal numbers of them.

The place of a run is counted in samples, so that it goes on there with any number of ranks and batches of any size.

The loaders that accelerate makes give every rank equally many batches. Others need not: `even_batches=False`, a data
set that was divided beforehand, a loader of the user's own. `Trainer` gathers after every batch, and a sharded model
in every forward, so a rank that stopped would leave the others waiting. In evaluation, ranks that are done go on with
borrowed batches that do not count. In training, where that would change what is learnt, all ranks stop at the first
batch that lacks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import find_batch_size, gather, gather_object, recursively_apply, send_to_device
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_zero.accelerator.shared_batches import none_borrows
from hf_zero.comm import Comm
from hf_zero.compat import check_overrides
from hf_zero.errors import DataError
from hf_zero.trainer.disk_space import check_room
from hf_zero.trainer.order import (
    Drawn,
    Pass,
    Remaining,
    batches_had,
    draw_as_before,
    draw_same_order,
    note_order,
    own_sampler,
    skipping_dealt_batches,
)
from hf_zero.trainer.trainer_base import ZeroTrainerBase


OVERRIDES = ("set_initial_training_values", "_init_training_state", "_run_epoch", "get_batch_samples")


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


# Ranks with unlike amounts of data


@contextmanager
def evened(trainer: Trainer, dataloader) -> Iterator:
    """Gives the loader for an evaluation of `trainer`: its own, or one that yields on every rank as long as any rank
    has data."""
    args, averages = trainer.args, trainer.args.average_tokens_across_devices
    borrows, trainer.accelerator.borrows = trainer.accelerator.borrows, None  # in training, and here
    if trainer.accelerator.num_sharing > 1:
        gather_by_setting(trainer)  # Seq2SeqTrainer asks for all that ranks have, which is each row several times
    if not is_even(supplies(dataloader, trainer.accelerator.is_one_group)):
        dataloader = EvenLoader(dataloader, num_sharing=trainer.accelerator.num_sharing)
        trainer.gather_function = partial(dataloader.gather, use_gather_object=args.eval_use_gather_object)
        trainer.accelerator.borrows = dataloader.borrows  # for trainers that gather rows themselves
        args.average_tokens_across_devices = False  # over what each rank has: a batch weighs as its rows do
    try:
        yield dataloader
    finally:
        args.average_tokens_across_devices = averages
        trainer.accelerator.borrows = borrows
        gather_by_setting(trainer)


def gather_by_setting(trainer: Trainer) -> None:
    """Lets an evaluation gather as `eval_use_gather_object` says, which Trainer forgets after the first."""
    own = trainer.accelerator.gather_for_metrics
    trainer.gather_function = partial(own, use_gather_object=trainer.args.eval_use_gather_object)


def is_even(found: list[tuple[bool, int | None]]) -> bool:
    """Returns whether all ranks are known to get equally many rows with every batch, by their `supplies`."""
    return len(found) == 1 or all(other == (True, found[0][1]) for other in found)


def supplies(dataloader, is_one_group: bool) -> list[tuple[bool, int | None]]:
    """Returns of each rank whether its loader is of a kind that is even, and its number of batches where that is
    known. All ranks call it, and get the same."""
    sampler = getattr(dataloader, "batch_sampler", None)
    is_known = (
        isinstance(dataloader, DataLoaderDispatcher)
        or isinstance(getattr(dataloader, "dataset", None), IterableDatasetShard)
        or (isinstance(sampler, BatchSamplerShard) and sampler.even_batches)
        or (isinstance(dataloader, DataLoaderShard) and is_one_group)
    )
    try:
        length = len(dataloader)
    except TypeError:  # a data set without length
        length = None
    return gather_object([(is_known, length)])


class Supply:
    """The batches of a training. Where ranks may have unequal numbers of them, they compare before each step, so that
    no rank waits for one that has no batch.

    Raises:
        `DataError`: some ranks have no data at all; on all ranks.
    """

    def __init__(self, dataloader, is_one_group: bool):
        found = supplies(dataloader, is_one_group)
        self.is_even = is_even(found)
        self._ended: Iterator | None = None  # of which all ranks have had the last batch
        lengths = [length for _, length in found]
        if not self.is_even and 0 in lengths and any(lengths):
            _refuse("before the first step", [1 if length is None else length for length in lengths])

    def longest(self, counts: Sequence[int]) -> Sequence[int]:
        """Returns the largest number of batches that any rank has counted, so that all ranks have the same
        schedule."""
        if self.is_even:
            return counts
        return tuple(map(max, zip(*gather_object([tuple(counts)]), strict=True)))

    def next(self, batches: Iterator, count: int, comm: Comm, step: int) -> Iterator:
        """Returns the batches of one step, which all ranks have. Raises [`DataError`] where some ranks have fewer than
        others, and are named; on all ranks."""
        if self.is_even or batches is self._ended:
            return batches
        taken = list(islice(batches, count))
        counts = comm.on_host.all_gather_vector(torch.tensor([len(taken)], dtype=torch.int32))
        counts = counts.flatten().tolist()
        if min(counts) < max(counts):
            _refuse(f"step {step + 1}", counts)
        if len(taken) < count:
            self._ended = batches
        return iter(taken)


def _refuse(when: str, counts: list[int]) -> None:
    least, most = min(counts), max(counts)
    batches = f"{least or 'no'} batch{'' if least == 1 else 'es'}"
    raise DataError(
        f"training data, {when}: rank {counts.index(least)} has {batches} left "
        f"where rank {counts.index(most)} has {most}; give every rank equally many batches (even_batches or "
        "dataloader_drop_last, DistributedSampler with drop_last=True), or return a loader that accelerate divides: "
        "self.accelerator.prepare(DataLoader(...))"
    )


class EvenLoader:
    """A loader that gives every rank batches as long as any rank has one. `num_sharing` neighbouring ranks have the
    same ones, whose rows count once."""

    def __init__(self, dataloader, num_sharing: int = 1):
        self.dataset = getattr(dataloader, "dataset", None)
        self.end_of_dataloader = False  # accelerate's word for the last batch
        self.remainder = -1  # and for how much of it counts, which `gather` knows here
        self._dataloader = dataloader
        self._num_sharing = num_sharing
        self._rank = PartialState().process_index
        self._counts: list[int] = []  # rows of each rank that count in the present batch

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator:
        state = GradientState()
        batches = iter(self._dataloader)
        upcoming, counts = self._next(batches)
        state._add_dataloader(self)  # after the rank's own loader, whose end may come early
        try:
            while any(counts):
                batch, self._counts = upcoming, counts
                upcoming, counts = self._next(batches)
                self.end_of_dataloader = not any(counts)
                yield batch
        finally:
            state._remove_dataloader(self)

    def _next(self, batches: Iterator) -> tuple:
        """Returns this rank's next batch, or another rank's, and how many rows of each rank's count."""
        batch = next(batches, None)
        counts = gather_object([0 if batch is None else find_batch_size(batch) or 1])
        if any(counts) and not all(counts):
            lends = self._rank == counts.index(max(counts))
            lent = gather_object([send_to_device(batch, "cpu") if lends else None])
            batch = next(other for other in lent if other is not None) if batch is None else batch
        return batch, counts

    def gather(self, tensors, use_gather_object: bool = False):
        """Gathers the rows that count, of all ranks and in rank order. It stands in for
        `Accelerator.gather_for_metrics`, and makes a list of objects as that does."""
        if use_gather_object:
            own = self._own(tensors) if isinstance(tensors, Tensor) else tensors if self._counts[self._rank] else []
            return gather_object(own)
        return recursively_apply(self._gather, tensors)

    def borrows(self) -> bool:
        """Whether the present batch of this rank is another's."""
        return not self._counts[self._rank]

    def _own(self, tensor: Tensor) -> Tensor:
        """Returns the rows of this rank. Trainer repeats the loss as often as its own batch size says, which a loader
        may exceed."""
        return tensor[torch.arange(self._counts[self._rank], device=tensor.device) % len(tensor)]

    def _gather(self, tensor: Tensor) -> Tensor:
        own, most = self._counts[self._rank], max(self._counts)
        rows = tensor
        if not len(tensor) == own == most:
            rows = tensor.new_zeros(most, *tensor.shape[1:])
            rows[:own] = self._own(tensor)
        parts = list(zip(gather(rows).split(most), self._counts, strict=True))
        return torch.cat([part[:count] for part, count in parts[:: self._num_sharing]])


class BatchesMixin(ZeroTrainerBase):
    """The part of `ZeroTrainerMixin` that follows where the run is in its data."""

    _start = Position(0, 0, 0)  # where this run's data begins
    _data: Epochs | None = None  # None where batches are not known to follow an order, and before training
    _supply: Supply
    _pass: Pass | None = None  # None before training
    _resumed_pass: dict[str, Any] | None = None  # `Pass.facts` of the run that goes on, where they are known
    _accumulation_before: int | None = None  # micro-batches in a step of that run
    _order: Drawn | None = None  # None where no generator draws the order of the samples, and before training
    _is_stream: bool = False

    def set_initial_training_values(self, args, dataloader, **kwargs):
        """Counts as Trainer does. A resumed run counts from its position, also with batches of another size than
        before."""
        self._supply = Supply(dataloader, self.accelerator.is_one_group)
        # where ranks may have unlike numbers of rows in a batch, trainers that gather rows do so too
        self.accelerator.borrows = None if self._supply.is_even else none_borrows
        self._is_stream = not has_length(dataloader)
        values = super().set_initial_training_values(args, dataloader, **kwargs)
        epochs, per_epoch, examples, samples, per_step, in_epoch, steps = self._supply.longest(values)
        self._data = epochs_of(dataloader, args.gradient_accumulation_steps)
        self._order = note_order(dataloader)
        if self._goes_on():
            self._start = start = self._start.within(self._data)
            leave_out(dataloader, start, self._data)
            if args.max_steps > 0:
                epochs = start.epochs_until(steps - start.step, self._data)
            else:
                steps = start.step + start.steps_until(args.num_train_epochs, self._data)
        return epochs, per_epoch, examples, samples, per_step, in_epoch, steps

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial, **kwargs
    ):
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial, **kwargs
        )
        if self._goes_on():
            return self._start.epoch, self._start.sample // self._data.per_step * self._data.accumulation
        if self._is_stream and self._resumed_pass is not None and not self.args.ignore_data_skip:
            rows, before, tells = self._rows_per_batch(), self._accumulation_before, self.args.process_index == 0
            had = batches_had(self._resumed_pass, rows, self.args.gradient_accumulation_steps, before, tells=tells)
            return self._resumed_pass["epoch"], had  # Trainer knows no pass but the first
        return epochs, batches

    def _rows_per_batch(self) -> int:
        """Returns the rows of a batch of all ranks, those that ranks share once."""
        if self.accelerator.split_batches:
            return self._train_batch_size
        return self.get_total_train_batch_size(self.args) // self.args.gradient_accumulation_steps

    def _run_epoch(self, *, epoch, steps_in_epoch, num_update_steps_per_epoch, **kwargs):
        """Runs an epoch as Trainer does. One that was begun before may be shorter, in batches of the present size."""
        is_first = epoch == kwargs["epochs_trained"]
        if is_first:
            check_room(self)
            if self._resumed_pass is not None and not self.args.ignore_data_skip:
                draw_same_order(self._order, epoch, self._resumed_pass)
        elif self.args.dataloader_persistent_workers:
            draw_as_before(self._order, kwargs["train_dataloader"])
        if self._goes_on() and epoch == self._start.epoch:
            steps_in_epoch = self._data.batches(self._start.sample)
            num_update_steps_per_epoch = self._data.steps(self._start.sample)
        num_taken = kwargs["steps_trained_in_current_epoch"] if is_first else 0
        length = None if self._is_stream else steps_in_epoch
        keeps_workers = self.args.dataloader_persistent_workers
        self._pass = Pass(epoch, self._rows_per_batch(), num_taken, length, self._order, keeps_workers)
        counts = {"steps_in_epoch": steps_in_epoch, "num_update_steps_per_epoch": num_update_steps_per_epoch}
        with skipping_dealt_batches():
            super()._run_epoch(epoch=epoch, **counts, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device, **kwargs):
        """Takes batches as Trainer does. Where a rank has fewer than others, all ranks raise an error."""
        with nullcontext() if self._pass is None else self._pass.taking():
            batches = self._supply.next(epoch_iterator, num_batches, self._engine.comm, self.state.global_step)
            samples, num_items = super().get_batch_samples(batches, num_batches, device, **kwargs)
        if self._pass is not None:
            self._pass.num_batches += len(samples)
        return samples, num_items

    def _goes_on(self) -> bool:
        return self._start.step > 0 and self._data is not None and not self.args.ignore_data_skip

    def _position(self) -> Position | None:
        """Returns where the run is now, or `None` where that is not known."""
        return None if self._data is None else self._start.after(self.state.global_step, self._data)


check_overrides(BatchesMixin, Trainer, OVERRIDES)
