"""The safetensors files of one folder: one file, or several and the index that says which tensor lies where."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.checkpoint.format import FileLayout, TensorEntry, is_file_name, read_json
from hf_zero.errors import CheckpointError, ConfigError, MissingCheckpointError


WEIGHTS_NAME = "model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"  # of PEFT
_NBYTES_OF_UNIT = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a folder, and which tensor lies in which.

    Args:
        index_name (`str`, *optional*): name of the index beside several files; `None` for a single one.
    """

    layouts: Mapping[str, FileLayout]
    file_of: Mapping[str, str]
    index_name: str | None

    @classmethod
    def of(cls, layouts: Mapping[str, FileLayout], index_name: str | None = None) -> "WeightFiles":
        """Makes the weight files of these layouts. Raises [`CheckpointError`] where two of them hold tensors of one
        name."""
        file_of: dict[str, str] = {}
        for name, layout in layouts.items():
            for tensor in layout.entries:
                if tensor in file_of:
                    raise CheckpointError(
                        f"tensor {tensor!r} is both in {file_of[tensor]} and in {name}; give every tensor its own name"
                    )
                file_of[tensor] = name
        return cls(layouts, file_of, index_name)

    @classmethod
    def plan(
        cls,
        entries: Iterable[TensorEntry],
        *,
        max_shard_size: int | str = "50GB",
        weights_name: str = WEIGHTS_NAME,
    ) -> "WeightFiles":
        """Splits tensors over files exactly as `PreTrainedModel.save_pretrained` does.

        Args:
            entries (`Iterable[TensorEntry]`): in the order of the state dict; they fill the files in turn.
            max_shard_size (`int` or `str`): bytes of tensors in a file, such as `"5GB"`; a larger tensor gets its own.
            weights_name (`str`): the name of a single file; several are named after it.
        """
        shards = _split(entries, _parse_nbytes(max_shard_size))
        stem = weights_name.removesuffix(".safetensors")
        if len(shards) == 1:
            names = [weights_name]
        else:
            names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        layouts = {name: FileLayout.build(shard) for name, shard in zip(names, shards, strict=True)}
        return cls.of(layouts, _index_name(weights_name) if len(shards) > 1 else None)

    @classmethod
    def read(cls, folder: str | os.PathLike, weights_name: str = WEIGHTS_NAME) -> "WeightFiles":
        """Finds the weights of a folder and checks every header, and the index where there is one.

        Raises:
            `CheckpointError`: no such folder, no weights in it, a damaged file, or an index that disagrees with them.
        """
        folder = Path(folder)
        index_name = _index_name(weights_name)
        if not folder.is_dir():
            raise MissingCheckpointError(f"{folder}: there is no such folder; check the path")
        if (folder / weights_name).exists():
            return cls.of({weights_name: FileLayout.read(folder / weights_name)})
        if not (folder / index_name).exists():
            raise MissingCheckpointError(
                f"{folder}: found neither {weights_name} nor {index_name}; give the folder of a saved model"
            )
        weight_map = _read_weight_map(folder / index_name)
        layouts = {name: FileLayout.read(folder / name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in layouts[name].entries:
                raise CheckpointError(
                    f"{folder / index_name}: tensor {tensor!r} is said to be in {name}, which does not hold it; "
                    "copy or download the folder again"
                )
        return cls(layouts, weight_map, index_name)

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())

    def entry(self, tensor: str) -> TensorEntry:
        return self.layouts[self.file_of[tensor]].entries[tensor]

    def index_text(self, num_parameters: int) -> str:
        """Returns the content of the index file, as transformers writes it. Of tied parameters the elements count
        once."""
        total_nbytes = sum(layout.data_nbytes for layout in self.layouts.values())
        index = {
            "metadata": {"total_parameters": num_parameters, "total_size": total_nbytes},
            "weight_map": dict(self.file_of),
        }
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


def is_weight_file(name: str, weights_name: str = WEIGHTS_NAME) -> bool:
    """Whether a file of that name would take part in a model saved as `weights_name`, whole or in parts."""
    stem = re.escape(weights_name.removesuffix(".safetensors"))
    return (
        name in (weights_name, _index_name(weights_name))
        or re.fullmatch(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors", name) is not None
    )


def _index_name(weights_name: str) -> str:
    return f"{weights_name}.index.json"


def _split(entries: Iterable[TensorEntry], max_nbytes: int) -> Sequence[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = []
    current: list[TensorEntry] = []
    current_nbytes = 0
    for entry in entries:
        if entry.nbytes > max_nbytes:
            shards.append([entry])
            continue
        if current and current_nbytes + entry.nbytes > max_nbytes:
            shards.append(current)
            current, current_nbytes = [], 0
        current.append(entry)
        current_nbytes += entry.nbytes
    if current or not shards:
        shards.append(current)
    return shards


def _parse_nbytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    number, unit = size.strip()[:-2], size.strip()[-2:].upper()
    try:
        return int(float(number) * _NBYTES_OF_UNIT[unit])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"max_shard_size {size!r} is not a size; give bytes as a number, or a text such as '5GB' "
            f"({', '.join(_NBYTES_OF_UNIT)})"
        ) from error


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path, "copy or download it again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(is_file_name, weight_map.values())):
        raise CheckpointError(f"{path}: the index does not map tensors to files beside it; copy or download it again")
    return weight_map
