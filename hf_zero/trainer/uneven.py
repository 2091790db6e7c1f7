"""Where ranks have unlike amounts of data. In evaluation those that are done go on with borrowed batches that do not
count; in training, where that would change what is learnt, all ranks stop at the first batch that lacks.

The loaders that accelerate makes give every rank equally many batches. Others need not: `even_batches=False`, a data
set that was divided beforehand, a loader of the user's own. `Trainer` gathers after every batch, and a sharded model
in every forward, so a rank that stopped would leave the others waiting.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import find_batch_size, gather, gather_object, recursively_apply, send_to_device
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.errors import DataError


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
    found = _supplies(dataloader)
    return len(found) == 1 or all(other == (True, found[0][1]) for other in found)


def _supplies(dataloader) -> list[tuple[bool, int | None]]:
    """Of each rank: whether its loader is of a kind that is even, and how many batches it has, where that is known."""
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
    return gather_object([(is_known, length)])


class Supply:
    """The batches of a training. Where ranks are not known to get equally many they compare before each step, so that
    none waits for one that has none left.

    Args:
        dataloader: this rank's. All ranks make theirs at once.

    Raises:
        `DataError`: some ranks have no data at all; on all ranks.
    """

    def __init__(self, dataloader):
        self._is_even = is_even(dataloader)
        self._ended: Iterator | None = None  # of which all ranks have had the last batch
        if not self._is_even:
            lengths = [length for _, length in _supplies(dataloader)]
            if 0 in lengths and any(lengths):
                _refuse("before the first step", [1 if length is None else length for length in lengths])

    def longest(self, counts: Sequence[int]) -> Sequence[int]:
        """What a rank has counted with its own loader, epochs and steps: the largest of any rank. So none ends before
        it is seen to lack a batch, and all have one schedule."""
        if self._is_even:
            return counts
        return tuple(map(max, zip(*gather_object([tuple(counts)]), strict=True)))

    def next(self, batches: Iterator, count: int, comm: Comm, step: int) -> Iterator:
        """The batches of one step, which all ranks have.

        Args:
            batches (`Iterator`): of the epoch.
            count (`int`): how many there are to be.
            comm (`Comm`): the ranks.
            step (`int`): how many steps are done, for the message.

        Raises:
            `DataError`: some ranks have fewer than others, and are named; on all ranks.
        """
        if self._is_even or batches is self._ended:
            return batches
        taken = list(islice(batches, count))
        if comm.device.type != "cpu":
            comm = comm.side_group("batches")
        counts = comm.all_gather_vector(torch.tensor([len(taken)], dtype=torch.int32, device=comm.device))
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
        f"where rank {counts.index(most)} has {most}; give every rank equally many batches (DistributedSampler with "
        "drop_last=True), or return a loader that accelerate divides: self.accelerator.prepare(DataLoader(...))"
    )


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
