"""`zero_manifest.json`: size and CRC-32 of every file of a saved folder and, for a checkpoint, the record of the run.

It is written last and ends with the CRC-32 of its own bytes. A folder is complete if and only if its manifest exists
and matches the files. CRC-32 detects accidental changes; it does not authenticate the files.

A safetensors file has one checksum for its header (names, shapes and offsets) and one for each tensor, so that any
number of ranks can verify tensors while they read their own ranges. Other files have one checksum. The manifest does
not list model cards, hidden files, and files that are added later.

`check_checkpoint` compares all files with the manifest, except the values of tensors, which are verified while they
are loaded. `check_checksums` compares everything. `check_pretrained` checks a model of any program.
"""

import contextlib
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import torch

from hf_zero.checkpoint.folders import read_json, write_whole
from hf_zero.checkpoint.safetensors import ADAPTER_WEIGHTS_NAME, PIECE_NBYTES, WEIGHTS_NAME, OpenFiles, WeightFiles
from hf_zero.errors import CheckpointError, MissingCheckpointError


MANIFEST_NAME = "zero_manifest.json"
FORMAT_VERSION = 4
STATE_FOLDER = "zero"
OPTIMIZER_NAME, MASTER_NAME = f"{STATE_FOLDER}/optimizer.safetensors", f"{STATE_FOLDER}/master.safetensors"
CARD_NAME = "README.md"  # not listed: users edit it

# Files that only a resumed run needs. Uploads exclude all of them.
STATE_PATTERNS = (
    "zero/*",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    # of accelerate
    "scheduler*.bin",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
)
# May be missing: nothing reads it, and uploads exclude it.
DISPENSABLE = ("training_args.bin",)

WEIGHTS_SUFFIX = ".safetensors"
_CONFIG_NAMES = ("config.json", "adapter_config.json")
TAKE_ANOTHER = "resume from another checkpoint"
COPY_AGAIN = "copy or download it again, or use another checkpoint"

_SEAL = ',\n "crc32": '

Checksums = dict[str, dict[str, int]]  # CRC-32 by file and tensor


@dataclass(frozen=True)
class FileSum:
    """The size and checksums of a file."""

    nbytes: int
    crc32: int  # of the file; for safetensors files, of the header
    tensors: Mapping[str, int] | None = None  # CRC-32 of each tensor in a safetensors file

    @classmethod
    def of(cls, path: Path, tensors: Mapping[str, int] | None) -> "FileSum":
        """Computes the checksums of a file. Checksums of tensors may be passed."""
        if path.suffix != WEIGHTS_SUFFIX:
            return cls(path.stat().st_size, _crc_of(path))
        with OpenFiles.of(path) as opened:
            if tensors is None:
                tensors = {tensor: opened.checksum(tensor) for tensor in opened.files.file_of}
            layout = opened.files.layouts[path.name]
            return cls(layout.nbytes, zlib.crc32(layout.header), tensors)

    @classmethod
    def parsed(cls, entry: dict) -> "FileSum":
        if "tensors" not in entry:
            return cls(int(entry["nbytes"]), int(entry["crc32"]))
        tensors = {name: int(crc) for name, crc in entry["tensors"].items()}
        return cls(int(entry["nbytes"]), int(entry["header_crc32"]), tensors)

    def entry(self) -> dict:
        """Returns the entry of the manifest."""
        of = "crc32" if self.tensors is None else "header_crc32"
        return {"nbytes": self.nbytes, of: self.crc32} | ({} if self.tensors is None else {"tensors": self.tensors})


@dataclass(frozen=True)
class SavedRun:
    """The record of a run whose optimizer state was saved."""

    stage: int  # informational: any stage can load
    num_ranks: int  # informational: any number of ranks can load
    weight_dtypes: list[str]  # dtypes of the saved weights
    groups: list[dict]  # the optimizer's hyperparameters and parameter names
    scalars: dict[str, dict[str, float]]  # by parameter, the numbers of its state, such as Adam's "step"
    step: int | None = None  # optimizer steps of the run
    loss: float | None = None  # of the last step, mean over the ranks
    grad_norm: float | None = None  # of the last step, before clipping
    extra: dict = field(default_factory=dict)  # JSON values of the caller

    def check(self) -> None:
        """Raises [`CheckpointError`] for a hyperparameter or extra value that JSON does not support."""
        try:
            json.dumps(asdict(self))
        except TypeError as error:
            raise CheckpointError(
                f"{MANIFEST_NAME}: a hyperparameter or extra value cannot be written ({error}); "
                "use only numbers, strings, lists and dicts"
            ) from error


