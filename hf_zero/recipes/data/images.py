"""Image files, opened with Pillow (an optional dependency), and rows of messages with images, as TRL's collator for
vision-language models takes them."""

import base64
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Features, Image, Json, List
from transformers.utils import is_vision_available

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import IMAGE_COLUMNS, MEDIA, TEMPLATE_KWARGS, UNTRAINED, Format, Message
from hf_zero.recipes.data.rows import IGNORED, BadRow, Rows


StoredImage = Mapping[str, Any]  # as `datasets` keeps an image: its "bytes", or the "path" of its file
SOURCES = ("image", "url", "path", "base64")  # keys of a block of type image that may name it
MARK = "<image>"  # the place of an image in a text, as in the data of LLaVA


def image_column(rows: Rows) -> str | None:
    """Returns the column of images, if there is one."""
    return next((column for column in IMAGE_COLUMNS if column in rows.columns), None)


def has_images(rows: Rows) -> bool:
    """Whether the first row has images, in their column or in blocks of its messages."""
    turns = [turn for value in rows.example.values() if isinstance(value, list) for turn in value]
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    column = image_column(rows)
    return (column is not None and rows.example[column] is not None) or any(
        isinstance(block, Mapping) and block.get("type") in ("image", "image_url") for block in blocks
    )


def check_pillow() -> None:
    """Raises [`ConfigError`] if Pillow is not installed."""
    if not is_vision_available():
        raise ConfigError("images: Pillow, which reads them, is not installed; pip install 'hf-zero[vision]'")


def open_image(stored: StoredImage, *, pixels: bool = False) -> Any:
    """Reads the first bytes of an image, or its pixels in RGB. Raises [`BadRow`], naming the file."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(stored["bytes"]) if stored.get("bytes") is not None else stored["path"]) as image:
            return image.convert("RGB") if pixels else None
    except Exception as error:  # of decoders, and DecompressionBombError, which derives from nothing else
        name = stored.get("path") or "no file name"  # Pillow names an object if it is given bytes
        raise BadRow(f"no image that can be read ({name}: {type(error).__name__})") from error


def decoded(stored: StoredImage) -> Any:
    """Returns the pixels of an image, a `PIL.Image.Image` in RGB. Raises [`DataError`], naming the file."""
    try:
        return open_image(stored, pixels=True)
    except BadRow as error:
        raise DataError(f"rows with images: {error}; drop it") from error


def find_image(value: Any, folders: tuple[Path, ...], column: str) -> dict[str, Any]:
    """Returns an image as `datasets` keeps it. A row holds that, its bytes as base64 (perhaps in a data URL), or the
    path of a file, relative to one of `folders`. Raises [`BadRow`] if there is no such file, if there are several, or
    if it is no image."""
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        found = {"bytes": value["bytes"], "path": value.get("path")}
    else:
        path = value.get("path") if isinstance(value, Mapping) else value
        if not isinstance(path, str):
            raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected the path of an image")
        places = [folder / Path(path).expanduser() for folder in folders] or [Path(path).expanduser()]
        files = list({place.resolve(): place for place in places if os.path.isfile(place)}.values())
        if len(files) > 1:
            raise BadRow(f"column {column!r}: {path} may be {files[0]} or {files[1]}; name it by its whole path")
        if files:
            found = {"bytes": None, "path": str(files[0].absolute())}
        else:
            try:
                encoded = path.partition(",")[2] if path.startswith("data:") else path
                content = base64.b64decode("".join(encoded.splitlines()), validate=True)  # it may have line breaks
            except ValueError:
                raise BadRow(f"column {column!r}: there is no file {str(places[0])[:200]}") from None
            found = {"bytes": content, "path": None}
    try:
        open_image(found)
    except BadRow as error:
        raise BadRow(f"column {column!r}: {error}") from error
    return found


@dataclass(frozen=True)
class ImageFormat(Format):
    """A format of chats with images. `read` returns the images in a column `images`, as `datasets` keeps them."""

    refuses: tuple[str, ...] = tuple(name for name in MEDIA if name not in IMAGE_COLUMNS)
    column: str | None = None  # one of `IMAGE_COLUMNS`; `None` if the rows have none
    folders: tuple[Path, ...] = ()  # in which relative paths of images begin

    @property
    def features(self) -> Features:
        """The columns that `read` returns."""
        return Features({**dict.fromkeys(self.gives, Json()), "images": List(Image(decode=False))})

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Converts a row. Raises [`BadRow`] as `Format.read` does, and if an image cannot be read, or has no place in
        the messages."""
        values = super().read(row)
        for name in ("tools", TEMPLATE_KWARGS):
            if values[name]:
                raise BadRow(f"it has {name}, which rows with images cannot have")
        if values.get(UNTRAINED):
            raise BadRow("a message has weight 0, which rows with images cannot have")
        named = _named(row, self.column)
        blocks = [block for chat in self.chats_of(values) for turn in chat for block in _as_list(turn["content"])]
        in_blocks = [source for block in blocks if block["type"] == "image" and (source := _taken(block)) is not None]
        if in_blocks and named:
            raise BadRow(f"it has images in blocks and in the column {self.column!r}; name each in one place")
        images = [find_image(value, self.folders, self.column or IMAGE_COLUMNS[0]) for value in in_blocks or named]
        first, *others = self.gives
        placed = {first: _placed(values[first], len(images)), **{name: _placed(values[name], 0) for name in others}}
        return {**values, **placed, "images": images}


