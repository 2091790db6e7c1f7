"""Where a run is in its data, counted in samples, so that it goes on there with any number of ranks and any batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler


@dataclass(frozen=True)
class Epochs:
    """How a run takes its samples.

    Args:
        num_samples (`int`): in an epoch, over all ranks.
        per_batch (`int`): in a batch of all ranks.
        accumulation (`int`): batches in an optimizer step; an epoch's last step may have fewer.
        drop_last (`bool`): leaves out an epoch's last samples where they do not fill a batch of all ranks.
    """

    num_samples: int
    per_batch: int
    accumulation: int = 1
    drop_last: bool = False

    @property
    def per_step(self) -> int:
        return self.per_batch * self.accumulation

    def batches(self, first: int = 0) -> int:
        """Batches of an epoch that goes on at sample `first`. Whole steps before it are skipped, and count; the
        samples of the next step that were taken already are left out."""
        num_samples = self.num_samples - first % self.per_step
        return num_samples // self.per_batch if self.drop_last else math.ceil(num_samples / self.per_batch)

    def steps(self, first: int = 0) -> int:
        """Optimizer steps of an epoch that goes on at sample `first`, those before it included."""
        return math.ceil(self.batches(first) / self.accumulation)


@dataclass(frozen=True)
class Position:
    """A place in the order of samples that all ranks share; batches, ranks and accumulation only cut it up.

    Args:
        epoch (`int`): whole passes over the data before it.
        sample (`int`): samples of this epoch that have been trained on.
        step (`int`): optimizer steps that the run had taken when it was there.
    """

    epoch: int
    sample: int
    step: int

    def left(self, data: Epochs) -> int:
        """Optimizer steps from here to the end of the epoch."""
        return data.steps(self.sample) - self.sample // data.per_step

    def within(self, data: Epochs) -> "Position":
        """The same place, or the beginning of the next epoch where batches of this size have nothing left of this."""
        return self if self.left(data) > 0 else Position(self.epoch + 1, 0, self.step)

    def after(self, step: int, data: Epochs) -> "Position":
        """Where the run is at a later step, counted from the run's beginning."""
        start = self.within(data)
        taken, left = step - start.step, start.left(data)
        if taken < left:
            return Position(start.epoch, start.sample + taken * data.per_step, step)
        epochs, steps = divmod(taken - left, data.steps())
        return Position(start.epoch + 1 + epochs, steps * data.per_step, step)

    def steps_until(self, num_epochs: float, data: Epochs) -> int:
        """How many optimizer steps are left until so many epochs are done."""
        start = self.within(data)
        return max(0, start.left(data) + math.ceil((num_epochs - start.epoch - 1) * data.steps()))

    def epochs_until(self, num_steps: int, data: Epochs) -> int:
        """In how many epochs, from the first on, the next `num_steps` optimizer steps end."""
        start = self.within(data)
        return start.epoch + 1 + max(0, math.ceil((num_steps - start.left(data)) / data.steps()))


class Remaining(Sampler):
    """Another sampler's order, but in one epoch without a few samples that have been trained on already.

    Batches can be skipped whole. What a run with other batches had taken from the next one is left out here.

    Args:
        sampler (`Sampler`): the order.
        epoch (`int`): in which they are left out.
        first (`int`): position of the first of them.
        count (`int`): how many.
    """

    def __init__(self, sampler: Sampler, *, epoch: int, first: int, count: int):
        self.sampler = sampler
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

    def __len__(self) -> int:
        return len(self.sampler)


def epochs_of(dataloader, accumulation: int) -> Epochs | None:
    """How a prepared data loader takes its samples; `None` where that is not known, where ranks do not take turns
    batch by batch, or where the order may depend on the size of the batches."""
    if not isinstance(dataloader, DataLoaderShard):
        return None
    sampler, shard = dataloader.get_sampler(), dataloader.batch_sampler
    batches = getattr(shard, "batch_sampler", shard)  # of all ranks
    if not isinstance(sampler, (RandomSampler, SequentialSampler)) or not isinstance(batches, BatchSampler):
        return None
    if getattr(shard, "split_batches", False):
        return None
    per_batch = batches.batch_size * getattr(shard, "num_processes", 1)
    epochs = Epochs(len(sampler), per_batch, accumulation, batches.drop_last)
    return epochs if epochs.batches() == len(dataloader) > 0 else None


def leave_out(dataloader: DataLoaderShard, position: Position, data: Epochs) -> None:
    """Makes a data loader go on at `position`, once the whole steps before it are skipped.

    Args:
        dataloader (`DataLoaderShard`): as accelerate prepares it.
        position (`Position`): where to go on.
        data (`Epochs`): how it takes its samples.
    """
    count = position.sample % data.per_step
    if count:
        first = position.sample - count
        dataloader.set_sampler(Remaining(dataloader.get_sampler(), epoch=position.epoch, first=first, count=count))
