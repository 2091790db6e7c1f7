"""Evaluation where ranks have unlike amounts to do: those that are done go on with borrowed batches that do not count.

The loaders that accelerate makes give every rank equally many batches. Others need not: `even_batches=False`, a data
set that was divided beforehand, a loader of the user's own. `Trainer` gathers after every batch, and a sharded model
in every forward, so a rank that stopped would leave the others waiting.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import find_batch_size, gather, gather_object, recursively_apply, send_to_device
from torch import Tensor


@contextmanager
def evened(trainer, dataloader) -> Iterator:
    """The loader for an evaluation of `trainer`: its own, or one that goes on on every rank as long as any has data.

    Args:
        trainer (`Trainer`): which is set up to count what counts, for as long as the context lasts.
        dataloader: this rank's.
    """
    if is_even(dataloader):
        yield dataloader
        return
    averages, gathers = trainer.args.average_tokens_across_devices, trainer.gather_function
    dataloader = EvenLoader(dataloader)
    trainer.gather_function = dataloader.gather
    trainer.args.average_tokens_across_devices = False  # over what each rank has: a batch weighs as its rows do
    try:
        yield dataloader
    finally:
        trainer.args.average_tokens_across_devices = averages
        trainer.gather_function = gathers


def is_even(dataloader) -> bool:
    """Whether all ranks are known to get equally many rows with every batch. All ranks call it and agree."""
    sampler = getattr(dataloader, "batch_sampler", None)
    is_known = (
        isinstance(dataloader, DataLoaderDispatcher)
        or isinstance(getattr(dataloader, "dataset", None), IterableDatasetShard)
        or (isinstance(sampler, BatchSamplerShard) and sampler.even_batches)
    )
    try:
        length = len(dataloader)
    except TypeError:  # a data set without length
        length = None
    found = gather_object([(is_known, length)])
    return len(found) == 1 or all(other == (True, length) for other in found)


class EvenLoader:
    """Gives every rank batches as long as any rank has one.

    Args:
        dataloader: this rank's.
    """

    def __init__(self, dataloader):
        self.dataset = getattr(dataloader, "dataset", None)
        self.end_of_dataloader = False  # accelerate's word for the last batch
        self.remainder = -1  # and for how much of it counts, which `gather` knows here
        self._dataloader = dataloader
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
        """This rank's next batch, or another rank's, and how many rows of each rank's count."""
        batch = next(batches, None)
        counts = gather_object([0 if batch is None else find_batch_size(batch) or 1])
        if any(counts) and not all(counts):
            lends = self._rank == counts.index(max(counts))
            lent = gather_object([send_to_device(batch, "cpu") if lends else None])
            batch = next(other for other in lent if other is not None) if batch is None else batch
        return batch, counts

    def gather(self, tensors):
        """The rows of all ranks that count, in rank order: instead of `Accelerator.gather_for_metrics`."""
        return recursively_apply(self._gather, tensors)

    def _gather(self, tensor: Tensor) -> Tensor:
        own, most = self._counts[self._rank], max(self._counts)
        if len(tensor) == min(self._counts) == most:
            return gather(tensor)
        rows = tensor.new_zeros(most, *tensor.shape[1:])
        # Trainer repeats the loss as often as its own batch size says, which a loader may exceed
        rows[:own] = tensor[torch.arange(own, device=tensor.device) % len(tensor)]
        parts = gather(rows).split(most)
        return torch.cat([part[:count] for part, count in zip(parts, self._counts, strict=True)])
