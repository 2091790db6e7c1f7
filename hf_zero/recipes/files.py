"""Files that are whole or not there."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that whoever reads it finds the old text or the new one, whatever ends the process.

    Args:
        path (`Path`): Of the file; another one stands beside it for a moment.
        text (`str`): All of it.
    """
    new = path.with_name(f"_{path.name}.new")  # Trainer uploads nothing that begins so
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