@dataclass(frozen=True)
class Manifest:
    """The record of a saved folder. File names are relative paths."""

    files: Mapping[str, FileSum]
    run: SavedRun | None = None  # None for a model without optimizer state

    @classmethod
    def of_folder(cls, folder: Path, known: Checksums | None = None, run: SavedRun | None = None) -> "Manifest":
        """Computes the checksums of a folder's files. Does not read tensors whose checksums are `known` because they
        were computed during the write."""
        names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        listed = [name for name in sorted(names) if is_listed(name)]
        return cls({name: FileSum.of(folder / name, (known or {}).get(name)) for name in listed}, run)

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Manifest | None":
        """Reads the manifest of a folder. Returns `None` for a model of another program. Raises [`CheckpointError`] if
        the manifest is damaged, or is missing although the folder has saved state."""
        folder = Path(folder)
        content = _read_sealed(folder / MANIFEST_NAME)
        if content is None and (folder / STATE_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder / MANIFEST_NAME}: not found: the checkpoint is incomplete; {TAKE_ANOTHER}, or start a new "
                "run from its weights"
            )
        if content is None:
            return None
        try:
            files = {name: FileSum.parsed(entry) for name, entry in content["files"].items()}
            return cls(files, content["run"] and SavedRun(**content["run"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / MANIFEST_NAME}: cannot be parsed ({type(error).__name__}: {error}); {COPY_AGAIN}"
            ) from error

    def write(self, folder: Path) -> None:
        """Writes the manifest atomically."""
        content = {
            "format": FORMAT_VERSION,
            "versions": {"hf_zero": sys.modules["hf_zero"].__version__, "torch": str(torch.__version__)},
            "run": self.run and asdict(self.run),
            "files": {name: found.entry() for name, found in self.files.items()},
        }
        write_whole(folder / MANIFEST_NAME, sealed(json.dumps(content, indent=1).removesuffix("\n}").encode()))

    @cached_property
    def tensors(self) -> list[tuple[str, str]]:
        """The (file, tensor) pairs of all tensors with a checksum, in the order of the files."""
        return [(name, tensor) for name, found in self.files.items() for tensor in found.tensors or ()]

    def check_files(self, folder: str | os.PathLike) -> None:
        """Compares the files of a folder with the manifest, except the values of tensors. Raises [`CheckpointError`]
        for the first missing or changed file."""
        for name in self.files:
            self.check_file(folder, name)

    def check_file(self, folder: str | os.PathLike, name: str) -> None:
        """Compares one file, if it is listed: its size, and its header or, for a file without tensors, its content."""
        expected, path = self.files.get(name), Path(folder) / name
        found = path.stat().st_size if path.is_file() else None
        if expected is None or (found is None and path.name in DISPENSABLE):
            return
        if found != expected.nbytes:
            raise CheckpointError(
                f"{path}: {'is missing' if found is None else f'has {found} bytes'}, but was saved with "
                f"{expected.nbytes} bytes; {COPY_AGAIN}"
            )
        crc, part = FileSum.of(path, expected.tensors).crc32, "" if expected.tensors is None else "its header "
        if crc != expected.crc32:
            raise CheckpointError(
                f"{path}: {part}has checksum {crc:08x}, but was saved with {expected.crc32:08x}, so it has changed; "
                f"{COPY_AGAIN}"
            )

    def check_tensors(self, folder: str | os.PathLike, tensors: Iterable[tuple[str, str]]) -> None:
        """Reads (file, tensor) pairs, grouped by file, and compares them with their checksums."""
        for name, pairs in itertools.groupby(tensors, key=lambda pair: pair[0]):
            with OpenFiles.of(Path(folder) / name) as opened:
                for _, tensor in pairs:
                    self.check_tensor(folder, name, tensor, opened.checksum(tensor))

    def check_tensor(self, folder: str | os.PathLike, name: str, tensor: str, found: int) -> None:
        """Compares the checksum of a tensor in the file `name`, if it is listed."""
        listed = self.files.get(name)
        expected = (listed.tensors or {}).get(tensor) if listed is not None else None
        if expected not in (None, found):
            raise CheckpointError(
                f"{Path(folder) / name}: tensor {tensor!r} has checksum {found:08x}, but was saved with "
                f"{expected:08x}, so the file is damaged; {COPY_AGAIN}"
            )


def is_saved_here(folder: str | os.PathLike) -> bool:
    """Returns whether a folder has a manifest, without reading it."""
    return (Path(folder) / MANIFEST_NAME).exists()


def run_of(folder: str | os.PathLike) -> SavedRun | None:
    """Returns the record of the run that saved a folder, or `None` for a model without optimizer state."""
    manifest = Manifest.read(folder)
    return None if manifest is None else manifest.run


def is_listed(name: str) -> bool:
    """Returns whether a manifest lists a file with this path."""
    path = Path(name)
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not (is_hidden or path.name == CARD_NAME or name == MANIFEST_NAME)


def check_checkpoint(folder: str | os.PathLike) -> Manifest | None:
    """Checks that a checkpoint is complete and unchanged, except the values of tensors. Returns its manifest. For a
    folder of another program, checks headers and configs, and returns `None`."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_files(folder)
    else:
        check_weights(folder)
        _check_configs(folder)
    return manifest


def check_checksums(folder: str | os.PathLike, known: Mapping[tuple[str, str], int] = {}) -> Manifest | None:
    """Compares every file and tensor of a folder with its manifest. The files of the run's state may be missing if all
    of them are, as in a folder that was uploaded. `known` are checksums of tensors that were already read, by (file,
    tensor).

    Returns the manifest of the compared files, or `None` for a folder without a manifest. Raises [`CheckpointError`]
    if a file or tensor is missing or differs."""
    folder = Path(folder)
    manifest = Manifest.read(folder)
    if manifest is None:
        return None
    state = [name for name in manifest.files if any(fnmatch(name, pattern) for pattern in STATE_PATTERNS)]
    if not any((folder / name).exists() for name in (STATE_FOLDER, *state)):
        manifest = Manifest({name: found for name, found in manifest.files.items() if name not in state})
    manifest.check_files(folder)
    for (name, tensor), crc in known.items():
        manifest.check_tensor(folder, name, tensor, crc)
    manifest.check_tensors(folder, [each for each in manifest.tensors if each not in known])
    return manifest


def check_pretrained(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks that a model can be loaded from a folder: it has a config, weights, and complete safetensors files, also
    of a `variant` ("fp16" for `model.fp16.safetensors`). Reads only the headers. Does not check weights in other
    formats."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: does not exist; pass the folder of a saved model")
    if not any((folder / name).exists() for name in _CONFIG_NAMES):
        raise CheckpointError(f"{folder}: has no config.json; pass the folder of a saved model")
    _check_configs(folder)
    check_weights(folder, variant=variant)


def _check_configs(folder: str | os.PathLike) -> None:
    for name in _CONFIG_NAMES:
        with contextlib.suppress(FileNotFoundError):
            read_json(Path(folder) / name, "copy or download it again")


def check_weights(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks weights like `check_pretrained`, also of a model without a config."""
    folder = Path(folder)
    names = [ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME] + ([] if variant is None else [f"model.{variant}.safetensors"])
    present = [name for name in names if any((folder / file).exists() for file in (name, f"{name}.index.json"))]
    for name in present:
        WeightFiles.read(folder, name)
    if not present and not any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.bin.index.json", "*.gguf")):
        raise MissingCheckpointError(
            f"{folder}: found neither {WEIGHTS_NAME} nor {WEIGHTS_NAME}.index.json; pass the folder of a saved model"
        )


def refuse_strangers(folder: Path) -> None:
    """Raises [`CheckpointError`] if a save would replace a folder with files that hf_zero has not written. Models and
    checkpoints without a valid manifest, and symbolic links, may be replaced."""
    if not folder.is_dir() or folder.is_symlink():
        return
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    marks = ("config.json", "adapter_config.json", "trainer_state.json")
    if manifest is None and any(name in marks or name.endswith((WEIGHTS_SUFFIX, ".bin")) for name in names):
        return  # another program's checkpoint
    known = () if manifest is None else manifest.files
    strangers = [name for name in names if name not in known and is_listed(name)]
    if strangers:
        raise CheckpointError(
            f"{folder}: a save would replace this folder, which has files not saved by hf_zero ({strangers[0]}); "
            "move them, or save to another folder"
        )


def sealed(body: bytes) -> bytes:
    """Completes the beginning of a JSON object with the CRC-32 of its bytes and the closing brace."""
    return body + f"{_SEAL}{zlib.crc32(body)}\n}}\n".encode()


def _read_sealed(path: Path) -> dict | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {COPY_AGAIN}") from error
    body, _, _ = content.rpartition(_SEAL.encode())
    if content != sealed(body):
        raise CheckpointError(
            f"{path}: has changed since it was written, so the files cannot be verified; {COPY_AGAIN}"
        )
    found = read_json(path, COPY_AGAIN)
    if found.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: has format {found.get('format')!r}, but this hf_zero version reads {FORMAT_VERSION}; use the "
            "version that saved it"
        )
    return found


def _crc_of(path: Path) -> int:
    crc = 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(PIECE_NBYTES):
                crc = zlib.crc32(piece, crc)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {COPY_AGAIN}") from error
    return crc
