"""What every task's data comes to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Data:
    """What a task trains on, ready for a trainer, and what there is to say of it.

    Args:
        train (`datasets.Dataset` or `IterableDataset`): rows for the trainer.
        test (`datasets.Dataset`, *optional*): likewise, to evaluate on.
        processing_class (`PreTrainedTokenizerBase` and the like): saved beside the model.
        collate (`Callable`, *optional*): makes a batch of rows; `None` leaves it to the trainer.
        source (`str`): what the data is called: a hub id or a file.
        notes (`list[str]`): one line each: how many rows, cut, skipped. Rank 0 prints them.
        sample (`str`): the first row as the model reads it, with what the loss counts marked.
        extra (`dict`): what the task alone knows, such as the labels of a classifier.
    """

    train: Any
    test: Any
    processing_class: Any
    collate: Callable | None
    source: str
    notes: list[str] = field(default_factory=list)
    sample: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
