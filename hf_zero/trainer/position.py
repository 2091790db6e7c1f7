"""Where a run is in its data, counted in samples, so that it goes on there with any number of ranks and any batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Sampler


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

    def after(self, step: int, num_samples: int, per_step: int) -> "Position":
        """Where the run is at a later step.

        Args:
            step (`int`): optimizer steps since the run began.
            num_samples (`int`): samples in an epoch.
            per_step (`int`): samples in an optimizer step, over all ranks; an epoch's last may have fewer.
        """
        left = step - self.step
        rest = math.ceil((num_samples - self.sample) / per_step)
        if left < rest:
            return Position(self.epoch, self.sample + left * per_step, step)
        epochs, steps = divmod(left - rest, math.ceil(num_samples / per_step))
        return Position(self.epoch + 1 + epochs, steps * per_step, step)

    def steps_until(self, num_epochs: float, num_samples: int, per_step: int) -> int:
        """How many optimizer steps are left until so many epochs are done."""
        rest = math.ceil((num_samples - self.sample) / per_step)
        return max(0, rest + math.ceil((num_epochs - self.epoch - 1) * math.ceil(num_samples / per_step)))

    def epochs_until(self, num_steps: int, num_samples: int, per_step: int) -> int:
        """In how many epochs, from the first on, the next `num_steps` optimizer steps end."""
        rest = math.ceil((num_samples - self.sample) / per_step)
        return self.epoch + 1 + max(0, math.ceil((num_steps - rest) / math.ceil(num_samples / per_step)))


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


def samples_of(dataloader) -> int | None:
    """How many samples an epoch of a prepared data loader has, over all ranks; `None` where that is not known, or
    where ranks do not take turns batch by batch."""
    if not isinstance(dataloader, DataLoaderShard):
        return None
    sampler = dataloader.get_sampler()
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)  # of all ranks
    try:
        num_samples = len(sampler)
    except TypeError:
        return None
    if getattr(dataloader.batch_sampler, "split_batches", False) or not hasattr(batches, "batch_size"):
        return None
    whole = len(dataloader) * batches.batch_size * getattr(dataloader.batch_sampler, "num_processes", 1)
    return min(num_samples, whole)  # fewer where the last batch is dropped


def leave_out(dataloader: DataLoaderShard, position: Position, per_step: int) -> None:
    """Makes a data loader go on at `position`, once the whole steps before it are skipped.

    Args:
        dataloader (`DataLoaderShard`): as accelerate prepares it.
        position (`Position`): where to go on.
        per_step (`int`): samples in an optimizer step.
    """
    count = position.sample % per_step
    if count:
        first = position.sample - count
        dataloader.set_sampler(Remaining(dataloader.get_sampler(), epoch=position.epoch, first=first, count=count))
