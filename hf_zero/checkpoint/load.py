"""Weights from a model folder into a sharded model: every rank reads only the ranges that it holds."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.checkpoint.agreement import together
from hf_zero.checkpoint.interfaces import Engine
from hf_zero.checkpoint.open_files import OpenFiles
from hf_zero.checkpoint.tensor_names import SavedTensor, renamed, saved_tensors, shortened
from hf_zero.checkpoint.weight_files import WEIGHTS_NAME, WeightFiles
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class LoadReport:
    """What a load that was not strict left as it was (`missing`) and left in the files (`unexpected`)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(
    engine: Engine,
    folder: str | os.PathLike,
    *,
    strict: bool = True,
    weights_name: str = WEIGHTS_NAME,
    keys: dict[str, str] | None = None,
) -> LoadReport:
    """Loads a folder's safetensors weights into the shards, in place. Collective; fails on all ranks or on none.

    Names, shapes and file sizes are checked before the first value is written. Values are converted to the master's
    dtype on the way. Buffers are read whole on every rank. A tied parameter may be stored under any of its names.

    Args:
        engine ([`Engine`]): the sharded model.
        folder (`str` or `os.PathLike`): holds `model.safetensors`, or several files and their index.
        strict (`bool`): refuse missing and unexpected tensors; otherwise they are reported. Shapes must always agree.
        weights_name (`str`): name of the file, or of the first part of its name when there are several.
        keys (`dict[str, str]`, *optional*): parameter or buffer name to its name in the files, to load only those.

    Returns:
        [`LoadReport`]: both parts empty when strict.

    Raises:
        `CheckpointError`: no such folder, a truncated file, a tensor that is missing, unexpected or of another shape.
    """
    engine.begin_update()
    tensors = saved_tensors(engine.model, engine.param_infos())
    if keys is not None:
        tensors = renamed(tensors, keys)

    def read() -> LoadReport:
        files = WeightFiles.read(folder, weights_name)
        found, report = _match(tensors, files, ignored_pattern(engine.model))
        if strict:
            _refuse_differences(folder, report)
        with OpenFiles(folder, files) as opened:
            for saved, name in found:
                opened.check_shape(name, saved.shape)
            _read_all(engine, opened, found)
        return report

    report = together(engine.comm, f"loading {folder}", read)
    engine.mark_updated()
    return report


def load_pretrained(auto_class: Any, name_or_folder: str | os.PathLike, **kwargs: Any) -> Any:
    """`auto_class.from_pretrained(name_or_folder, **kwargs)`, with the files checked before the model is built.

    Args:
        auto_class (`type`): such as `AutoModelForCausalLM`, or a model class.
        name_or_folder (`str` or `os.PathLike`): a folder, or a name on the Hub, which transformers resolves.
        kwargs: for `from_pretrained`.

    Returns:
        `PreTrainedModel`: the whole model, not yet sharded; on the CPU its weights are mapped from the file and not
        copied, as long as `dtype` is that of the file.

    Raises:
        `CheckpointError`: no such folder, no config or weights in it, a truncated or damaged safetensors file, or a
            Hub name that cannot be resolved.
    """
    from safetensors import SafetensorError

    folder = Path(os.path.expanduser(name_or_folder))
    if folder.is_dir():
        check_pretrained(folder / kwargs.get("subfolder", ""), variant=kwargs.get("variant"))
        name_or_folder = folder
    elif folder.is_absolute() or folder.exists() or str(name_or_folder).startswith(("~", "./", "../")):
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {found}; give the folder of a saved model, or a name on the Hub")
    try:
        return auto_class.from_pretrained(str(name_or_folder), **kwargs)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{name_or_folder}: the model cannot be loaded ({reason}); check the name, or give a local folder"
        ) from error


def check_pretrained(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks that a folder can be loaded from: a config, weights, and safetensors files that are whole.

    Costs a read of the headers. Weights in other formats than safetensors are left to transformers.

    Args:
        folder (`str` or `os.PathLike`): the model.
        variant (`str`, *optional*): such as "fp16", for `model.fp16.safetensors`.

    Raises:
        `CheckpointError`: says what is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: does not exist; give the folder of a saved model")
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(f"{folder}: there is no config.json in it; give the folder of a saved model")
    names = ["adapter_model.safetensors", WEIGHTS_NAME]
    if variant is not None:
        names.append(f"model.{variant}.safetensors")
    present = [name for name in names if any((folder / file).exists() for file in (name, f"{name}.index.json"))]
    for name in present:
        WeightFiles.read(folder, name)
    other_formats = ("*.bin", "*.bin.index.json", "*.safetensors", "*.gguf")
    if not present and not any(any(folder.glob(pattern)) for pattern in other_formats):
        raise CheckpointError(
            f"{folder}: found neither {WEIGHTS_NAME} nor {WEIGHTS_NAME}.index.json; give the folder of a saved model"
        )


def ignored_pattern(model: nn.Module) -> re.Pattern | None:
    """Names that the model's class expects in old files and does without."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns += [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def _match(
    tensors: Sequence[SavedTensor], files: WeightFiles, ignored: re.Pattern | None
) -> tuple[list[tuple[SavedTensor, str]], LoadReport]:
    """Pairs the model's tensors with the files' names, and says what is left on both sides."""
    found, missing, known = [], [], set()
    for saved in tensors:
        names = [name for name in (saved.key, saved.name, *saved.aliases) if name in files.file_of]
        known.update(names)
        if names:
            found.append((saved, names[0]))
        else:
            missing.append(saved.key)
    unexpected = [
        name for name in files.file_of if name not in known and not (ignored is not None and ignored.search(name))
    ]
    return found, LoadReport(tuple(missing), tuple(unexpected))


def _refuse_differences(folder: str | os.PathLike, report: LoadReport) -> None:
    if report.missing or report.unexpected:
        parts = []
        if report.missing:
            parts.append(f"{len(report.missing)} tensors of the model are missing ({shortened(report.missing)})")
        if report.unexpected:
            parts.append(f"{len(report.unexpected)} are not the model's ({shortened(report.unexpected)})")
        raise CheckpointError(f"{folder}: {', '.join(parts)}; give a folder that was saved from this model")


def _read_all(engine: Engine, opened: OpenFiles, found: Sequence[tuple[SavedTensor, str]]) -> None:
    file_name_of = {saved.name: name for saved, name in found if saved.buffer is None}
    for shard in engine.named_shards(resident=True):
        if shard.name in file_name_of:
            opened.read_range(file_name_of[shard.name], shard.start, shard.tensor)
    for saved, name in found:
        if saved.buffer is not None:
            # A buffer that is not contiguous has no flat view: read it apart and copy it in.
            flat = saved.buffer.new_empty(saved.buffer.numel())
            opened.read_range(name, 0, flat)
            saved.buffer.copy_(flat.view(saved.shape))
