"""Image files, which Pillow, an optional dependency, opens, and rows of messages or prompts with images, as TRL's
collator for vision-language models takes them."""

import base64
import hashlib
import io
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Features, Image, List
from transformers.utils import is_vision_available

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import IMAGE_COLUMNS, MEDIA, TEMPLATE_KWARGS, Format, Message
from hf_zero.recipes.data.rows import IGNORED, BadRow, Rows


StoredImage = Mapping[str, Any]  # as `datasets` keeps an image: its "bytes", or the "path" of its file
SOURCES = ("image", "url", "path", "base64")  # keys of a block of type image that may say which one it is
MARK = "<image>"  # in a text: the place of an image, as in the data of LLaVA
CUT_IMAGE = re.compile(r"\bimages?\W* tokens?\b", re.IGNORECASE)  # of what processors say where a row is cut
NO_IMAGES = ("text", "tokenized")  # formats whose rows TRL takes without images alone


def image_column(rows: Rows) -> str | None:
    """The column of images, if there is one."""
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
    """Refuses images where nothing reads them."""
    if not is_vision_available():
        raise ConfigError("images: Pillow, which reads them, is not installed; pip install 'hf-zero[vision]'")


def open_image(stored: StoredImage) -> Any:
    """Opens an image. Pillow reads its first bytes now, and the rest when its pixels are needed."""
    from PIL import Image

    return Image.open(io.BytesIO(stored["bytes"]) if stored.get("bytes") is not None else stored["path"])


def check_image(stored: StoredImage, column: str) -> None:
    """Refuses what is no image, by its first bytes: pixels are decoded in training alone."""
    try:
        open_image(stored).close()
    except Exception as error:  # of decoders, and DecompressionBombError, which derives from nothing else
        raise BadRow(f"column {column!r}: no image that can be read ({image_failure(error, stored)})") from error


def decoded(stored: StoredImage) -> Any:
    """The pixels of an image, a `PIL.Image.Image` in RGB. Raises [`DataError`], naming the file."""
    try:
        with open_image(stored) as image:
            return image.convert("RGB")
    except Exception as error:
        raise DataError(f"an image cannot be read ({image_failure(error, stored)}); drop it") from error


def image_failure(error: Exception, stored: StoredImage) -> str:
    """The error with the file's name, since Pillow names an object where it was given bytes."""
    return f"{stored.get('path') or 'no file name'}: {type(error).__name__}"


def find_image(value: Any, folders: tuple[Path, ...], column: str) -> dict[str, Any]:
    """An image as `datasets` keeps it, by what a row holds: that, its bytes as base64 (perhaps in a data URL), or the
    path of a file, whose relative ones begin in one of `folders`. Raises [`BadRow`] where there is no such file, or
    several, or it is no image."""
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        found = {"bytes": value["bytes"], "path": value.get("path")}
    else:
        path = value.get("path") if isinstance(value, Mapping) else value
        if not isinstance(path, str):
            raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected the path of an image")
        places = [folder / Path(path).expanduser() for folder in folders] or [Path(path).expanduser()]
        files = list({place.resolve(): place for place in places if _is_file(place)}.values())
        if len(files) > 1:
            raise BadRow(f"column {column!r}: {path} may be {files[0]} or {files[1]}; name it by its whole path")
        if files:
            found = {"bytes": None, "path": str(files[0].absolute())}
        else:
            try:
                content = base64.b64decode(path.partition(",")[2] if path.startswith("data:") else path, validate=True)
            except ValueError:
                raise BadRow(f"column {column!r}: there is no file {str(places[0])[:200]}") from None
            found = {"bytes": content, "path": None}
    check_image(found, column)
    return found


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # of a name that is too long for one
        return path.is_file()
    return False


