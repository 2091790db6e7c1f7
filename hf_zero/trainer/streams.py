"""Streams of rows to train on, of which all ranks are given equally many."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers.utils import is_datasets_available


class WholeStream(IterableDataset):
    """A stream of `datasets` of which accelerate gives each rank its batches, in turn.

    Of the stream itself it would give each rank some of the files, where there are as many files as ranks: the rank
    with the fewest rows would end first, and which rows a step has would depend on the number of ranks.
    """

    def __init__(self, rows: Any):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Says how many passes there were before: a stream that is shuffled has another order in each."""
        self._rows.set_epoch(epoch)


def whole_stream(data: Any) -> Any:
    """Returns a stream of `datasets` as a [`WholeStream`], and other data as it is."""
    if not is_datasets_available():
        return data
    import datasets

    return WholeStream(data) if isinstance(data, datasets.IterableDataset) else data
