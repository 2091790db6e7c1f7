"""Several short rows in one sequence, none of which sees another."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
from datasets import Dataset
from torch.utils import data

from hf_zero.recipes.data.stats import column, plural


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
