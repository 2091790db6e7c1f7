"""The order of an epoch's samples and the place in it, by what the loader has drawn and given: a run that goes on
draws the same, and finds its place in a stream, of which Trainer knows the first pass alone."""

import base64
from dataclasses import dataclass

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch import Tensor


def tell_epochs(dataloader) -> None:
    """Lets a sampler, of rows or of batches, hear of the epoch in which a run goes on: where batches are skipped it is
    looked for at the batches of this rank, and not at those of all ranks."""
    shard = getattr(dataloader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard):
        return
    if hasattr(shard.batch_sampler, "set_epoch"):  # transformers' `BatchRebalanceSampler`
        shard.set_epoch = shard.batch_sampler.set_epoch
    if hasattr(getattr(shard.batch_sampler, "sampler", None), "set_epoch"):
        shard.sampler = shard.batch_sampler.sampler


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
