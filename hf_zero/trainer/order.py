"""The order of an epoch's samples and the place in it, by what the loader has drawn and given: a run that goes on
draws the same, and finds its place in a stream, of which Trainer knows the first pass alone."""

import base64
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler
from transformers import trainer as trainer_module


logger = logging.getLogger(__name__)


def _tell_epochs(dataloader) -> None:
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
        is_dealt = is_dealt and dataloader.submesh_tp is None  # else it gives all ranks the one that it reads
        if is_dealt and not isinstance(dataloader.dataset, IterableDataset):  # of a stream it counts right
            num_batches *= dataloader.state.num_processes
        return skip_first_batches(dataloader, num_batches)

    with mock.patch.object(trainer_module, "skip_first_batches", skip):
        yield


class Around(Sampler):
    """A sampler around another one, whose attributes it shows: samplers of batches may read them."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet, where workers unpickle it
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)


def own_sampler(sampler: Any) -> Any:
    """Returns a loader's own sampler, without what this or an earlier training put around it."""
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    return sampler


class Remaining(Around):
    """The order of another sampler, but without a few samples of one epoch that have been trained on already.

    Batches can be skipped whole. What a run with other batches had taken from the next one is left out here: `count`
    samples, the first of them at position `first`.
    """

    def __init__(self, sampler: Sampler, *, epoch: int, first: int, count: int):
        super().__init__(sampler)
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


class Drawn(Around):
    """A sampler that notes from which state of its generator it draws an order, or is told it for the next one.

    That is when it is iterated. When a loader is, it draws a number for its workers before, but where these stay from
    one epoch to the next (`dataloader_persistent_workers`).
    """

    def __init__(self, sampler: Sampler, generator: torch.Generator):
        super().__init__(sampler)
        self.generator = generator
        self.state: Tensor | None = None  # uint8, of the last order; None before the first
        self.next_state: Tensor | None = None  # None: whatever the generator has then

    def __iter__(self) -> Iterator:
        if self.next_state is not None:
            self.generator.set_state(self.next_state)
        self.state, self.next_state = self.generator.get_state(), None
        return iter(self.sampler)


def note_order(dataloader) -> Drawn | None:
    """Prepares a loader to be resumed: its sampler hears of epochs. Puts a [`Drawn`] into one whose order a generator
    draws, and returns it. `None` where a seed and the number of the epoch say the order, or nothing does."""
    _tell_epochs(dataloader)
    if not isinstance(dataloader, DataLoaderShard):
        return None
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)  # of all ranks
    present = getattr(batches, "sampler", None)
    sampler = own_sampler(present)
    if sampler is not present:
        dataloader.set_sampler(sampler)
    if sampler is None or not hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        return None
    drawn = Drawn(sampler, sampler.generator or torch.default_generator)
    dataloader.set_sampler(drawn)
    return drawn


@dataclass
class Pass:
    """A pass over the data that is under way, as its loader gives it."""

    epoch: int
    rows: int  # of a batch of all ranks
    num_batches: int  # that were taken so far
    length: int | None  # None for a stream, which nobody knows the end of
    order: Drawn | None  # None where no generator draws the order
    keeps_workers: bool  # from one pass to the next
    drawn: Tensor | None = None  # the generator's state from which the order is drawn, once batches were taken
    is_drawn: bool = True  # in that state the sampler is iterated; otherwise, the loader begins

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Notes from what the order is drawn while the first batches are taken: whoever goes over the loader later
        draws another. A batch sampler may draw by its sampler's generator, and never iterate the sampler."""
        order = self.order
        if order is None or self.drawn is not None:
            yield
            return
        begun, order.state = order.generator.get_state(), None
        yield
        self.drawn, self.is_drawn = (begun, False) if order.state is None else (order.state, True)

    def facts(self) -> dict[str, Any]:
        """Returns what a run needs to go on here: epoch, batches to skip and the rows of each, and from what the order
        of the epoch is drawn, as base64. Behind its last batch it is the next epoch, whose loader draws numbers for
        its workers first, unless these stay."""
        is_over = self.num_batches == self.length
        state = None
        if self.order is not None:
            state = self.order.generator.get_state() if is_over else self.drawn
        text = None if state is None else base64.b64encode(state.numpy().tobytes()).decode()
        is_drawn = self.is_drawn and (not is_over or self.keeps_workers)
        batch = 0 if is_over else self.num_batches
        place = {"epoch": self.epoch + is_over, "batch": batch, "rows": self.rows}
        return {**place, "order": text, "is_drawn": is_drawn}


def batches_had(
    facts: dict, rows: int, accumulation: int, accumulation_before: int | None, *, tells: bool = True
) -> int:
    """Returns how many batches of so many rows a pass over a stream has had, by `Pass.facts`. Other batches than those
    of before are counted in whole steps; if it `tells`, it warns of rows that these do not have, and come again."""
    rows_before = facts.get("rows", rows)
    if (rows_before, accumulation_before) == (rows, accumulation):
        return facts["batch"]
    had, per_step = facts["batch"] * rows_before, rows * accumulation
    steps, again = divmod(had, per_step)
    if again and facts["batch"] % (accumulation_before or 1):  # of the last step alone: the pass was over
        return (steps + 1) * accumulation
    if again and tells:
        logger.warning(
            "the stream goes on at a whole step of %d rows, so %d rows come again; to avoid that, resume with the "
            "batches, accumulation and ranks of before",
            per_step,
            again,
        )
    return steps * accumulation


def draw_same_order(order: Drawn | None, epoch: int, facts: dict) -> None:
    """Gives the epoch in which a run goes on the order that it had, by `Pass.facts` of the checkpoint. Trainer sets
    the generators to what they were at the checkpoint once the batches before it are skipped."""
    if order is None or facts["order"] is None or facts["epoch"] != epoch:
        return
    state = torch.frombuffer(bytearray(base64.b64decode(facts["order"])), dtype=torch.uint8)
    if facts.get("is_drawn", False):  # else, and in older checkpoints: of the moment before the loader begins
        order.next_state = state
    else:
        order.generator.set_state(state)


def draw_as_before(order: Drawn | None, dataloader) -> None:
    """Lets a loader whose workers stay draw the order of a further epoch as if they were there. Where a run goes on
    within an epoch, another loader skips batches, and this one starts its workers in the next."""
    own = getattr(dataloader, "base_dataloader", None)
    if order is not None and own is not None and own._iterator is None:
        order.next_state = order.generator.get_state()
