"""The tool `verify`: checks that a model folder is complete, finite, unchanged since it was saved, and loads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from transformers import AutoTokenizer
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import WeightFiles, check_pretrained
from hf_zero.checkpoint.checks import Scans, check_checksums, check_finite, scan_files
from hf_zero.checkpoint.manifest import STATE_FOLDER, is_saved_here
from hf_zero.checkpoint.safetensors import ADAPTER_WEIGHTS_NAME
from hf_zero.errors import CheckpointError, HfZeroError, size_text
from hf_zero.recipes.models import attach, is_adapter, load_base, load_model, one_line, saved_folder
from hf_zero.recipes.parser import option
from hf_zero.trainer.resumable import check_resumable


POSITIONAL = (("folder", "the model folder"),)
NOTHING_SAVED = "none were saved with this folder, so its values are compared with nothing"


@dataclass
class Arguments:
    """Keys of `verify`."""

    base_model_name_or_path: str | None = option(
        None, "For an adapter: its base model, instead of the one that its config names."
    )


def run(folder: str, arguments: Arguments) -> None:
    """Prints one line per check. Raises [`CheckpointError`] at the end if a check has failed."""
    checks = _checks(saved_folder(folder), arguments.base_model_name_or_path)
    found: dict[str, list[str]] = {"ok": [], "open": [], "wrong": []}
    for name, check in checks.items():
        try:
            with one_line(folder, f"the check of {name} failed"):  # a manifest may contain anything
                said = check()
            result = "open" if said is None else "ok"
        except HfZeroError as error:
            result, said = "wrong", " ".join(str(error).split())
        found[result].append(name)
        print(f"{result:6} {name}: {said or NOTHING_SAVED}", flush=True)
    if found["wrong"]:
        wrong = ", ".join(found["wrong"])
        raise CheckpointError(f"{folder}: {len(found['wrong'])} of {len(checks)} checks failed ({wrong})")
    not_made = f", {len(found['open'])} could not be made ({', '.join(found['open'])})" if found["open"] else ""
    print(f"{folder}: {'' if not_made else 'all '}{len(found['ok'])} checks passed{not_made}")


def _checks(folder: Path, base: str | None) -> dict[str, Callable[[], str | None]]:
    """Returns the checks that apply to a folder, in order. Each returns its result, `None` if the folder has no data
    for it, or raises. Raises [`CheckpointError`] if the folder has no config or no weights in safetensors files."""
    weights = cache(partial(scan_files, folder, list(_weight_files(folder).layouts)))
    names = [f"{STATE_FOLDER}/{path.name}" for path in sorted((folder / STATE_FOLDER).glob("*.safetensors"))]
    state = cache(partial(scan_files, folder, names))
    checks: dict[str, Callable[[], str | None]] = {
        "files": partial(check_files, folder),
        "values": lambda: f"all finite in {check_finite(folder, weights())} tensors",
    }
    if (folder / STATE_FOLDER).is_dir():
        checks["state"] = lambda: f"all finite in {check_finite(folder, state())} tensors, in {len(names)} files"
    checks["checksums"] = lambda: _compare_checksums(folder, {**weights(), **state()})
    return {**checks, "loads": partial(_load, folder, base)}


def _weight_files(folder: Path) -> WeightFiles:
    check_pretrained(folder)
    return WeightFiles.read(folder, *([ADAPTER_WEIGHTS_NAME] if is_adapter(folder) else []))


def check_files(folder: Path) -> str:
    """Checks that the files of a model folder are there, and that the headers agree with the index. Returns their
    numbers."""
    files = _weight_files(folder)
    if (folder / TRAINER_STATE_NAME).is_file() and is_saved_here(folder):
        check_resumable(folder)
    nbytes = sum(layout.data_nbytes for layout in files.layouts.values())
    listed = {tensor for layout in files.layouts.values() for tensor in layout.entries}
    if strange := sorted(listed - set(files.file_of)):
        raise CheckpointError(
            f"{folder / files.index_name}: tensor {strange[0]!r} is in a file, but not in the index; "
            "copy or download the folder again"
        )
    return f"{len(files.file_of)} tensors in {len(files.layouts)} files, {size_text(nbytes)}"


def _compare_checksums(folder: Path, scans: Scans) -> str | None:
    known = {file: {name: scan.crc32 for name, scan in found.items()} for file, found in scans.items()}
    found = check_checksums(folder, known)
    if found is None:
        return None
    return f"{len(found.tensors)} tensors and {len(found.files)} files as they were saved"


def _load(folder: Path, base: str | None) -> str:
    if is_adapter(folder):
        model, source = load_base(folder, base)
        kind = attach(model, folder).active_peft_config.peft_type.value
        said = f"{kind} on {type(model).__name__} of {source}"
    else:
        said = f"{type(load_model(folder)).__name__}, nothing missing, unexpected or of another shape"
    if (folder / "tokenizer_config.json").is_file():
        with one_line(folder, "loading the tokenizer failed"):
            AutoTokenizer.from_pretrained(folder)
    return said
