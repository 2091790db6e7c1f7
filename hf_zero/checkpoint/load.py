"""Loading of weights from a model folder into a sharded model: every rank reads only its own ranges."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hf_zero.checkpoint.conversion import Origins, origins_of
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.names import SavedTensor, renamed, saved_tensors, shortened
from hf_zero.checkpoint.safetensors import WEIGHTS_NAME, OpenFiles, Ranges, WeightFiles, crc_of_whole
from hf_zero.comm import Comm
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.compat import is_pretrained
from hf_zero.engine import Sharded, ZeroEngine, require_engine
from hf_zero.errors import CheckpointError


def load_weights(
    model: Sharded,
    folder: str | os.PathLike,
    *,
    weights_name: str = WEIGHTS_NAME,
    keys: Mapping[str, str | Sequence[str]] | None = None,
) -> None:
    """Loads safetensors weights from a folder into the shards, in place. A collective that fails on all ranks or none.

    The tensors may have the names and shapes of the model, or any others that `from_pretrained` accepts: those of
    published checkpoints or older versions, with or without the prefix of the base model. Names, shapes and file sizes
    are checked before the first value is written. Values are converted to the dtype of the master weights. Every rank
    reads the full buffers. A tied parameter may be stored under any of its names.

    Args:
        model (`nn.Module` or [`ShardedModel`]): The sharded model.
        folder (`str` or `os.PathLike`): A folder with `model.safetensors`, or several files and their index.
        weights_name (`str`): Name of the file. The names of several files are derived from it.
        keys (`Mapping[str, str | Sequence[str]]`, *optional*): Parameters and buffers to load, with the name in the
            files, or several names of which at least one is in the files. By default, all are loaded.

    Raises:
        `CheckpointError`: If the folder does not exist, a file is truncated, or a tensor is missing, unexpected or of
            another shape.
    """
    engine = require_engine(model)
    engine.begin_update()
    engine.evict_all()
    tensors = saved_tensors(engine.model, engine.param_infos())
    tensors = tensors if keys is None else renamed(tensors, keys)

    def read() -> tuple[Origins, OpenFiles, Manifest]:
        files, manifest = _recorded_files(folder, weights_name)
        converts = keys is None and is_pretrained(engine.model)
        origins = origins_of(tensors, engine.model if converts else None, files.entries)
        _refuse_differences(folder, origins, ignored_pattern(engine.model))
        with OpenFiles(folder, files) as opened:
            _load_grown_buffers(engine.model, opened, tensors, origins)
            begin_load(engine, origins.of, folder)
            _read_all(engine, opened, tensors, origins)
        return origins, opened, manifest

    origins, opened, manifest = run_on_all_ranks(engine.comm, f"loading {folder}", read)
    check_ranges(engine.comm, opened, manifest)
    end_load(engine, origins.of)


def begin_load(engine: ZeroEngine, names: Iterable[str], folder: str | os.PathLike) -> None:
    """Marks these values as inconsistent until `end_load`, so that saving is refused if the load fails halfway."""
    engine.torn.update(dict.fromkeys(names, f"loading the weights of {folder}"))


def end_load(engine: ZeroEngine, names: Iterable[str]) -> None:
    """Updates the compute copies, and marks these values as consistent. All ranks must call it, when all have read."""
    engine.mark_updated()
    for name in names:
        engine.torn.pop(name, None)


def check_ranges(comm: Comm, read: OpenFiles, manifest: Manifest) -> list[Ranges]:
    """Compares the checksums of the ranges that all ranks have read with those in the manifest, and returns the ranges
    of all ranks. If they do not cover a tensor exactly, one of the ranks reads it again. A collective. Raises
    [`CheckpointError`] if a tensor has changed."""
    again, ranges = [], comm.all_gather_object(read.ranges)
    for tensor in sorted(set().union(*ranges)):
        name = read.files.file_of[tensor]
        parts = [part for ranges_of_rank in ranges for part in ranges_of_rank.get(tensor, ())]
        found = crc_of_whole(parts, read.files.entry(tensor).nbytes)
        if found is None:
            again.append((name, tensor))
        else:
            manifest.check_tensor(read.folder, name, tensor, found)
    if again:
        own = sorted(again)[comm.rank :: comm.num_ranks]
        run_on_all_ranks(comm, f"loading {read.folder}", lambda: manifest.check_tensors(read.folder, own))
    return ranges


def _recorded_files(folder: str | os.PathLike, weights_name: str) -> tuple[WeightFiles, Manifest]:
    """Checks headers and index of a folder, and returns the files and the manifest, which is empty for a model of
    another program."""
    manifest, files = Manifest.read(folder) or Manifest({}), WeightFiles.read(folder, weights_name)
    for name in (*files.layouts, *([files.index_name] if files.index_name else ())):
        manifest.check_file(folder, name)
    return files, manifest


def ignored_pattern(model: nn.Module) -> re.Pattern | None:
    """Returns a pattern for names in files that the model's class ignores."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns += [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def _refuse_differences(folder: str | os.PathLike, origins: Origins, ignored: re.Pattern | None) -> None:
    """Raises for tensors that only the model or only the folder has."""
    unexpected = [name for name in origins.unexpected if ignored is None or not ignored.search(name)]
    parts = []
    if origins.missing:
        parts.append(f"{len(origins.missing)} tensors of the model are missing ({shortened(origins.missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} are unexpected ({shortened(unexpected)})")
    if parts:
        raise CheckpointError(f"{folder}: {', '.join(parts)}; pass a folder that was saved from this model")


def _load_grown_buffers(model: nn.Module, opened: OpenFiles, tensors: Sequence[SavedTensor], origins: Origins) -> None:
    """Passes buffers that have another shape in the files, since a model may grow them in training, to the model's own
    `load_state_dict`, which may resize them. Raises for parameters of other shapes."""
    buffers = {saved.key: saved for saved in tensors if saved.buffer is not None}
    state = {}
    for key, found, wanted in origins.mismatched:
        if key not in buffers:
            raise CheckpointError(
                f"{opened.folder}: tensor {key!r} has shape {list(found)}, the model's has {list(wanted)}; "
                "load with the config saved beside it"
            )
        state[buffers[key].name] = torch.empty(found, dtype=buffers[key].dtype)
        opened.read_range(key, 0, state[buffers[key].name].view(-1))
    try:
        if state:
            model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{opened.folder}: buffers have other shapes than the model's, and its load_state_dict does not accept "
            f"them ({' '.join(str(error).split())}); load with the config saved beside it"
        ) from error


def _read_all(engine: ZeroEngine, opened: OpenFiles, tensors: Sequence[SavedTensor], origins: Origins) -> None:
    for shard in engine.named_shards(resident=True):
        if shard.name in origins.of:
            origins.of[shard.name].read(opened.read_range, shard.start, shard.tensor)
    for saved in tensors:
        if saved.buffer is not None and saved.name in origins.of:
            flat = saved.buffer.new_empty(saved.buffer.numel())  # the buffer may not be contiguous
            origins.of[saved.name].read(opened.read_range, 0, flat)
            saved.buffer.copy_(flat.view(saved.shape))
