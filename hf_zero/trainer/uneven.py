"""Data loaders that yield different numbers of batches on different ranks.

accelerate's loaders give every rank the same number of batches. Others may not: `even_batches=False`, a dataset that
was split beforehand, a custom loader. A rank that stopped early would block the others, which wait for it in a forward
or a gather. So all ranks raise: before the first batch if the lengths differ, otherwise at the first one that differs.
"""

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils import find_batch_size, gather_object
from transformers.trainer_utils import has_length

from hf_zero.errors import DataError


def has_equal_lengths(dataloader: Any, subject: str) -> bool:
    """Returns whether all ranks are known to have the same number of batches. All ranks must call it. Raises
    [`DataError`] if the lengths differ."""
    lengths = gather_object([len(dataloader) if has_length(dataloader) else None])
    if None not in lengths and min(lengths) < max(lengths):
        _refuse(subject, lengths, "batches")
    return None not in lengths or all(gather_object([_splits_evenly(dataloader)]))


def in_step(dataloader: Any, subject: str) -> Any:
    """Returns a loader whose batches have the same number of rows on all ranks, as gathers in an evaluation require:
    `dataloader` itself if accelerate splits it evenly. All ranks must call it."""
    has_equal_lengths(dataloader, subject)
    return dataloader if all(gather_object([_splits_evenly(dataloader)])) else _InStep(dataloader, subject)


class Evenly:
    """The batches of an iterator, as long as all ranks have one.

    Raises [`DataError`] on all ranks if the sizes of a batch differ; a rank without a batch has size 0.
    """

    def __init__(self, batches: Iterator, subject: str, size: Callable[[Any], int] = lambda batch: 1):
        self.batches = batches
        self._subject, self._size = subject, size
        self._has_ended = False

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self._has_ended:  # Trainer asks again and again
            raise StopIteration
        batch = next(self.batches, None)
        sizes = gather_object([0 if batch is None else self._size(batch)])
        if min(sizes) < max(sizes):
            _refuse(self._subject, sizes, "rows in a batch" if all(sizes) else "batches")
        self._has_ended = not any(sizes)
        return next(self) if self._has_ended else batch


class _InStep:
    """A loader whose batches are compared between ranks."""

    def __init__(self, dataloader: Any, subject: str):
        self._dataloader, self._subject = dataloader, subject

    def __iter__(self) -> Iterator:
        return Evenly(iter(self._dataloader), self._subject, lambda batch: find_batch_size(batch) or 1)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)


def _splits_evenly(dataloader: Any) -> bool:
    sampler = getattr(dataloader, "batch_sampler", None)
    return (
        isinstance(dataloader, DataLoaderDispatcher)
        or isinstance(getattr(dataloader, "dataset", None), IterableDatasetShard)
        or (isinstance(sampler, BatchSamplerShard) and sampler.even_batches)
    )


def _refuse(subject: str, counts: list[int], what: str) -> None:
    least, most = min(counts), max(counts)
    raise DataError(
        f"{subject}: rank {counts.index(least)} has {least} {what}, but rank {counts.index(most)} has {most}; give "
        "all ranks equally many (even_batches or dataloader_drop_last, DistributedSampler with drop_last=True), or "
        "return a loader that accelerate splits: self.accelerator.prepare(DataLoader(...))"
    )