def with_images(form: Format, rows: Rows) -> ImageFormat:
    """Returns the same format for rows with images. Raises [`DataError`] if the rows hold no messages."""
    if not form.is_chat:
        raise DataError(f"{rows.source}: {form.name} with images, expected messages")
    given = {name: value for name, value in vars(form).items() if name != "refuses"}
    return ImageFormat(**given, column=image_column(rows), folders=rows.folders)


def _named(row: Mapping[str, Any], column: str | None) -> list[Any]:
    value = row.get(column) if column else None
    if value is None:
        return []
    if column == IMAGE_COLUMNS[0] and not isinstance(value, list):
        raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected a list of images")
    return value if isinstance(value, list) else [value]


def _taken(block: dict[str, Any]) -> Any:
    """Removes the source of its image from a block. Returns `None` if the block only marks a place."""
    found = [block.pop(key) for key in SOURCES if block.get(key) is not None]
    return found[0] if found else None


def _placed(messages: list[Message], num_images: int) -> list[Message]:
    """Returns messages in blocks, with a block for each image; where the messages have none, before the first text of
    the user. Raises [`BadRow`] if the numbers of images and places differ, or a message calls tools."""
    from trl.data_utils import prepare_multimodal_messages

    if any(turn.get("tool_calls") for turn in messages):
        raise BadRow("it calls tools, which rows with images cannot")
    turns = [{**turn, "content": _marked(turn["content"])} for turn in messages]
    if any(isinstance(turn["content"], list) for turn in turns):  # TRL places images in messages of texts only
        turns = [{**turn, "content": _as_list(turn["content"])} for turn in turns]
    try:
        found = prepare_multimodal_messages(turns, [None] * num_images)
    except ValueError as error:
        raise BadRow(str(error).rstrip(".")) from error
    for block in (block for turn in found for block in turn["content"] or []):
        block.pop("image", None)
    return [{**turn, "content": turn["content"] or []} for turn in found]


def _marked(content: str | list) -> str | list[dict[str, Any]]:
    """Returns a text with marks for images as blocks; other content as it is."""
    if not isinstance(content, str) or MARK not in content:
        return content
    first, *others = (_as_list(text.strip()) for text in content.split(MARK))
    return [*first, *(block for text in others for block in ({"type": "image"}, *text))]


def _as_list(content: str | list | None) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or []


def with_pixels(collate: Callable[[list], dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes a batch of rows whose images are decoded now. Raises [`DataError`] if an image cannot be read, the
    processor refuses the rows, or a row is cut before the tokens that the loss counts."""
    shown = [{**row, "images": [decoded(stored) for stored in row["images"]]} for row in rows]
    try:
        batch = collate(shown)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"rows with images: {reason}; correct them, or set a larger --max_length") from error
    counts = (batch["labels"][:, 1:] != IGNORED).any(dim=1).tolist()  # the first is predicted from nothing
    if not all(counts):
        lost = rows[counts.index(False)]["images"]
        name = next((f" of {stored['path']}" for stored in lost if stored.get("path")), "")
        raise DataError(
            f"rows with images: no token of the row{name} counts within max_length "
            f"{getattr(collate, 'max_length', None)}; set a larger --max_length, or drop the row"
        )
    return batch
