"""Batches for ranks that have unequal numbers of them.

The loaders that accelerate makes give every rank equally many batches. Others need not: `even_batches=False`, a data
set that was divided beforehand, a loader of the user's own. `Trainer` gathers after every batch, and a sharded model
in every forward, so a rank that stopped early would leave the others waiting. In evaluation, ranks that are done go on
with borrowed batches that do not count. In training, where that would change what is learned, all ranks raise at the
first batch that is missing on one of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.state import GradientState, PartialState
from accelerate.utils import find_batch_size, gather, gather_object, recursively_apply, send_to_device
from torch import Tensor
from transformers import Trainer

from hf_zero.comm import Comm
from hf_zero.errors import DataError


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
