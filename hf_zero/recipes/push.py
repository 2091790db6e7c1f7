"""The tool `push`: uploads a model folder to a hub."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelCardData, constants
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.manifest import STATE_PATTERNS, check_checksums
from hf_zero.errors import ConfigError, HubError
from hf_zero.recipes.inspection import check_files
from hf_zero.recipes.models import saved_folder
from hf_zero.recipes.parser import option
from hf_zero.trainer.hub import NOT_PUSHED, hub_errors


# Files that only a run needs to resume, and that may contain paths of this machine. Like Trainer, it uploads
# trainer_state.json, but no checkpoints and no names that begin with an underscore.
LEFT_OUT = [*NOT_PUSHED, *STATE_PATTERNS, "checkpoint-*", "_*", ".*"]
# Weights of an earlier push, deleted in the same commit: transformers prefers a single file to an index.
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
    [`ConfigError`] if no repository is named, or a link leads out of the folder."""
    if not arguments.hub_model_id:
        raise ConfigError("hub_model_id: not set; name the repository, for instance --hub_model_id user/name")
    path = saved_folder(folder)
    check_files(path)
    if arguments.checksums:
        check_checksums(path)
    # an upload would follow links to files outside the folder
    links = {str(link.relative_to(path)): link for link in path.rglob("*") if link.is_file()}
    links = {name: link for name, link in links.items() if not link.resolve().is_relative_to(path.resolve())}
    for name in filter_repo_objects(sorted(links), ignore_patterns=LEFT_OUT):
        raise ConfigError(
            f"{links[name]}: leads out of the folder, to {links[name].resolve()}; replace the link with the file, or "
            "remove it"
        )
    disable_progress_bars()
    api = HfApi(token=arguments.token)
    with hub_errors(f"pushing {folder} to {arguments.hub_model_id}"):
        repo = api.create_repo(arguments.hub_model_id, private=arguments.private or None, exist_ok=True).repo_id
        if arguments.revision and arguments.revision != constants.DEFAULT_REVISION:
            api.create_branch(repo, branch=arguments.revision, exist_ok=True)
        card = path / "README.md"
        try:
            if not card.exists():
                card.write_text(_card_text(path, repo.rpartition("/")[2]), encoding="utf-8")
        except OSError as error:
            raise HubError(f"{card}: cannot be written ({error.strerror}); put a model card there") from error
        api.upload_folder(
            repo_id=repo,
            folder_path=path,
            revision=arguments.revision,
            commit_message=arguments.commit_message,
            ignore_patterns=LEFT_OUT,
            delete_patterns=REPLACED,
        )
    print(f"{constants.ENDPOINT}/{repo}" + (f"/tree/{arguments.revision}" if arguments.revision else ""))


def _card_text(folder: Path, title: str) -> str:
    adapter = folder / "adapter_config.json"
    base = read_json(adapter).get("base_model_name_or_path") if adapter.exists() else None
    head = ModelCardData(
        library_name="peft" if adapter.exists() else "transformers",
        base_model=base if base and not Path(base).is_absolute() else None,
        tags=["hf_zero"],
    )
    return f"---\n{head.to_yaml()}\n---\n\n# {title}\n\nThis model was trained with hf_zero.\n"
