"""`zero_checksums.json`: size and CRC-32 of every file that was saved in a folder, and of each tensor of large files.

It is written last, when the files are complete, and ends with the CRC-32 of its own bytes: no entry can change, lack
or be renamed without being noticed. CRC-32 finds what disks, copies and editors do; it does not prove who wrote the
files.

A safetensors file has one checksum for its header, which holds names, shapes and offsets, and one for each tensor: any
number of ranks can check those while they read their own ranges. Other files have one for the whole. Not listed are
what people change (`README.md`) and hidden files.

Files that others add later are in no table. A save does not replace a folder that holds such files.
"""

import itertools
import json
import os
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from hf_zero.checkpoint.files import PIECE_NBYTES, SafetensorsFile
from hf_zero.checkpoint.folders import is_inner_path, parse_json, read_bytes, write_whole
from hf_zero.checkpoint.format import FileLayout
from hf_zero.errors import CheckpointError


TABLE_NAME = "zero_checksums.json"
TABLE_VERSION = 1
WEIGHTS_SUFFIX = ".safetensors"

# What a run needs to go on, and the model does not. An upload leaves it out, all of it.
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

# Nothing reads it, and pushes leave it out.
DISPENSABLE = ("training_args.bin",)

# What a run reads to go on, beside its state. Nobody edits binary files by hand, so those that a subclass adds count.
_READ_NAMES = ("config.json", "adapter_config.json", "trainer_state.json")
_READ_SUFFIXES = (WEIGHTS_SUFFIX, ".index.json", ".bin", ".pt", ".pth", ".pkl")

Checksums = dict[str, dict[str, int]]  # file, to tensor, to the CRC-32 of its bytes

CARD_NAME = "README.md"  # people edit it
_CHANGEABLE = (CARD_NAME, TABLE_NAME)
_SEAL = ',\n "crc32": '
COPY_AGAIN = "copy or download it again, or use another checkpoint"

MANIFEST_NAME = "manifest.json"  # of a run's state, in its folder


@dataclass(frozen=True)
class FileSum:
    """The size and checksums of a file."""

    nbytes: int
    crc32: int  # of all its bytes or, where it has tensors, of its header
    tensors: Mapping[str, int] | None = None  # CRC-32 of each tensor's bytes, for safetensors files

    def entry(self) -> dict:
        """Returns the entry as it stands in the table."""
        of = "crc32" if self.tensors is None else "header_crc32"
        return {"nbytes": self.nbytes, of: self.crc32} | ({} if self.tensors is None else {"tensors": self.tensors})


