"""Numbers about rows, and words for them."""

import numpy as np
from datasets import Dataset


def column(data: Dataset, name: str) -> np.ndarray:
    """A column of numbers, without reading the others."""
    return data.select_columns(name).with_format("arrow")[:].column(name).to_numpy()


def cut_note(num_rows: int, max_length: int, num_tokens: int) -> str:
    """Says how many rows were cut to `max_length` tokens, and how many tokens they lost."""
    return f"{plural(num_rows, 'row')} cut to {max_length} tokens, {plural(num_tokens, 'token')} lost"


def plural(number: int, noun: str) -> str:
    """The number with its noun: 1 row, 2 rows, 10,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
