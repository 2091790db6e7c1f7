"""Batches of tokens and of images, and metrics that are sums over the tokens of rows."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import EvalPrediction

from hf_zero.errors import DataError
from hf_zero.recipes.data.images import decoded
from hf_zero.recipes.data.rows import IGNORED


Metrics = Callable[[EvalPrediction], Mapping[str, float]]
CUT_IMAGE = re.compile(r"\bimages?\W* tokens?\b", re.IGNORECASE)  # of what processors say where a row is cut


def with_pixels(collate: Callable[[list], dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of rows whose images are decoded now. Raises [`DataError`] where an image cannot be read, the processor
    refuses the rows, or a row is cut before all that counts."""
    shown = [{**row, "images": [decoded(stored) for stored in row["images"]]} for row in rows]
    try:
        batch = collate(shown)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        remedy = "a larger --max_length cuts no image" if CUT_IMAGE.search(reason) else "correct them"
        raise DataError(f"rows with images: {reason}; {remedy}") from error
    _refuse_cut_images(collate, shown, batch)
    counts = (batch["labels"][:, 1:] != IGNORED).any(dim=1).tolist()  # the first is predicted from nothing
    if not all(counts):
        lost = rows[counts.index(False)]["images"]
        name = next((f" of {stored['path']}" for stored in lost if stored.get("path")), "")
        raise DataError(
            f"rows with images: no token of the row{name} counts within max_length "
            f"{getattr(collate, 'max_length', None)}; set a larger --max_length, or drop the row"
        )
    return batch


def _refuse_cut_images(collate: Any, rows: list[dict[str, Any]], batch: dict[str, Any]) -> None:
    """Refuses rows that are cut within an image, of which the model would then see more pixels than places."""
    token = getattr(getattr(collate, "processor", None), "image_token_id", None)
    longest = getattr(collate, "max_length", None)
    if token is None or longest is None or batch["input_ids"].shape[1] < longest:
        return
    whole = replace(collate, max_length=None)(rows)
    counts = [(each["input_ids"] == token).sum(dim=1).tolist() for each in (batch, whole)]
    for num_left, num_tokens in zip(*counts):
        if num_left < num_tokens:
            raise DataError(
                f"rows with images: max_length {longest} leaves {num_left} of the {num_tokens} image tokens of a row; "
                "a larger --max_length cuts no image"
            )


def with_rows(collate: Callable[[list], dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch, and which of its rows each token is of: without padding, all rows are one behind the other."""
    batch = collate(rows)
    shape = batch["input_ids"].shape
    row_of = torch.arange(len(rows))[:, None].expand(len(rows), shape[1])
    if shape[0] < len(rows):
        lengths = [len(row["input_ids"]) for row in rows]
        lengths[-1] += shape[1] - sum(lengths)
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))[None]
    return {**batch, "row_of": row_of}


def token_means(predictions: EvalPrediction, more: Metrics) -> dict[str, float]:
    """The means over tokens of what `prediction_step` gives, and what the user's function gives."""
    *sums, count = predictions.predictions.sum(axis=0, dtype="float64")
    means = zip(("loss", "entropy", "mean_token_accuracy"), (float(each / max(count, 1)) for each in sums))
    of_rows = EvalPrediction(predictions.predictions[:, :-1], predictions.label_ids)
    return {**dict(means), **more(of_rows)}
