"""From rows of token ids to a batch."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.recipes.data.tokens import IGNORED


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
