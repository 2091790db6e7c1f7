"""Tokens of a hub among the training arguments: none of them is written to disk."""

import copy
import os
import pickletools
import zipfile
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME


# Arguments that are tokens, and keys by which dictionaries among the arguments (`model_init_kwargs`) hold them.
# Not everything that ends in "_token" is a secret: there is `eos_token`.
TOKEN_FIELDS = ("hub_token", "push_to_hub_token")
TOKEN_KEYS = ("token", "use_auth_token")


def without_tokens(args: TrainingArguments) -> TrainingArguments:
    """A copy of training arguments that can be saved for others to see."""
    args = copy.copy(args)
    for name, value in vars(args).items():
        if isinstance(value, str) and name in TOKEN_FIELDS:
            setattr(args, name, None)
        elif isinstance(value, dict):
            setattr(args, name, _blanked(value))
    return args


def token_warning(folder: str | os.PathLike) -> str | None:
    """What to tell the owner of a folder whose training arguments hold a token, as other programs and earlier versions
    save them; `None` where they do not. Nothing in the file is executed."""
    path = Path(folder) / TRAINING_ARGS_NAME
    if not _holds_token(path):
        return None
    return (
        f"{path}: holds the hub's token in plain text; delete the file, and revoke the token if others could read the "
        "file or it was uploaded"
    )


def _blanked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: None if key in TOKEN_KEYS and isinstance(item, str) else _blanked(item) for key, item in value.items()
    }


def _holds_token(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            pickles = [archive.read(name) for name in names]
        return any(_follows_secret(pickle) for pickle in pickles)
    except (OSError, ValueError, zipfile.BadZipFile):  # there is none, or it is no such file
        return False


def _follows_secret(pickled: bytes) -> bool:
    """Whether a text follows the name of a token, as a value follows its key."""
    before: Any = None
    for operation, argument, _ in pickletools.genops(pickled):
        if "PUT" in operation.name or operation.name == "MEMOIZE":
            continue
        is_text = "UNICODE" in operation.name
        if is_text and before in (*TOKEN_FIELDS, *TOKEN_KEYS):
            return True
        before = argument if is_text else None
    return False
