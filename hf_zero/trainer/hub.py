"""Pushes to a hub from many ranks: one rank talks to the hub, and all get the result. No token is written to disk."""

import copy
import glob
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import get_session
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils.hub import hf_api

from hf_zero.comm import Comm, DistributedComm
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks
from hf_zero.compat import check_overrides
from hf_zero.engine import engine_of
from hf_zero.errors import HfZeroError, HubError, causes
from hf_zero.trainer.card import card_text, facts_of
from hf_zero.trainer.trainer_base import ZeroTrainerBase


logger = logging.getLogger(__name__)

OVERRIDES = ("init_hf_repo", "create_model_card", "push_to_hub", "_push_from_checkpoint", "_finish_current_push")
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


class PushMixin(ZeroTrainerBase):
    """The part of `ZeroTrainerMixin` that pushes. All ranks call each of these methods."""

    # What the card has beside what the trainer itself knows.
    memory_of_ranks: tuple = ()  # by rank; a push gathers it
    card_dataset: str | None = None  # what the data is called
    card_sections: Mapping[str, str] = MappingProxyType({})  # Markdown by title
    hub_model_id: str | None

    def init_hf_repo(self, token: str | None = None, **kwargs: Any) -> None:
        """Creates the repository from rank 0. All ranks get to know its name, since they ask for it before each
        push."""

        def create() -> None:
            with hub_errors(f"creating {self.args.hub_model_id or os.path.basename(self.args.output_dir)}"):
                super(PushMixin, self).init_hf_repo(token=token, **kwargs)

        comm = self._ranks()
        run_on_all_ranks(comm, "creating the repository", create)
        self.hub_model_id = comm.broadcast_object(self.hub_model_id)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ):
        """Pushes as `Trainer.push_to_hub` does. All ranks save the model, and rank 0 uploads it."""
        subject = f"pushing to {self.hub_model_id or self.args.hub_model_id or self.args.output_dir}"
        self.memory_of_ranks = tuple(collect_from_all_ranks(self._ranks(), subject, self.memory_report))
        # The other ranks do not wait for the upload: it may take longer than a collective may.
        subject = f"{subject} from {self.args.output_dir} (`python -m hf_zero.recipes push` does it too)"
        with hub_errors(subject), uploading():
            return super().push_to_hub(commit_message, blocking=blocking, token=token, revision=revision, **kwargs)

    # `check_overrides` gives what is passed by position its name.
    def create_model_card(self, **given: Any) -> None:  # type: ignore[override]
        """Writes `README.md` into the output folder, from rank 0, with what the run took and how it was sharded.

        Args:
            given: what `Trainer.create_model_card` takes. It wins over what the trainer itself knows.
        """
        if not self.is_world_process_zero():
            return
        given = {"dataset": self.card_dataset} | {name: value for name, value in given.items() if value is not None}
        facts = replace(facts_of(self, self.memory_of_ranks, **given), sections=self.card_sections)
        Path(self.args.output_dir, "README.md").write_text(card_text(facts), encoding="utf-8")

    def _push_from_checkpoint(self, checkpoint_folder: str, **kwargs: Any) -> None:
        """Copies the weights and starts the upload on rank 0. The upload goes on in the background."""
        subject = f"pushing {checkpoint_folder}"

        def push() -> None:
            public = mock.patch.object(self, "args", without_tokens(self.args))  # Trainer saves them once more
            with hub_errors(subject), uploading(self.args.hub_token), public:
                super(PushMixin, self)._push_from_checkpoint(checkpoint_folder, **kwargs)

        run_on_all_ranks(self._ranks(), subject, push)

    def _finish_current_push(self, **kwargs: Any) -> None:
        """Waits for uploads in the background, and warns of those that failed, which Trainer would not notice."""
        super()._finish_current_push(**kwargs)
        push = getattr(self, "push_in_progress", None)  # rank 0 has it, once there is a repository
        for job in push.jobs if push is not None else ():
            error = job.exception() if job.done() and not job.cancelled() else None
            if error is not None:
                logger.warning(
                    "An upload during training failed: %s; call push_to_hub again.",
                    hub_reason(error) or f"{type(error).__name__}: {_first_line(error)}",
                )
        if push is not None:
            push.jobs = [job for job in push.jobs if not job.done()]

    def _ranks(self) -> Comm:
        engine = engine_of(self.model)
        if engine is not None:
            return engine.comm
        if dist.is_available() and dist.is_initialized():
            return DistributedComm(dist.group.WORLD, self.args.device, float(self.args.ddp_timeout))
        return Comm(torch.device("cpu"), float(self.args.ddp_timeout))


check_overrides(PushMixin, Trainer, OVERRIDES)


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

    with mock.patch.object(api, "upload_folder", upload_folder):
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
