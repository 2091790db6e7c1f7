"""Images as what is classified. They rest as the files they were, and are decoded when they are used."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoImageProcessor, AutoModelForImageClassification
from transformers.utils import is_vision_available

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import BadRow
from hf_zero.recipes.loading import quiet


class Images:
    """How images come to a model.

    Args:
        column (`str`): The column of the images.

    Raises:
        ConfigError: Pillow is not installed.
    """

    task = "image-classification"
    auto_class = AutoModelForImageClassification
    classifiers = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING  # class of a config to class of the model
    peft_task = None
    has_lengths = False

    columns: tuple[str, ...]
    processor: Any  # from `load_processor` on

    def __init__(self, column: str):
        if not is_vision_available():
            raise ConfigError("images: Pillow, which reads them, is not installed; pip install 'hf-zero[vision]'")
        self.columns = (column,)

    def load_processor(self, path: str, **where: Any) -> None:
        """Loads the image processor of a model.

        Raises:
            ConfigError: It does not load.
        """
        with quiet():
            try:
                self.processor = AutoImageProcessor.from_pretrained(path, **where)
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ConfigError(f"{path}: its image processor does not load ({reason})") from error

    def take(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What is read of a row: the image as it is stored, after a look at its first bytes.

        Raises:
            BadRow: there is no image, or it is none.
        """
        (column,) = self.columns
        stored = row.get(column)
        if stored is None:
            raise BadRow(f"nothing in column {column!r}")
        if not isinstance(stored, Mapping):
            raise BadRow(f"a {type(stored).__name__} in column {column!r}, expected an image")
        try:
            _open(stored).close()
        except (OSError, ValueError) as error:
            raise BadRow(f"column {column!r}: no image that can be read ({_reason(error, stored)})") from error
        return {column: {"bytes": stored.get("bytes"), "path": stored.get("path")}}

    def hash(self, row: Mapping[str, Any]) -> str:
        """What decides on which side of a split a row lies."""
        return hashlib.sha256(_content(row[self.columns[0]])).hexdigest()

    def prepare(self, data: datasets.Dataset, numbers: Sequence[int]) -> "Pixels":
        """Rows that become pixels when they are read; `numbers` are those of their classes."""
        return Pixels(data, self.columns[0], numbers, self.processor)

    def notes(self) -> list[str]:
        """Nothing: no image is cut."""
        return []

    def batch(self, data: datasets.Dataset) -> dict[str, torch.Tensor]:
        """Rows as a model takes them, to predict."""
        rows = self.prepare(data, [0] * len(data))
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows])}

    def shown(self, row: Mapping[str, Any]) -> list[str]:
        """Images, of which there is one, as the pipeline of transformers takes them."""
        path = row[self.columns[0]].get("path")
        return [path if path and Path(path).is_file() else "image.png"]


class Pixels(torch.utils.data.Dataset):
    """Images and the numbers of their classes, decoded and resized when a row is read.

    Args:
        data (`datasets.Dataset`): images not yet decoded.
        column (`str`): where they are.
        numbers (`Sequence[int]`): of their classes.
        processor (`BaseImageProcessor`): of the model.
    """

    def __init__(self, data: datasets.Dataset, column: str, numbers: Sequence[int], processor: Any):
        self._data, self._column, self._numbers, self._processor = data, column, numbers, processor

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        stored = self._data[index][self._column]
        try:
            with _open(stored) as image:
                pixels = self._processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        except (OSError, ValueError) as error:
            raise DataError(f"an image cannot be read ({_reason(error, stored)}); drop it") from error
        return {"pixel_values": pixels, "labels": self._numbers[index]}  # [channels, height, width]


def _content(stored: Mapping[str, Any]) -> bytes:
    return stored["bytes"] if stored.get("bytes") is not None else Path(stored["path"]).read_bytes()


def _open(stored: Mapping[str, Any]) -> Any:
    """The image; Pillow reads its first bytes now, and the rest when it is asked for."""
    from PIL import Image

    return Image.open(io.BytesIO(stored["bytes"]) if stored.get("bytes") is not None else stored["path"])


def _reason(error: Exception, stored: Mapping[str, Any]) -> str:
    """What is wrong with which file; Pillow names an object where it was given bytes."""
    return f"{stored.get('path') or 'no file name'}: {type(error).__name__}"
