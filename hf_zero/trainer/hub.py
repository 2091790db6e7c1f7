"""Pushes to the Hub from many ranks: one rank sends requests, and all get the result. Tokens are never written to
disk."""

import copy
import glob
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import get_session
from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils.hub import hf_api

from hf_zero.compat import replaced
from hf_zero.errors import HfZeroError, HubError, causes


logger = logging.getLogger(__name__)

# These contain local paths, and the pickled training arguments of other programs also the token.
NOT_PUSHED = (TRAINING_ARGS_NAME, f"*/{TRAINING_ARGS_NAME}", "resolved.yaml")
# Names of tokens among the arguments and in nested dictionaries (`model_init_kwargs`). The suffix "_token" is not
# enough to detect them: `eos_token` is not a secret.
TOKENS = ("hub_token", "push_to_hub_token", "token", "use_auth_token")
_REMEDIES = {
    401: "the token is missing or wrong; log in with `hf auth login`, or set HF_TOKEN to one with write permission",
    403: "the token has no write access to the repository; use one that has, or another name",
    404: "the repository or revision does not exist, or the token has no access to it; check the name",
}


@contextmanager
def hub_errors(subject: str) -> Iterator[None]:
    """Converts exceptions of the Hub client to [`HubError`] with a message of one line."""
    try:
        yield
    except HfZeroError:
        raise
    except Exception as error:
        reason = hub_reason(error)
        if reason is None:
            raise
        raise HubError(f"{subject}: {reason}") from error


def hub_reason(error: BaseException) -> str | None:
    """Explains a failure in one line. Returns `None` if neither the Hub nor the network caused it."""
    for cause in causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set; unset it"
        if isinstance(cause, LocalTokenNotFoundError):
            return _REMEDIES[401]
        if isinstance(cause, HFValidationError):
            return f"{_first_line(cause)}; use a name such as user/model"
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            said = _first_line(getattr(cause, "server_message", None) or cause)
            return f"{constants.ENDPOINT} answered {status} ({said}): {_REMEDIES.get(status, 'try again later')}"
        if isinstance(cause, _transport().TransportError):
            return (
                f"connection to {constants.ENDPOINT} failed ({type(cause).__name__}: {_first_line(cause)}); check the "
                "network and HF_ENDPOINT, and try again"
            )
    return None


def finish_uploads(push: Any) -> None:
    """Removes finished uploads, and logs a warning for each failure, which Trainer would not report."""
    for job in push.jobs:
        error = job.exception() if job.done() and not job.cancelled() else None
        if error is not None:
            logger.warning(
                "An upload during training failed: %s; call push_to_hub again.",
                hub_reason(error) or f"{type(error).__name__}: {_first_line(error)}",
            )
    push.jobs = [job for job in push.jobs if not job.done()]


@contextmanager
def uploading(token: str | None = None) -> Iterator[None]:
    """Excludes private files from Trainer's uploads: the training arguments, and links to files outside the folder.

    Args:
        token (`str`, *optional*): Used for uploads without a token.
    """
    api = hf_api()
    upload = api.upload_folder

    def upload_folder(*, folder_path: str, ignore_patterns: list[str] | None = None, **kwargs):
        links = [str(path.relative_to(folder_path)) for path in links_out_of(Path(folder_path))]
        if links:
            logger.warning("%s: links to files outside the folder are not uploaded: %s", folder_path, ", ".join(links))
        ignored = [*(ignore_patterns or ()), *NOT_PUSHED, *map(glob.escape, links)]
        kwargs["token"] = kwargs.get("token") or token
        return upload(folder_path=folder_path, ignore_patterns=ignored, **kwargs)

    with replaced(api, upload_folder=upload_folder):
        yield


def links_out_of(folder: Path) -> list[Path]:
    """Returns the links in a folder to files outside it, which an upload would follow."""
    whole = folder.resolve()
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not path.resolve().is_relative_to(whole))


def _transport():
    """Returns the HTTP library of the installed Hub client: it differs between versions."""
    return importlib.import_module(type(get_session()).__module__.split(".")[0])


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


# Tokens are never written to disk


def without_tokens(args: TrainingArguments) -> TrainingArguments:
    """Returns a copy of the training arguments without tokens."""
    args = copy.copy(args)
    vars(args).update(_blanked(vars(args)))
    return args


def _blanked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: None if key in TOKENS and isinstance(item, str) else _blanked(item) for key, item in value.items()}