@dataclass(frozen=True)
class ChecksumTable:
    """The checksums of a folder, by path in it."""

    files: Mapping[str, FileSum] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path, known: Checksums) -> "ChecksumTable":
        """Computes the checksums of a folder's files, without reading tensors whose checksums were taken while they
        were written."""
        names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return cls({name: _sum_of(folder / name, known.get(name)) for name in sorted(names) if is_listed(name)})

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "ChecksumTable | None":
        """Returns the table of a folder; `None` where it has none. Raises [`CheckpointError`] where it has changed
        since it was written."""
        path = Path(folder) / TABLE_NAME
        try:
            content = read_bytes(path, COPY_AGAIN)
        except FileNotFoundError:
            return None
        body, _, _ = content.rpartition(_SEAL.encode())
        if content != _sealed(body):
            raise CheckpointError(
                f"{path}: has changed since it was written, so nothing can be compared with it; {COPY_AGAIN}"
            )
        return _parsed(parse_json(content, path, COPY_AGAIN), path)

    @classmethod
    def covering(cls, folder: str | os.PathLike) -> "ChecksumTable | None":
        """Returns the table of a folder, or its part of the parent folder's table, since adapters have folders of
        their own."""
        folder = Path(folder)
        table = cls.read(folder)
        if table is None and (above := cls.read(folder.absolute().parent)) is not None:
            prefix = f"{folder.absolute().name}/"
            table = cls({name.removeprefix(prefix): s for name, s in above.files.items() if name.startswith(prefix)})
        return table if table is None or table.files else None

    def write(self, folder: Path) -> None:
        """Writes the table into a folder, atomically."""
        content = {"format": TABLE_VERSION, "files": {name: found.entry() for name, found in self.files.items()}}
        body = json.dumps(content, indent=1).removesuffix("\n}").encode()
        write_whole(folder / TABLE_NAME, _sealed(body))

    def replaced(self, new: "ChecksumTable", gone: Iterable[str] = ()) -> "ChecksumTable":
        """Returns a table with the files of another one added, those of the same names replaced, and those in `gone`
        removed."""
        gone = set(gone)
        left = {name: found for name, found in self.files.items() if name not in gone}
        return ChecksumTable(left | dict(new.files))

    @property
    def tensors(self) -> list[tuple[str, str]]:
        """(file, tensor) for every tensor with a checksum, in the order of the files."""
        return [(name, tensor) for name, found in self.files.items() for tensor in found.tensors or ()]

    def check_files(self, folder: str | os.PathLike, *, without: Collection[str] = ()) -> None:
        """Compares the files that a resumed run reads with the table: sizes, headers, and other files whole, but no
        tensors. Raises [`CheckpointError`] with the first file that lacks or differs."""
        for name in self.files:
            if is_read(name) and name not in without:
                self.check_file(folder, name)

    def changed_files(self, folder: str | os.PathLike) -> list[str]:
        """Returns the other files that are missing or changed. Users edit some between runs, such as a chat
        template."""
        changed = []
        for name in self.files:
            try:
                if not is_read(name):
                    self.check_file(folder, name)
            except CheckpointError:
                changed.append(name)
        return changed

    def check_file(self, folder: str | os.PathLike, name: str) -> None:
        """Checks one file as `check_files` does, if it is listed."""
        expected, path = self.files.get(name), Path(folder) / name
        if expected is None:
            return
        found = path.stat().st_size if path.is_file() else None
        if found is None and path.name in DISPENSABLE:
            return
        if found != expected.nbytes:
            raise CheckpointError(
                f"{path}: {'is missing' if found is None else f'has {found} bytes'}, it was saved with "
                f"{expected.nbytes} bytes; {COPY_AGAIN}"
            )
        if expected.tensors is not None:
            self.check_layout(folder, name, FileLayout.read(path))
        elif (crc := _crc_of(path)) != expected.crc32:
            raise CheckpointError(
                f"{path}: has checksum {crc:08x}, it was saved with {expected.crc32:08x}: it has changed since; "
                f"{COPY_AGAIN}"
            )

    def check_tensors(
        self, folder: str | os.PathLike, tensors: Iterable[tuple[str, str]], known: Checksums | None = None
    ) -> None:
        """Compares tensors, each (file, tensor), all of one file together, with their checksums. Files that are
        `known` have been read already; the others are read."""
        for name, units in itertools.groupby(tensors, key=lambda unit: unit[0]):
            path = Path(folder) / name
            if known is not None and name in known:
                for _, tensor in units:
                    self.check_tensor(path, name, tensor, known[name][tensor])
                continue
            with SafetensorsFile.open(path) as opened:
                for _, tensor in units:
                    self.check_tensor(path, name, tensor, opened.checksum(tensor))

    def check_tensor(self, path: Path, name: str, tensor: str, found: int) -> None:
        """Compares the checksum of one tensor, of the file `name` at `path`, with the one that was saved."""
        expected = (self.files[name].tensors or {})[tensor]
        if found != expected:
            raise CheckpointError(
                f"{path}: tensor {tensor!r} has checksum {found:08x}, it was saved with {expected:08x}: the file "
                f"was damaged since; {COPY_AGAIN}"
            )

    def check_layout(self, folder: str | os.PathLike, name: str, layout: FileLayout) -> None:
        """Compares the header of a safetensors file with the one that was saved. A file that is not listed is not
        compared."""
        expected, path = self.files.get(name), Path(folder) / name
        if expected is None or expected.tensors is None:
            return
        if strange := sorted(set(expected.tensors) ^ set(layout.entries)):
            where = "was saved, and is not in the file" if strange[0] in expected.tensors else "is in the file only"
            raise CheckpointError(f"{path}: tensor {strange[0]!r} {where}; {COPY_AGAIN}")
        if expected.crc32 != (found := zlib.crc32(layout.header)):
            raise CheckpointError(
                f"{path}: its header has checksum {found:08x}, it was saved with {expected.crc32:08x}: it has changed "
                f"since; {COPY_AGAIN}"
            )


