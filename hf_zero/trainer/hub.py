"""Pushes to a hub from many ranks: one rank talks to the hub, and all get the result. No token is written to disk."""

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

# Pickled, they name folders of this machine; those of other programs hold the token.
NOT_PUSHED = (TRAINING_ARGS_NAME, f"*/{TRAINING_ARGS_NAME}")
# Arguments that are tokens, and keys by which dictionaries among the arguments (`model_init_kwargs`) hold them.
# Not everything that ends in "_token" is a secret: there is `eos_token`.
TOKENS = ("hub_token", "push_to_hub_token", "token", "use_auth_token")
TRANSIENT_STATUS = frozenset((429, 500, 502, 503, 504))
_REMEDIES = {
    401: "the token is missing or wrong; log in with `hf auth login`, or set HF_TOKEN to one with write permission",
    403: "this token may not write there; use one that may, or another name",
    404: "there is no such repository or revision, or this token may not see it; check the name",
}


@contextmanager
def hub_errors(subject: str) -> Iterator[None]:
    """Turns errors of the hub's client into one line."""
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
    """Returns the meaning of a failure in one line, or `None` when neither hub nor network caused it."""
    for cause in causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set; unset it"
        if isinstance(cause, LocalTokenNotFoundError):
            return _REMEDIES[401]
        if isinstance(cause, HFValidationError):
            return f"{_first_line(cause)}; give a name such as user/model"
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            said = _first_line(getattr(cause, "server_message", None) or cause)
            return f"{constants.ENDPOINT} answered {status} ({said}): {_REMEDIES.get(status, 'try again later')}"
        if isinstance(cause, _transport().TransportError):
            return (
                f"{constants.ENDPOINT} cannot be reached or broke off ({type(cause).__name__}: {_first_line(cause)}); "
                "check the network and HF_ENDPOINT, and try again"
            )
    return None


def is_transient(error: BaseException) -> bool:
    """Returns whether another try may help: the connection failed, or the server was busy."""
    for cause in causes(error):
        if isinstance(cause, HfHubHTTPError):
            return cause.response.status_code in TRANSIENT_STATUS
        if isinstance(cause, _transport().TransportError):
            return True
    return False


def finish_uploads(push: Any) -> None:
    """Removes the uploads that have ended, and warns of those that failed, which Trainer would not notice."""
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
    """Makes Trainer's uploads leave out private files: the training arguments, and files outside the folder to which
    links in it lead. The token is for uploads that are given none."""
    api = hf_api()
    upload = api.upload_folder

    def upload_folder(*, folder_path: str, ignore_patterns: list[str] | None = None, **kwargs):
        links = [str(path.relative_to(folder_path)) for path in links_out_of(Path(folder_path))]
        if links:
            logger.warning("%s: not uploaded, as they lead out of the folder: %s", folder_path, ", ".join(links))
        ignored = [*(ignore_patterns or ()), *NOT_PUSHED, *map(glob.escape, links)]
        kwargs["token"] = kwargs.get("token") or token
        return upload(folder_path=folder_path, ignore_patterns=ignored, **kwargs)

    with replaced(api, upload_folder=upload_folder):
        yield


def links_out_of(folder: Path) -> list[Path]:
    """Returns the files of a folder that are links to files outside it, which an upload would read."""
    whole = folder.resolve()
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not path.resolve().is_relative_to(whole))


def _transport():
    """Returns the HTTP library of the installed client, which has changed twice."""
    return importlib.import_module(type(get_session()).__module__.split(".")[0])


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


# Tokens: none of them is written to disk


def without_tokens(args: TrainingArguments) -> TrainingArguments:
    """Returns a copy of training arguments that can be saved for others to see."""
    args = copy.copy(args)
    vars(args).update(_blanked(vars(args)))
    return args


def _blanked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: None if key in TOKENS and isinstance(item, str) else _blanked(item) for key, item in value.items()}
