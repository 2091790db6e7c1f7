"""Image files: where rows name them, and opening them with Pillow, an optional dependency."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import is_vision_available

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import BadRow, Rows


IMAGE_COLUMNS = ("images", "image")  # a list of images, or one
StoredImage = Mapping[str, Any]  # as `datasets` keeps an image: its "bytes", or the "path" of its file


def image_column(rows: Rows) -> str | None:
    """The column of images, if there is one."""
    return next((column for column in IMAGE_COLUMNS if column in rows.columns), None)


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
    """An image as `datasets` keeps it, by what a row holds: that, or the path of a file, whose relative ones begin in
    one of `folders`. Raises [`BadRow`] where there is no such file, or several, or it is no image."""
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        found = {"bytes": value["bytes"], "path": value.get("path")}
    else:
        path = value.get("path") if isinstance(value, Mapping) else value
        if not isinstance(path, str):
            raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected the path of an image")
        places = [folder / Path(path).expanduser() for folder in folders] or [Path(path).expanduser()]
        files = list({place.resolve(): place for place in places if place.is_file()}.values())
        if not files:
            raise BadRow(f"column {column!r}: there is no file {places[0]}")
        if len(files) > 1:
            raise BadRow(f"column {column!r}: {path} may be {files[0]} or {files[1]}; name it by its whole path")
        found = {"bytes": None, "path": str(files[0].absolute())}
    check_image(found, column)
    return found
