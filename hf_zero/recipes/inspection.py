"""The tool `verify`: checks that a model folder is complete, finite, unchanged since it was saved, and loads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import WeightFiles, check_pretrained
from hf_zero.checkpoint.checks import Scans, check_checksums, check_finite, scan_files
from hf_zero.checkpoint.format import ADAPTER_WEIGHTS_NAME
from hf_zero.checkpoint.manifest import STATE_FOLDER, is_saved_here
from hf_zero.errors import CheckpointError, HfZeroError, size_text
from hf_zero.recipes.loading import (
    attach,
    is_adapter,
    load_base,
    load_model,
    one_line,
    quiet,
    saved_folder,
)
from hf_zero.recipes.parser import option
from hf_zero.trainer.resumable import check_resumable


POSITIONAL = (("folder", "the model folder"),)

OK, WRONG, OPEN = "ok", "wrong", "open"


@dataclass
class Arguments:
    """Keys of `verify`."""

    base_model_name_or_path: str | None = option(
        None, "For an adapter: its base model, instead of the one that its config names."
    )


def run(folder: str, arguments: Arguments) -> None:
    """Prints one line per check. Raises [`CheckpointError`] at the end, where some check failed."""
    inspection = Inspection(saved_folder(folder), arguments.base_model_name_or_path)
    checks = inspection.checks()
    results = {name: _result(folder, name, check) for name, check in checks.items()}
    failed, lacking = ([name for name, found in results.items() if found == result] for result in (WRONG, OPEN))
    if failed:
        raise CheckpointError(f"{folder}: {len(failed)} of {len(checks)} checks failed ({', '.join(failed)})")
    said = f"all {len(checks)} checks passed"
    if lacking:
        passed = len(checks) - len(lacking)
        said = f"{passed} checks passed, {len(lacking)} could not be made ({', '.join(lacking)})"
    print(f"{folder}: {said}")


class Lacking(str):
    """The result of a check that the folder has no data for."""


def _result(folder: str, name: str, check: Callable[[], str]) -> str:
    try:
        with one_line(folder, f"the check of {name}"):  # a manifest may hold anything
            said = check()
        result = OPEN if isinstance(said, Lacking) else OK
    except HfZeroError as error:
        result, said = WRONG, " ".join(str(error).split())
    print(f"{result:6} {name}: {said}", flush=True)
    return result


class Inspection:
    """The checks of one folder. Every file is read once, by the first check that needs it. Raises [`CheckpointError`]
    where there is no config, or are no weights in safetensors files."""

    def __init__(self, folder: Path, base: str | None = None):
        self.folder = folder
        self.base = base
        self.is_adapter = is_adapter(folder)
        check_pretrained(folder)
        self.files = WeightFiles.read(folder, *([ADAPTER_WEIGHTS_NAME] if self.is_adapter else []))
        self._weights: Scans | None = None  # until the first check that reads values
        self._state: Scans = {}  # until the state is checked

    def checks(self) -> dict[str, Callable[[], str]]:
        """The checks that apply to this folder, in order; each returns what it found, or raises."""
        checks = {"files": self.check_files, "values": self.check_values}
        if (self.folder / STATE_FOLDER).is_dir():
            checks["state"] = self.check_state
        checks["checksums"] = self.check_checksums
        return {**checks, "loads": self.check_loads}

    def check_files(self) -> str:
        if (self.folder / TRAINER_STATE_NAME).is_file() and is_saved_here(self.folder):
            check_resumable(self.folder)  # what a run that goes on from it checks, too
        nbytes = sum(layout.data_nbytes for layout in self.files.layouts.values())
        listed = {tensor for layout in self.files.layouts.values() for tensor in layout.entries}
        if strange := sorted(listed - set(self.files.file_of)):
            raise CheckpointError(
                f"{self.folder / self.files.index_name}: tensor {strange[0]!r} is in a file, and not in the index; "
                "copy or download the folder again"
            )
        return f"{len(self.files.file_of)} tensors in {len(self.files.layouts)} files, {size_text(nbytes)}"

    def check_values(self) -> str:
        return f"all finite in {check_finite(self.folder, self._scanned())} tensors"

    def check_state(self) -> str:
        names = [f"{STATE_FOLDER}/{path.name}" for path in sorted((self.folder / STATE_FOLDER).glob("*.safetensors"))]
        self._state = scan_files(self.folder, names)
        count = check_finite(self.folder, self._state)
        return f"all finite in {count} tensors, in {len(names)} files"

    def check_checksums(self) -> str:
        scans = {**self._scanned(), **self._state}
        known = {file: {name: scan.crc32 for name, scan in found.items()} for file, found in scans.items()}
        found = check_checksums(self.folder, known)
        if found is None:
            return Lacking("none were saved with this folder, so its values are compared with nothing")
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

    def _scanned(self) -> Scans:
        if self._weights is None:
            self._weights = scan_files(self.folder, list(self.files.layouts))
        return self._weights
