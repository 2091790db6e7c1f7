"""Rows that are read while training goes on."""

from collections.abc import Iterator
from typing import Any

import datasets
from torch.utils import data


class Stream(data.IterableDataset):
    """The same rows in every process, of which accelerate gives each its batches, equally many.

    The files of a `datasets.IterableDataset` it would share out, and the process with the shortest would end first,
    while the others wait for it. When all rows have been read they are read again: `max_steps` ends the run, and a
    step may take the last rows and the first. `Trainer` would drop a step that the end of the rows cuts short, and
    never end where there are too few rows for one.

    Args:
        rows (`datasets.IterableDataset`): of none, none are given.
    """

    def __init__(self, rows: datasets.IterableDataset):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        row = True
        while row is not None:  # a pass without any row is the last
            row = None
            for row in self._rows:
                yield row
