"""The order of an epoch's samples and the place in it, by what the loader has drawn and given: a run that goes on
draws the same, and finds its place in a stream, of which Trainer knows the first pass alone."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import trainer as trainer_module


def tell_epochs(dataloader) -> None:
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
        if is_dealt and not isinstance(dataloader.dataset, IterableDataset):  # of a stream it counts right
            num_batches *= dataloader.state.num_processes
        return skip_first_batches(dataloader, num_batches)

    with mock.patch.object(trainer_module, "skip_first_batches", skip):
        yield


def order_generator(dataloader) -> torch.Generator | None:
    """Returns the generator that draws the order of each epoch's samples, or `None` where a seed and the number of the
    epoch say it, or nothing does."""
    if not isinstance(dataloader, DataLoaderShard):
        return None
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)  # of all ranks
    sampler = getattr(batches, "sampler", None)
    sampler = getattr(sampler, "sampler", sampler)  # of `Remaining`
    if sampler is None or not hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        return None
    return sampler.generator or torch.default_generator


@dataclass
class Pass:
    """A pass over the data that is under way, as its loader gives it."""

    epoch: int
    num_batches: int  # that were taken so far
    length: int | None  # None for a stream, which nobody knows the end of
    generator: torch.Generator | None  # of the order, see `order_generator`
    drawn_from: Tensor | None  # uint8, the state of that generator when the pass began

    @classmethod
    def begin(cls, dataloader, epoch: int, num_batches: int, length: int | None) -> "Pass":
        """Begins a pass, or goes on in one."""
        generator = order_generator(dataloader)
        state = None if generator is None else generator.get_state()
        return cls(epoch, num_batches, length, generator, state)

    def facts(self) -> dict[str, int | str | None]:
        """Returns what a run needs to go on here: epoch, batches to skip, and from what the order of the epoch is
        drawn, as base64. Behind its last batch it is the next epoch."""
        is_over = self.num_batches == self.length
        state = self.generator.get_state() if is_over and self.generator is not None else self.drawn_from
        text = None if state is None else base64.b64encode(state.numpy().tobytes()).decode()
        return {"epoch": self.epoch + is_over, "batch": 0 if is_over else self.num_batches, "order": text}


def draw_same_order(dataloader, epoch: int, facts: dict) -> None:
    """Gives the epoch in which a run goes on the order that it had, by `Pass.facts` of the checkpoint. Trainer sets
    the generators to what they were at the checkpoint once the batches before it are skipped."""
    generator = order_generator(dataloader)
    if generator is not None and facts["order"] is not None and facts["epoch"] == epoch:
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(facts["order"])), dtype=torch.uint8))
