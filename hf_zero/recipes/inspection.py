"""The tool `verify`: checks that a model folder is complete, finite, unchanged since it was saved, and loads."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import WeightFiles, check_pretrained
from hf_zero.checkpoint.manifest import STATE_FOLDER, check_checksums, is_saved_here
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.safetensors import ADAPTER_WEIGHTS_NAME, OpenFiles
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
    weights = cache(partial(Tensors.read, folder, list(_weight_files(folder).layouts)))
    names = [f"{STATE_FOLDER}/{path.name}" for path in sorted((folder / STATE_FOLDER).glob("*.safetensors"))]
    state = cache(partial(Tensors.read, folder, names))
    checks: dict[str, Callable[[], str | None]] = {
        "files": partial(check_files, folder),
        "values": lambda: f"all finite in {weights().check_finite()} tensors",
    }
    if (folder / STATE_FOLDER).is_dir():
        checks["state"] = lambda: f"all finite in {state().check_finite()} tensors, in {len(names)} files"
    checks["checksums"] = lambda: _compare_checksums(folder, weights().checksums | state().checksums)
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


@dataclass
class Tensors:
    """The tensors of safetensors files, which were read once."""

    checksums: dict[tuple[str, str], int]  # zlib.crc32 of the bytes, by (file, tensor)
    nonfinite: dict[Path, list[str]]  # tensors with NaN or infinite values

    @classmethod
    def read(cls, folder: Path, names: list[str]) -> "Tensors":
        """Reads the files sequentially and in pieces. Raises [`CheckpointError`] if one is missing or damaged."""
        found = cls({}, {})
        for name in names:
            with OpenFiles.of(folder / name) as opened:
                for tensor, entry in opened.files.entries.items():
                    crc, count = 0, 0
                    for piece in opened.pieces(tensor):
                        crc = zlib.crc32(piece, crc)
                        count += _count_nonfinite(torch.frombuffer(piece, dtype=entry.dtype))
                    found.checksums[name, tensor] = crc
                    if count:
                        found.nonfinite.setdefault(folder / name, []).append(f"{tensor} ({count} of {entry.numel})")
        return found

    def check_finite(self) -> int:
        """Raises for the first file with NaN or infinite values. Returns the number of tensors."""
        for path, tensors in self.nonfinite.items():
            raise CheckpointError(f"{path}: non-finite values in {shortened(tensors)}; use an earlier checkpoint")
        return len(self.checksums)


def _count_nonfinite(values: Tensor) -> int:
    if not (values.is_floating_point() or values.is_complex()):
        return 0
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)  # torch has no isfinite for 8-bit floats
    return values.numel() - int(torch.isfinite(values).sum())


def _compare_checksums(folder: Path, known: dict[tuple[str, str], int]) -> str | None:
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
