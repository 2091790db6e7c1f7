"""The Hub: the ZeRO section of the model card, errors of one line, and what is never uploaded or written to disk."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import get_session
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils.hub import hf_api

from hf_zero.compat import replaced
from hf_zero.errors import HfZeroError, HubError, causes


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)

# These contain local paths, and the pickled training arguments of other programs also the token.
NOT_PUSHED = (TRAINING_ARGS_NAME, f"*/{TRAINING_ARGS_NAME}", "resolved.yaml")
_REMEDIES = {
    401: "the token is missing or wrong; log in with `hf auth login`, or set HF_TOKEN to one with write permission",
    403: "the token has no write access to the repository; use one that has, or another name",
    404: "the repository or revision does not exist, or the token has no access to it; check the name",
}


def describe_zero(trainer: "ZeroTrainerMixin") -> None:
    """Adds tags, a section on ZeRO and `card_sections` to the model card that Trainer has written."""
    args, path = trainer.args, Path(trainer.args.output_dir, "README.md")
    card = ModelCard.load(path, ignore_metadata_errors=True)
    tags = [*(card.data.tags or ()), "hf_zero", f"zero-stage-{args.zero_stage}"]
    card.data.tags = list(dict.fromkeys(tags))
    rows = {"ZeRO stage": args.zero_stage, "ranks": args.world_size, "precision": precision_of(trainer)}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    sections = {"ZeRO": f"| | |\n|---|---|\n{table}", **trainer.card_sections}
    card.text += "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())
    card.save(path)


def precision_of(trainer: "ZeroTrainerMixin") -> str:
    half = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else None
    masters = {str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters() if p.requires_grad}
    return f"{half} with fp32 masters" if half else ", ".join(sorted(masters))


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
    # the HTTP library of the installed Hub client: it differs between versions
    transport = importlib.import_module(type(get_session()).__module__.split(".")[0])
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
        if isinstance(cause, transport.TransportError):
            return (
                f"connection to {constants.ENDPOINT} failed ({type(cause).__name__}: {_first_line(cause)}); check the "
                "network and HF_ENDPOINT, and try again"
            )
    return None


def log_failures(push: Any) -> None:
    """Logs a warning for each failed background upload, which Trainer would not report."""
    for job in push.jobs:
        if job.done() and not job.cancelled() and (error := job.exception()) is not None:
            logger.warning("An upload during training failed: %s; call push_to_hub again.", hub_reason(error) or error)
    push.jobs = []


@contextmanager
def without_private_files() -> Iterator[None]:
    """Excludes `NOT_PUSHED` from Trainer's uploads."""
    api = hf_api()
    upload = api.upload_folder

    def upload_folder(*, ignore_patterns: list[str] | None = None, **kwargs):
        return upload(ignore_patterns=[*(ignore_patterns or ()), *NOT_PUSHED], **kwargs)

    with replaced(api, upload_folder=upload_folder):
        yield


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__