@dataclass(frozen=True)
class ImageFormat(Format):
    """A format whose rows have images too; `read` gives them in a column `images`, as `datasets` keeps them."""

    column: str | None = None  # one of `IMAGE_COLUMNS`; `None` where the rows have none
    folders: tuple[Path, ...] = ()  # where relative paths of images begin
    image_token: str | None = None  # how a prompt that is a text says the place of an image
    eos_token: str = ""  # put behind a completion that is a text, as TRL does it for rows without images
    # a hash of the names, sizes and times of the image files, of which no row holds more than the name: rows
    # that were read from other files are not found in the cache
    files: str = ""

    @property
    def features(self) -> Features:
        values = {name: kind for name, kind in super().features.items() if name in self.gives}
        return Features({**values, "images": List(Image(decode=False))})

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes what TRL takes of a row. Raises [`BadRow`] where `Format.read` does, and where an image cannot be
        read, or has no place in the messages or the prompt."""
        values = super().read(row)
        for name in ("tools", TEMPLATE_KWARGS):
            if values.pop(name, None):
                raise BadRow(f"it has {name}, which rows with images cannot have")
        named = _named(row, self.column)
        if self.is_chat and (in_blocks := [_taken(block) for block in _image_blocks(values, self.gives)]):
            if any(value is not None for value in in_blocks) and named:
                raise BadRow(f"it has images in blocks and in the column {self.column!r}; name each in one place")
            named = named or [value for value in in_blocks if value is not None]
        images = [find_image(value, self.folders, self.column or IMAGE_COLUMNS[0]) for value in named]
        if self.is_chat:
            first, *others = self.gives
            values[first] = _placed(values[first], len(images))
            values |= {column: _placed(values[column], 0) for column in others}
            return {**values, "images": images}
        if self.image_token is not None:
            found = [values[column].count(self.image_token) for column in self.gives]
            if found != [len(images), 0]:
                times = f"{found[0]} times {self.image_token} in the prompt and {found[1]} times in the completion"
                raise BadRow(f"{len(images)} images, and {times}")
        completion = self.gives[-1]
        if not values[completion].endswith(self.eos_token):
            values[completion] += self.eos_token
        return {**values, "images": images}

    def prompt_of(self, row: dict[str, Any]) -> str | list[Message]:
        """What to try the model on: the first image of a row which was read, and what its user says first."""
        if not self.is_chat:
            return row[self.gives[0]]
        blocks = [block for turn in row[self.gives[0]] if turn["role"] == "user" for block in turn["content"]]
        texts = [block for block in blocks if block["type"] == "text"][:1]
        images = [{"type": "image", "url": image["path"] or "image.png"} for image in row["images"][:1]]
        return [{"role": "user", "content": [*images, *texts]}]


def with_images(form: Format, rows: Rows, image_token: str | None, eos_token: str) -> ImageFormat:
    """The same format, for rows with images. Raises [`DataError`] for texts, with which TRL takes none."""
    column = image_column(rows)
    if form.name in NO_IMAGES:
        what = "texts" if form.tokenizer is None else "token ids"
        raise DataError(f"{rows.source}: {what} with images, expected messages, or prompt and completion")
    folders = _folders(rows)
    files = _hash_of_files(rows, column, folders) if column else ""
    return ImageFormat(
        **{**vars(form), "refuses": tuple(name for name in MEDIA if name not in IMAGE_COLUMNS)},
        column=column,
        folders=folders,
        image_token=image_token,
        eos_token=eos_token,
        files=files,
    )


def _named(row: Mapping[str, Any], column: str | None) -> list[Any]:
    value = row.get(column) if column else None
    if value is None:
        return []
    if column == IMAGE_COLUMNS[0] and not isinstance(value, list):
        raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected a list of images")
    return value if isinstance(value, list) else [value]


def _image_blocks(values: Mapping[str, Any], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    contents = [turn["content"] for column in columns for turn in values[column]]
    return [
        block for content in contents if isinstance(content, list) for block in content if block["type"] == "image"
    ]


def _taken(block: dict[str, Any]) -> Any:
    """Takes out of a block of type image what says which one it is; `None` where it is no more than its place."""
    found = [block.pop(key) for key in SOURCES if block.get(key) is not None]
    return found[0] if found else None


def _placed(messages: list[Message], num_images: int) -> list[Message]:
    """Messages in blocks, with a block for the place of each image: where they say none, before the first user's text.
    Raises [`BadRow`] where there are more or fewer images than places, a block is none, or a message calls tools."""
    from trl.data_utils import prepare_multimodal_messages

    if any(turn.get("tool_calls") for turn in messages):
        raise BadRow("it calls tools, which rows with images cannot")
    turns = [{**turn, "content": _blocks(turn["content"])} for turn in messages]
    if any(isinstance(turn["content"], list) for turn in turns):  # of texts alone, TRL places the images
        turns = [{**turn, "content": _as_list(turn["content"])} for turn in turns]
    try:
        found = prepare_multimodal_messages(turns, [None] * num_images)
    except ValueError as error:
        raise BadRow(str(error).rstrip(".")) from error
    for block in (block for turn in found for block in turn["content"] or []):
        block.pop("image", None)
    return [{**turn, "content": turn["content"] or []} for turn in found]


def _blocks(content: str | list) -> str | list[dict[str, Any]]:
    """A text with places for images, or a list, as blocks; another text as it is."""
    if isinstance(content, str):
        if MARK not in content:
            return content
        first, *others = (_as_list(text.strip()) for text in content.split(MARK))
        return [*first, *(block for text in others for block in ({"type": "image"}, *text))]
    return content


def _as_list(content: str | list) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _folders(rows: Rows) -> tuple[Path, ...]:
    paths = [Path(part.source).expanduser() for part in rows.parts]
    folders = [path if path.is_dir() else path.parent for path in paths if path.exists()]
    return tuple(dict.fromkeys(folders))


def _hash_of_files(rows: Rows, column: str, folders: tuple[Path, ...]) -> str:
    """Of the files that rows name; of images that the rows hold, and of streams, which no cache keeps, of nothing."""
    example = rows.example[column]
    first = next(iter(example), None) if isinstance(example, list) else example
    if rows.is_stream or rows.form == "columns" and not isinstance(first, str):
        return ""
    digest = hashlib.sha256()
    for row in rows.good():
        with suppress(BadRow):
            names = [value for value in _named(row, column) if isinstance(value, str)]
            for place in (folder / name for name in names for folder in folders):
                stat = place.stat() if _is_file(place) else None
                digest.update(f"{place} {stat and (stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


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
