"""The position of a run in its data, so that a resumed run continues there.

Checkpoints record the epoch, the batches that were taken of it, and the state of the generator that draws the order of
its samples, if one does. With another number of rows per step, a run continues at the last complete step of the new
size, and the remaining steps are counted anew.
"""

import base64
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch.utils.data import IterableDataset, Sampler
from transformers import trainer as trainer_module
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import has_length

from hf_zero.checkpoint.manifest import SavedRun
from hf_zero.compat import replaced
from hf_zero.trainer.uneven import Evenly, has_equal_lengths


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)


class Place:
    """Tracks a trainer's position in its data, and where a resumed run continues.

    The trainer calls the methods in this order: `resume`, `counted`, `first_batch`; `begin_epoch` for each epoch;
    `next` and `took` for each step.
    """

    def __init__(self, trainer: "ZeroTrainerMixin"):
        self._trainer = trainer
        self._resumed: dict[str, Any] | None = None  # the record of the resumed run, if known
        # of the current training
        self._generator: torch.Generator | None = None  # draws the orders; None if they depend on seed and epoch only
        self._is_even = True  # whether all ranks are known to have the same number of batches
        self._batches: Evenly | None = None  # of the current epoch, if they may not
        self._num_batches: int | None = None  # per epoch; None for a stream
        self._epoch = 0
        self._taken = 0  # batches of this epoch
        self._order: torch.Tensor | None = None  # generator state before this epoch's first batch; None before it

    def resume(self, run: SavedRun | None) -> None:
        """Continues at the position that a checkpoint records. With `None`, or without a record, Trainer's position
        applies."""
        record = None if run is None else run.extra.get("place")
        if run is not None and record is None:
            logger.warning("the checkpoint has no position in the data; the data continue where Trainer counts")
        self._resumed = None if self._trainer.args.ignore_data_skip else record

    def counted(self, values: tuple, args, dataloader) -> tuple:
        """Corrects Trainer's numbers of epochs and steps for a run that resumes with another batch size. All ranks
        must call it. Raises [`DataError`] if the ranks have different numbers of batches."""
        epochs, per_epoch, examples, samples, per_step, in_epoch, steps = values
        self._is_even = has_equal_lengths(dataloader, "training data")
        self._generator = _generator_of(dataloader)
        self._num_batches = in_epoch if has_length(dataloader) else None
        if self._resumed is not None and self._num_batches is not None:
            step, epoch = self._resumed["step"], self._resumed["epoch"]
            done = self._first_batch() // args.gradient_accumulation_steps
            if args.max_steps > 0:
                epochs = epoch + math.ceil((steps - step + done) / per_epoch)
            else:
                steps = step + max(0, math.ceil(args.num_train_epochs * per_epoch) - epoch * per_epoch - done)
        return epochs, per_epoch, examples, samples, per_step, in_epoch, steps

    def first_batch(self, epoch: int, batches: int) -> tuple[int, int]:
        """Returns the epoch in which the run continues, and the number of its batches to skip. Trainer's own numbers,
        the arguments, are right without a record."""
        if self._resumed is None:
            return epoch, batches
        args = self._trainer.args
        if self._resumed["epoch"] and self._generator is not None and args.dataloader_persistent_workers:
            # new workers draw a seed before the order is drawn, while those that persist have drawn it before
            logger.warning(
                "dataloader_persistent_workers: this epoch has another order than in the uninterrupted run, so some "
                "rows are trained on again, and others are not"
            )
        return self._resumed["epoch"], self._first_batch(warns=self._trainer.args.process_index == 0)

    def begin_epoch(self, epoch: int, *, skips: int) -> None:
        """Starts an epoch. The one in which the run continues draws its order from the recorded state. Trainer
        restores the generators after it has skipped batches."""
        self._epoch, self._taken, self._order = epoch, skips, None
        order = None if self._resumed is None or self._resumed["epoch"] != epoch else self._resumed["order"]
        if order is not None and self._generator is not None:
            self._generator.set_state(torch.frombuffer(bytearray(base64.b64decode(order)), dtype=torch.uint8))

    def next(self, batches: Iterator) -> Iterator:
        """Returns the batches of one step. Raises [`DataError`] on all ranks if a rank has fewer than others."""
        if self._order is None and self._generator is not None:
            self._order = self._generator.get_state()  # the first batches draw the order of the epoch
        if self._is_even:
            return batches
        if self._batches is None or self._batches.batches is not batches:
            self._batches = Evenly(batches, "training data")
        return self._batches

    def took(self, count: int) -> None:
        self._taken += count

    def facts(self) -> dict[str, Any]:
        """Returns the record for a checkpoint, which after the last batch of an epoch is the start of the next."""
        if self._resumed is not None and self._resumed["step"] == self._trainer.state.global_step:
            return self._resumed  # nothing has been trained since
        is_over = self._taken == self._num_batches
        state = self._order
        if is_over and self._generator is not None:
            state = self._generator.get_state()
        return {
            "step": self._trainer.state.global_step,
            "epoch": self._epoch + is_over,
            "batch": 0 if is_over else self._taken,
            "rows": self._rows_per_batch(),
            "accumulation": self._trainer.args.gradient_accumulation_steps,
            "order": None if state is None else base64.b64encode(state.numpy().tobytes()).decode(),
        }

    def _first_batch(self, *, warns: bool = False) -> int:
        assert self._resumed is not None
        accumulation = self._trainer.args.gradient_accumulation_steps
        return batches_had(self._resumed, self._rows_per_batch(), accumulation, warns=warns)

    def _rows_per_batch(self) -> int:
        """Returns the rows of a global batch. Rows that ranks share count once."""
        trainer = self._trainer
        if trainer.accelerator.split_batches:
            return trainer._train_batch_size
        return trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps


