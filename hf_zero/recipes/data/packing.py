"""From rows of token ids to sequences, of which several rows may share one, and to batches."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils import data

from hf_zero.recipes.data.rows import column, plural
from hf_zero.recipes.data.tokens import IGNORED


def best_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Puts rows into as few sequences as the heuristic finds: the longest first, each where it leaves the least room.

    Takes at most 11/9 of the fewest sequences, and one more (Johnson 1973).

    Args:
        lengths (`Sequence[int]`): tokens of each row, at most `capacity`.
        capacity (`int`): tokens of a sequence.

    Returns:
        `list[list[int]]`: the rows of each sequence; the same in every process.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # the distinct amounts of room that some pack has left, ascending
    packs_with: dict[int, list[int]] = defaultdict(list)
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            pack = packs_with[room].pop()
            if not packs_with[room]:
                rooms.pop(place)
        packs[pack].append(row)
        left = room - length
        if left and not packs_with[left]:
            insort(rooms, left)
        if left:
            packs_with[left].append(pack)
    return packs


class Packed(data.Dataset):
    """Sequences of several rows each.

    Args:
        rows (`datasets.Dataset`): with `input_ids`, and all other columns of the same length.
        packs (`list[list[int]]`): which rows each sequence is made of.
    """

    def __init__(self, rows: Dataset, packs: list[list[int]]):
        self._rows, self._packs = rows, packs

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """The columns, each row behind the other, and `position_ids`, which start again with each row."""
        rows = self._rows[self._packs[index]]
        rows["position_ids"] = [range(len(ids)) for ids in rows["input_ids"]]
        return {name: list(chain.from_iterable(values)) for name, values in rows.items()}


def pack(rows: Dataset, max_length: int, notes: list[str]) -> Packed:
    """Packs rows into sequences.

    Args:
        rows (`datasets.Dataset`): with `num_tokens`, at most `max_length`, beside columns of that length.
        max_length (`int`): tokens of a sequence.
        notes (`list[str]`): gets a line that says how full they are.
    """
    lengths = column(rows, "num_tokens")
    packs = best_fit_decreasing(lengths, max_length)
    filled = lengths.sum() / (len(packs) * max_length)
    notes.append(
        f"train: {plural(len(lengths), 'row')} packed into {plural(len(packs), 'sequence')} of up to {max_length} "
        f"tokens, {filled:.1%} full"
    )
    return Packed(rows.remove_columns("num_tokens"), packs)


@dataclass(frozen=True)
class Collate:
    """Pads rows to the longest of them, on the right.

    Rows that are packed have `position_ids`, which start again with each of their parts, and get no attention mask:
    transformers then makes a block-diagonal one for SDPA, eager and flex attention, and calls the kernels for several
    lengths of flash attention. For these, which want one row, the batch is flattened.

    The first token of a sequence is predicted from nothing, so the loss does not count it.

    Args:
        pad_token_id (`int`): it is masked, or a sequence of its own; its label is ignored.
        flatten (`bool`): whether packed rows become one.
    """

    pad_token_id: int
    flatten: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = [torch.tensor(row.get("labels", row["input_ids"])) for row in rows]
        positions = [torch.tensor(row.get("position_ids", range(len(row["input_ids"])))) for row in rows]
        labels = [label.masked_fill(start == 0, IGNORED) for label, start in zip(labels, positions, strict=True)]
        is_packed = "position_ids" in rows[0]
        if is_packed and self.flatten:
            ids, labels, positions = ([torch.cat(each)] for each in (ids, labels, positions))
        batch = {"input_ids": _padded(ids, self.pad_token_id), "labels": _padded(labels, IGNORED)}
        if is_packed:
            width = batch["input_ids"].shape[1]
            batch["position_ids"] = torch.stack([torch.cat([p, torch.arange(width - len(p))]) for p in positions])
        else:
            batch["attention_mask"] = _padded([torch.ones_like(row) for row in ids], 0)
        return batch


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
