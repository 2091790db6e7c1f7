"""The tool `verify`: checks that a model folder is complete, finite, unchanged since it was saved, and loads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoTokenizer
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import WeightFiles, check_pretrained
from hf_zero.checkpoint.checks import Scans, check_checksums, check_finite, scan_files
from hf_zero.checkpoint.format import ADAPTER_WEIGHTS_NAME
from hf_zero.checkpoint.manifest import STATE_FOLDER, is_saved_here
from hf_zero.errors import CheckpointError, HfZeroError, size_text
from hf_zero.recipes.models import attach, is_adapter, load_base, load_model, one_line, quiet, saved_folder
from hf_zero.recipes.parser import option
from hf_zero.trainer.resumable import check_resumable


POSITIONAL = (("folder", "the model folder"),)


@dataclass
class Arguments:
    """Keys of `verify`."""

    base_model_name_or_path: str | None = option(
        None, "For an adapter: its base model, instead of the one that its config names."
    )


class Open(str):
    """The result of a check for which the folder has no data."""


def run(folder: str, arguments: Arguments) -> None:
    """Prints one line per check. Raises [`CheckpointError`] at the end if a check has failed."""
    checks = Inspection(saved_folder(folder), arguments.base_model_name_or_path).checks()
    found: dict[str, list[str]] = {"ok": [], "open": [], "wrong": []}
    for name, check in checks.items():
        try:
            with one_line(folder, f"the check of {name}"):  # a manifest may contain anything
                said = check()
            result = "open" if isinstance(said, Open) else "ok"
        except HfZeroError as error:
            result, said = "wrong", " ".join(str(error).split())
        found[result].append(name)
        print(f"{result:6} {name}: {said}", flush=True)
    if found["wrong"]:
        wrong = ", ".join(found["wrong"])
        raise CheckpointError(f"{folder}: {len(found['wrong'])} of {len(checks)} checks failed ({wrong})")
    not_made = f", {len(found['open'])} could not be made ({', '.join(found['open'])})" if found["open"] else ""
    print(f"{folder}: {'' if not_made else 'all '}{len(found['ok'])} checks passed{not_made}")


class Inspection:
    """The checks of one folder. Raises [`CheckpointError`] if it has no config or no weights in safetensors files."""

    def __init__(self, folder: Path, base: str | None = None):
        self.folder, self.base, self.is_adapter = folder, base, is_adapter(folder)
        check_pretrained(folder)
        self.files = WeightFiles.read(folder, *([ADAPTER_WEIGHTS_NAME] if self.is_adapter else []))

    def checks(self) -> dict[str, Callable[[], str]]:
        """Returns the checks that apply to this folder, in order. Each returns its result, or raises."""
        checks = {"files": self.check_files, "values": self.check_values}
        if (self.folder / STATE_FOLDER).is_dir():
            checks["state"] = self.check_state
        checks["checksums"] = self.check_checksums
        return {**checks, "loads": self.check_loads}

    @cached_property
    def _weights(self) -> Scans:
        return scan_files(self.folder, list(self.files.layouts))

    @cached_property
    def _state(self) -> Scans:
        paths = sorted((self.folder / STATE_FOLDER).glob("*.safetensors"))
        return scan_files(self.folder, [f"{STATE_FOLDER}/{path.name}" for path in paths])

    def check_files(self) -> str:
        if (self.folder / TRAINER_STATE_NAME).is_file() and is_saved_here(self.folder):
            check_resumable(self.folder)
        nbytes = sum(layout.data_nbytes for layout in self.files.layouts.values())
        listed = {tensor for layout in self.files.layouts.values() for tensor in layout.entries}
        if strange := sorted(listed - set(self.files.file_of)):
            raise CheckpointError(
                f"{self.folder / self.files.index_name}: tensor {strange[0]!r} is in a file, but not in the index; "
                "copy or download the folder again"
            )
        return f"{len(self.files.file_of)} tensors in {len(self.files.layouts)} files, {size_text(nbytes)}"

    def check_values(self) -> str:
        return f"all finite in {check_finite(self.folder, self._weights)} tensors"

    def check_state(self) -> str:
        return f"all finite in {check_finite(self.folder, self._state)} tensors, in {len(self._state)} files"

    def check_checksums(self) -> str:
        scans = {**self._weights, **self._state}
        known = {file: {name: scan.crc32 for name, scan in found.items()} for file, found in scans.items()}
        found = check_checksums(self.folder, known)
        if found is None:
            return Open("none were saved with this folder, so its values are compared with nothing")
        return f"{len(found.tensors)} tensors and {len(found.files)} files as they were saved"

    def check_loads(self) -> str:
        if self.is_adapter:
            model, source = load_base(self.folder, self.base)
            kind = attach(model, self.folder).active_peft_config.peft_type.value
            said = f"{kind} on {type(model).__name__} of {source}"
        else:
            said = f"{type(load_model(self.folder)).__name__}, nothing missing, unexpected or of another shape"
        if (self.folder / "tokenizer_config.json").is_file():
            with one_line(self.folder, "loading the tokenizer"), quiet():
                AutoTokenizer.from_pretrained(self.folder)
        return said