def batches_had(record: dict[str, Any], rows: int, accumulation: int, *, warns: bool = True) -> int:
    """Converts a recorded position to a number of batches of `rows` rows. If the batch size or the accumulation has
    changed, the position is rounded down to complete steps. If `warns`, logs a warning about rows that are therefore
    trained on again."""
    if (record["rows"], record["accumulation"]) == (rows, accumulation):
        return record["batch"]
    steps, again = divmod(record["batch"] * record["rows"], rows * accumulation)
    if again and record["batch"] % record["accumulation"]:  # an incomplete last step: the stream was over
        return (steps + 1) * accumulation
    if again and warns:
        logger.warning(
            "the run resumes at a complete step of %d rows, so %d rows are trained on again; to avoid that, resume "
            "with the previous batch size, accumulation and number of ranks",
            rows * accumulation,
            again,
        )
    return steps * accumulation


def _generator_of(dataloader: Any) -> torch.Generator | None:
    """Returns the generator from which a loader's sampler draws an order, or `None` if the sampler has none or depends
    only on a seed and the epoch. Also makes accelerate's loaders that skip batches forward `set_epoch` to the sampler,
    which they do not find inside the part of this rank."""
    shard: Any = getattr(dataloader, "batch_sampler", None)
    if isinstance(dataloader, DataLoaderDispatcher) and hasattr(getattr(shard, "sampler", None), "set_epoch"):
        shard.set_epoch = shard.sampler.set_epoch
    batches = getattr(shard, "batch_sampler", shard)  # of all ranks
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(shard, BatchSamplerShard):
        if hasattr(batches, "set_epoch"):  # transformers' `BatchRebalanceSampler`
            shard.set_epoch = batches.set_epoch
        if hasattr(sampler, "set_epoch"):
            shard.sampler = sampler
    if sampler is None or not hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        return None
    return sampler.generator or torch.default_generator


@contextmanager
def skipping_dealt_batches() -> Iterator[None]:
    """Makes Trainer skip the right number of batches with `dispatch_batches`, where rank 0 reads the batches of all
    ranks: Trainer counts batches per rank, but accelerate counts batches read."""

    def skip(dataloader, num_batches: int = 0):
        is_dealt = isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches
        is_dealt = is_dealt and dataloader.submesh_tp is None  # with tensor parallelism, all ranks get the same batch
        if is_dealt and not isinstance(dataloader.dataset, IterableDataset):  # accelerate counts streams per rank
            num_batches *= dataloader.state.num_processes
        return skip_first_batches(dataloader, num_batches)

    with replaced(trainer_module, skip_first_batches=skip):
        yield


class WholeStream(IterableDataset):
    """A wrapper of a `datasets` stream that makes accelerate split it over ranks by batches.

    accelerate would otherwise split a stream by files, if it has enough of them: the rank with the fewest rows would
    end first, and the rows of a step would depend on the number of ranks.
    """

    def __init__(self, rows: Any):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch: a shuffled stream has another order in each."""
        self._rows.set_epoch(epoch)


def dealt_to_groups(sampler: Sampler | None, num_sharing: int) -> Sampler | None:
    """Adapts a sampler to groups of `num_sharing` ranks that share batches: a sampler that distributes rows over ranks
    distributes them over groups."""
    if num_sharing == 1 or not isinstance(sampler, BatchRebalanceSampler):
        return sampler
    return BatchRebalanceSampler(
        sampler.lengths,
        sampler.effective_batch_size // num_sharing,
        sampler.dp_size // num_sharing,
        sampler.grad_accum,
        seed=sampler.seed,
        rank=sampler.rank // num_sharing,
        drop_last=sampler.drop_last,
    )


def seed_alike(loader: Any, num_sharing: int) -> None:
    """Seeds the workers of ranks that share batches alike; Trainer seeds them by rank. Groups have `num_sharing`
    neighboring ranks."""
    own = getattr(loader, "base_dataloader", loader)
    seeds: Any = getattr(own, "worker_init_fn", None)
    if num_sharing > 1 and "rank" in getattr(seeds, "keywords", {}):
        own.worker_init_fn = partial(seeds, rank=seeds.keywords["rank"] // num_sharing)
