"""Data loaders that yield different numbers of batches on different ranks.

accelerate's loaders give every rank the same number of batches. Others may not: `even_batches=False`, a dataset that
was split beforehand, a custom loader. `Trainer` gathers after every batch, and a sharded model in every forward, so a
rank that stopped early would block the others. In evaluation, a rank without data continues with another rank's
batches, whose results are dropped. In training this would change the result, so all ranks raise as soon as one has no
batch.
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
    """Yields the loader for an evaluation: `dataloader` itself, or one that yields batches on every rank until no rank
    has data."""
    args, averages = trainer.args, trainer.args.average_tokens_across_devices
    borrows, trainer.accelerator.borrows = trainer.accelerator.borrows, None  # restored after the evaluation
    if trainer.accelerator.num_sharing > 1:
        gather_by_setting(trainer)  # Seq2SeqTrainer gathers from all ranks, which would repeat shared rows
    if not is_even(supplies(dataloader, trainer.accelerator.is_one_group)):
        dataloader = EvenLoader(dataloader, num_sharing=trainer.accelerator.num_sharing)
        trainer.gather_function = partial(dataloader.gather, use_gather_object=args.eval_use_gather_object)
        trainer.accelerator.borrows = dataloader.borrows  # for trainers that gather rows themselves
        args.average_tokens_across_devices = False  # batches are weighted by their own rows
    try:
        yield dataloader
    finally:
        args.average_tokens_across_devices = averages
        trainer.accelerator.borrows = borrows
        gather_by_setting(trainer)


def gather_by_setting(trainer: Trainer) -> None:
    """Sets the gather function according to `eval_use_gather_object`, which Trainer applies only once."""
    own = trainer.accelerator.gather_for_metrics
    trainer.gather_function = partial(own, use_gather_object=trainer.args.eval_use_gather_object)


def is_even(found: list[tuple[bool, int | None]]) -> bool:
    """Returns whether all ranks are known to get the same number of rows in every batch, from their `supplies`."""
    return len(found) == 1 or all(other == (True, found[0][1]) for other in found)


def supplies(dataloader, is_one_group: bool) -> list[tuple[bool, int | None]]:
    """Returns for each rank whether its type of loader is known to be even, and its number of batches, if known. All
    ranks must call it, and get the same result."""
    sampler = getattr(dataloader, "batch_sampler", None)
    is_known = (
        isinstance(dataloader, DataLoaderDispatcher)
        or isinstance(getattr(dataloader, "dataset", None), IterableDatasetShard)
        or (isinstance(sampler, BatchSamplerShard) and sampler.even_batches)
        or (isinstance(dataloader, DataLoaderShard) and is_one_group)
    )
    try:
        length = len(dataloader)
    except TypeError:  # a dataset without length
        length = None
    return gather_object([(is_known, length)])


class Supply:
    """The batches of a training run. If ranks may have different numbers of batches, they compare before each step, so
    that no rank waits for one without a batch.

    Raises:
        `DataError`: On all ranks, if some ranks have no data.
    """

    def __init__(self, dataloader, is_one_group: bool):
        found = supplies(dataloader, is_one_group)
        self.is_even = is_even(found)
        self._ended: Iterator | None = None  # iterator that is exhausted on all ranks
        lengths = [length for _, length in found]
        if not self.is_even and 0 in lengths and any(lengths):
            _refuse("before the first step", [1 if length is None else length for length in lengths])

    def longest(self, counts: Sequence[int]) -> Sequence[int]:
        """Returns the elementwise maximum of `counts` over ranks, so that all ranks have the same schedule."""
        if self.is_even:
            return counts
        return tuple(map(max, zip(*gather_object([tuple(counts)]), strict=True)))

    def next(self, batches: Iterator, count: int, comm: Comm, step: int) -> Iterator:
        """Returns the batches of one step. Raises [`DataError`] on all ranks if a rank has fewer than others."""
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
        f"training data, {when}: rank {counts.index(least)} has {batches} left, "
        f"but rank {counts.index(most)} has {most}; give every rank the same number of batches (even_batches or "
        "dataloader_drop_last, DistributedSampler with drop_last=True), or return a loader that accelerate splits: "
        "self.accelerator.prepare(DataLoader(...))"
    )


class EvenLoader:
    """A loader that yields batches on every rank until no rank has one. Groups of `num_sharing` neighboring ranks
    share their batches, whose rows count once."""

    def __init__(self, dataloader, num_sharing: int = 1):
        self.dataset = getattr(dataloader, "dataset", None)
        self.end_of_dataloader = False  # accelerate's flag for the last batch
        self.remainder = -1  # accelerate's number of rows that count in it: unused, since `gather` selects the rows
        self._dataloader = dataloader
        self._num_sharing = num_sharing
        self._rank = PartialState().process_index
        self._counts: list[int] = []  # rows that count in the current batch, by rank

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator:
        state = GradientState()
        batches = iter(self._dataloader)
        upcoming, counts = self._next(batches)
        state._add_dataloader(self)  # after the rank's own loader, which may end early
        try:
            while any(counts):
                batch, self._counts = upcoming, counts
                upcoming, counts = self._next(batches)
                self.end_of_dataloader = not any(counts)
                yield batch
        finally:
            state._remove_dataloader(self)

    def _next(self, batches: Iterator) -> tuple:
        """Returns this rank's next batch, or another rank's if it has none, and the number of valid rows by rank."""
        batch = next(batches, None)
        counts = gather_object([0 if batch is None else find_batch_size(batch) or 1])
        if any(counts) and not all(counts):
            sends = self._rank == counts.index(max(counts))
            sent = gather_object([send_to_device(batch, "cpu") if sends else None])
            batch = next(other for other in sent if other is not None) if batch is None else batch
        return batch, counts

    def gather(self, tensors, use_gather_object: bool = False):
        """Gathers the valid rows of all ranks in rank order. A replacement for `Accelerator.gather_for_metrics`, which
        also returns a list for objects."""
        if use_gather_object:
            own = self._own(tensors) if isinstance(tensors, Tensor) else tensors if self._counts[self._rank] else []
            return gather_object(own)
        return recursively_apply(self._gather, tensors)

    def borrows(self) -> bool:
        """Returns whether this rank's current batch is another rank's."""
        return not self._counts[self._rank]

    def _own(self, tensor: Tensor) -> Tensor:
        """Returns the rows of this rank. Trainer repeats the loss by its own batch size, which may be smaller than the
        loader's."""
        return tensor[torch.arange(self._counts[self._rank], device=tensor.device) % len(tensor)]

    def _gather(self, tensor: Tensor) -> Tensor:
        own, most = self._counts[self._rank], max(self._counts)
        rows = tensor
        if not len(tensor) == own == most:
            rows = tensor.new_zeros(most, *tensor.shape[1:])
            rows[:own] = self._own(tensor)
        parts = list(zip(gather(rows).split(most), self._counts, strict=True))
        return torch.cat([part[:count] for part, count in parts[:: self._num_sharing]])