def is_listed(name: str) -> bool:
    """Whether a file with that path belongs in the folder's table."""
    path = Path(name)
    return path.name not in _CHANGEABLE and not any(part.startswith(".") for part in path.parts)


def is_read(name: str) -> bool:
    """Whether a resumed run reads the file with that path in its folder."""
    base = os.path.basename(name)
    if base in DISPENSABLE:
        return False
    is_state = any(fnmatch(name, pattern) for pattern in STATE_PATTERNS)
    return is_state or base in _READ_NAMES or base.endswith(_READ_SUFFIXES)


def _sum_of(path: Path, tensors: Mapping[str, int] | None) -> FileSum:
    if path.suffix != WEIGHTS_SUFFIX:
        return FileSum(path.stat().st_size, _crc_of(path))
    with SafetensorsFile.open(path) as file:
        if tensors is None:
            tensors = {tensor: file.checksum(tensor) for tensor in file.layout.entries}
        return FileSum(file.layout.nbytes, zlib.crc32(file.layout.header), tensors)


def _crc_of(path: Path) -> int:
    crc = 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(PIECE_NBYTES):
                crc = zlib.crc32(piece, crc)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {COPY_AGAIN}") from error
    return crc


def _sealed(body: bytes) -> bytes:
    return body + f"{_SEAL}{zlib.crc32(body)}\n}}\n".encode()


def _parsed(content: dict, path: Path) -> ChecksumTable:
    """Parses the content of a table, and checks all types, since anybody can compute the checksum over it."""
    if content.get("format") != TABLE_VERSION:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r}, this hf_zero reads {TABLE_VERSION}; use the version that "
            "saved it"
        )
    files = content.get("files")
    if not isinstance(files, dict) or not all(is_inner_path(name) for name in files):
        raise CheckpointError(f"{path}: lists files that are not in its folder; {COPY_AGAIN}")
    return ChecksumTable({name: _file_sum(name, entry, path) for name, entry in files.items()})


def _file_sum(name: str, entry: object, path: Path) -> FileSum:
    entry = entry if isinstance(entry, dict) else {}
    tensors = entry.get("tensors")
    crc = entry.get("crc32" if tensors is None else "header_crc32")
    values = [entry.get("nbytes"), crc, *(tensors.values() if isinstance(tensors, dict) else ())]
    if not (tensors is None or isinstance(tensors, dict)) or not all(type(value) is int for value in values):
        raise CheckpointError(f"{path}: what it says of {name!r} is no size and checksums; {COPY_AGAIN}")
    return FileSum(entry["nbytes"], values[1], tensors)


def refuse_strangers(folder: Path) -> None:
    """Raises [`CheckpointError`] if a folder that a save is to replace holds files that no save has written. A model
    folder without a table, or with one that was changed, is replaced as a whole; a link is replaced by a folder."""
    if not folder.is_dir() or folder.is_symlink():
        return
    try:
        table = ChecksumTable.read(folder)
    except CheckpointError:
        return
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if table is None and any(map(_is_of_model, files)):
        return  # another program's checkpoint, or one that was broken off
    known = {TABLE_NAME} if table is None else {TABLE_NAME, *table.files}
    strangers = [name for name in files if name not in known and is_listed(name)]
    if strangers:
        raise CheckpointError(
            f"{folder}: holds files that hf_zero has not saved ({strangers[0]}), and a save would replace the folder; "
            "move them away, or save to another folder"
        )


def _is_of_model(name: str) -> bool:
    """Whether a folder is that of a model, a checkpoint or its state if it has a file with that path."""
    return (
        name in (*_READ_NAMES, MANIFEST_NAME)
        or name.endswith((WEIGHTS_SUFFIX, ".index.json"))
        or name.startswith("pytorch_model")
    )
