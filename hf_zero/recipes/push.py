"""The tool `push`: uploads a model folder to a hub."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

from hf_zero.checkpoint.checks import check_checksums
from hf_zero.checkpoint.manifest import STATE_PATTERNS
from hf_zero.errors import ConfigError, HubError
from hf_zero.recipes.inspection import Inspection
from hf_zero.recipes.loading import saved_folder
from hf_zero.recipes.parser import option
from hf_zero.recipes.report import REPORT_NAME
from hf_zero.trainer.card import card_text, facts_of_folder
from hf_zero.trainer.hub import NOT_PUSHED, hub_errors, links_out_of


# What a run needs to go on, and nobody needs to use the model. As Trainer does, trainer_state.json goes up where the
# folder has it, checkpoints inside it and names that begin with _ do not. Nor do the files of a run that show its
# first row and folders of this machine.
LEFT_OUT = [*NOT_PUSHED, *STATE_PATTERNS, "checkpoint-*", "_*", ".*", REPORT_NAME]
# Weights of an earlier push go in the same commit, but for those of the same names: transformers takes a single file
# before an index.
ENDS = (".safetensors", ".safetensors.index.json", "-?????-of-?????.safetensors")
REPLACED = [f"{name}{end}" for name in ("model", "adapter_model") for end in ENDS]

POSITIONAL = (("folder", "the model folder"),)


@dataclass
class Arguments:
    """Keys of `push`."""

    hub_model_id: str | None = option(None, "Repository: user/name, or a name alone.")
    private: bool = option(False, "Make the repository private if it is created now.")
    revision: str | None = option(None, "Branch; it is created if it does not exist.")
    commit_message: str = option("Upload model", "Commit message.")
    token: str | None = option(None, "Token with write permission. Default: HF_TOKEN, or that of `hf auth login`.")
    checksums: bool = option(False, "Also compare all tensors with their saved checksums.")


def run(folder: str, arguments: Arguments) -> None:
    """Checks the folder, writes a model card if it has none, uploads in one commit, and prints the address. Raises
    [`ConfigError`] where no repository is named, or a file of the folder lies elsewhere."""
    if not arguments.hub_model_id:
        raise ConfigError("hub_model_id: not set; name the repository, for instance --hub_model_id user/name")
    path = saved_folder(folder)
    Inspection(path).check_files()
    if arguments.checksums:
        check_checksums(path)
    _refuse_links(path)
    disable_progress_bars()
    api = HfApi(token=arguments.token)
    subject = f"pushing {folder} to {arguments.hub_model_id}"
    with hub_errors(subject):
        name = _create(api, arguments)
        _write_card(path, name)
        api.upload_folder(
            repo_id=name,
            folder_path=path,
            revision=arguments.revision,
            commit_message=arguments.commit_message,
            ignore_patterns=LEFT_OUT,
            delete_patterns=REPLACED,
        )
    print(f"{constants.ENDPOINT}/{name}" + (f"/tree/{arguments.revision}" if arguments.revision else ""))


def _refuse_links(folder: Path) -> None:
    names = {str(path.relative_to(folder)): path for path in links_out_of(folder)}
    for name in filter_repo_objects(sorted(names), ignore_patterns=LEFT_OUT):
        raise ConfigError(
            f"{names[name]}: leads out of the folder, to {names[name].resolve()}; put the file itself there, or "
            "remove the link"
        )


def _create(api: HfApi, arguments: Arguments) -> str:
    """Creates the repository and the branch if they are missing, and returns the full name."""
    url = api.create_repo(arguments.hub_model_id, private=arguments.private or None, exist_ok=True)
    if arguments.revision and arguments.revision != constants.DEFAULT_REVISION:
        api.create_branch(url.repo_id, branch=arguments.revision, exist_ok=True)
    return url.repo_id


def _write_card(folder: Path, name: str) -> None:
    card = folder / "README.md"
    if card.exists():
        return
    try:
        card.write_text(card_text(facts_of_folder(folder, name.rpartition("/")[2])), encoding="utf-8")
    except OSError as error:
        raise HubError(f"{card}: cannot be written ({error.strerror}); put a model card there") from error
