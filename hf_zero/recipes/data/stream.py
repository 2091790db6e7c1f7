"""Rows that are read while training goes on."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import datasets
from torch.utils import data
from transformers import TrainingArguments

from hf_zero.recipes.common import SourceArguments


def shuffled(
    rows: datasets.IterableDataset, arguments: SourceArguments, training: TrainingArguments
) -> datasets.IterableDataset:
    """Rows in an order as random as a buffer of them can make it, and their files; the same in every process.

    Args:
        rows (`datasets.IterableDataset`): in their order.
        arguments ([`SourceArguments`]): say how large the buffer is.
        training (`TrainingArguments`): with the seed, and the sampling strategy: "sequential" leaves the order.
    """
    if training.train_sampling_strategy == "sequential":
        return rows
    seed = training.seed if training.data_seed is None else training.data_seed
    return rows.shuffle(seed=seed, buffer_size=arguments.dataset_shuffle_buffer)


class Stream(data.IterableDataset):
    """The same rows in every process, of which accelerate gives each its batches, equally many.

    The files of a `datasets.IterableDataset` it would share out, and the process with the shortest would end first,
    while the others wait for it. When all rows have been read they are read again: `max_steps` ends the run, and a
    step may take the last rows and the first. `Trainer` would drop a step that the end of the rows cuts short, and
    never end where there are too few rows for one. Rows that are shuffled come in another order in each pass.

    Args:
        rows (`datasets.IterableDataset`): of none, none are given.
    """

    def __init__(self, rows: datasets.IterableDataset):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        row = True
        for number in count():
            if row is None:  # a pass without any row is the last
                return
            row = None
            self._rows.set_epoch(number)
            for row in self._rows:
                yield row
