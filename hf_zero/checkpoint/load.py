"""Loads weights from a model folder into a sharded model: every rank reads only the ranges that it holds."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from hf_zero.checkpoint.conversion import Origins, origins_by_name, origins_in
from hf_zero.checkpoint.files import OpenFiles, Ranges
from hf_zero.checkpoint.format import WEIGHTS_NAME, WeightFiles, crc_of_whole
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.names import SavedTensor, renamed, saved_tensors, shortened
from hf_zero.comm import Comm
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.compat import is_pretrained
from hf_zero.engine import Sharded, ZeroEngine, require_engine
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class LoadReport:
    """The tensors of the model that a load did not fill (`missing`), and those of the files that it did not use
    (`unexpected`)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(
    model: Sharded,
    folder: str | os.PathLike,
    *,
    strict: bool = True,
    weights_name: str = WEIGHTS_NAME,
    keys: Mapping[str, str | Sequence[str]] | None = None,
) -> LoadReport:
    """Loads a folder's safetensors weights into the shards, in place. Collective; fails on all ranks or on none.

    The tensors may have the names and shapes of the model, or any that `from_pretrained` takes: those of its published
    checkpoints, of older versions, with or without the prefix of the base model. Names, shapes and file sizes are
    checked before the first value is written. Values are converted to the master's dtype on the way. Buffers are read
    whole on every rank. A tied parameter may be stored under any of its names.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        folder (`str` or `os.PathLike`): holds `model.safetensors`, or several files and their index.
        strict (`bool`): refuse missing and unexpected tensors; otherwise they are reported. Shapes must always agree.
        weights_name (`str`): name of the file, or of the first part of its name when there are several.
        keys (`Mapping[str, str | Sequence[str]]`, *optional*): parameter or buffer name to its name in the files, or
            to several names of which the files hold at least one, to load only those.

    Returns:
        [`LoadReport`]: both parts empty when strict.

    Raises:
        `CheckpointError`: no such folder, a truncated file, a tensor that is missing, unexpected or of another shape.
    """
    engine = require_engine(model)
    engine.begin_update()
    engine.evict_all()
    tensors = saved_tensors(engine.model, engine.param_infos())
    tensors = tensors if keys is None else renamed(tensors, keys)

    def read() -> tuple[LoadReport, Origins, WeightFiles, Ranges, Manifest]:
        files, manifest = _recorded_files(folder, weights_name)
        if keys is None and is_pretrained(engine.model):
            origins = origins_in(engine.model, tensors, files.entries)
        else:
            origins = origins_by_name(tensors, files.entries)
        report = _report(folder, origins, ignored_pattern(engine.model), strict=strict)
        grown = _grown_buffers(folder, tensors, origins)
        with OpenFiles(folder, files) as opened:
            _offer_buffers(engine.model, opened, folder, grown)
            begin_load(engine, origins.of, folder)
            _read_all(engine, opened, tensors, origins)
        return report, origins, files, opened.ranges, manifest

    subject = f"loading {folder}"
    report, origins, files, ranges, manifest = run_on_all_ranks(engine.comm, subject, read)
    check_ranges(engine.comm, subject, engine.comm.all_gather_object(ranges), files, manifest, folder)
    end_load(engine, origins.of)
    return report


def begin_load(engine: ZeroEngine, names: Iterable[str], folder: str | os.PathLike) -> None:
    """Notes that values of these names are about to be overwritten from a folder: nothing is saved if that raises
    halfway."""
    engine.torn.update(dict.fromkeys(names, f"loading the weights of {folder}"))


def end_load(engine: ZeroEngine, names: Iterable[str]) -> None:
    """Lets the compute copies follow, and drops the notes of these names. All ranks call it, when all have read."""
    engine.mark_updated()
    for name in names:
        engine.torn.pop(name, None)


def check_ranges(
    comm: Comm,
    subject: str,
    ranges: Sequence[Ranges],
    files: WeightFiles,
    manifest: Manifest,
    folder: str | os.PathLike,
) -> None:
    """Compares the checksums of ranges that were read with those that were saved. Collective.

    A tensor that the ranks have read in ranges that do not add up to it is read again for its checksum, by one of
    them.

    Args:
        ranges (`Sequence[Ranges]`): what each rank has read. A tensor that none has read is not compared.

    Raises:
        `CheckpointError`: naming the file and the tensor whose bytes have changed.
    """
    again = []
    for tensor, name in files.file_of.items():
        parts = [part for ranges_of_rank in ranges for part in ranges_of_rank.get(tensor, ())]
        if not parts:
            continue
        found = crc_of_whole(parts, files.entry(tensor).nbytes)
        if found is None:
            again.append((name, tensor))
        else:
            manifest.check_tensor(folder, name, tensor, found)
    if again:
        own = sorted(again)[comm.rank :: comm.num_ranks]
        run_on_all_ranks(comm, subject, lambda: manifest.check_tensors(folder, own))


def _recorded_files(folder: str | os.PathLike, weights_name: str) -> tuple[WeightFiles, Manifest]:
    """Returns the files of a folder, after a check of headers and index, and its manifest, which is empty for a model
    of another program."""
    manifest, files = Manifest.read(folder) or Manifest({}), WeightFiles.read(folder, weights_name)
    for name, layout in files.layouts.items():
        manifest.check_layout(folder, name, layout)
    if files.index_name is not None:
        manifest.check_file(folder, files.index_name)
    return files, manifest


def ignored_pattern(model: nn.Module) -> re.Pattern | None:
    """Returns a pattern for names that old files have and the model's class ignores."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns += [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def _report(folder: str | os.PathLike, origins: Origins, ignored: re.Pattern | None, *, strict: bool) -> LoadReport:
    """Returns the differences of a folder from the model, and refuses them where the load is `strict`."""
    unexpected = [name for name in origins.unexpected if ignored is None or not ignored.search(name)]
    parts = []
    if origins.missing:
        parts.append(f"{len(origins.missing)} tensors of the model are missing ({shortened(origins.missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} are not the model's ({shortened(unexpected)})")
    if strict and parts:
        raise CheckpointError(f"{folder}: {', '.join(parts)}; give a folder that was saved from this model")
    return LoadReport(origins.missing, tuple(unexpected))


def _grown_buffers(
    folder: str | os.PathLike, tensors: Sequence[SavedTensor], origins: Origins
) -> dict[str, tuple[str, Tensor]]:
    """Returns buffers, by key in the files, that have another shape there: a model may let one grow in training. Each
    comes with its name, and memory of that shape. Refuses parameters of other shapes."""
    buffers = {saved.key: (saved.name, saved.buffer) for saved in tensors if saved.buffer is not None}
    grown = {}
    for key, found, wanted in origins.mismatched:
        if key not in buffers:
            raise CheckpointError(
                f"{folder}: tensor {key!r} has shape {list(found)}, the model's has {list(wanted)}; "
                "load with the config saved beside it"
            )
        name, buffer = buffers[key]
        grown[key] = name, buffer.new_empty(found)
    return grown


def _offer_buffers(
    model: nn.Module, opened: OpenFiles, folder: str | os.PathLike, grown: dict[str, tuple[str, Tensor]]
) -> None:
    """Passes buffers of other shapes to the model's own `load_state_dict`, which alone can change the shapes."""
    for key, (_, values) in grown.items():
        opened.read_range(key, 0, values.view(-1))
    try:
        if grown:
            model.load_state_dict(dict(grown.values()), strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: buffers have other shapes than the model's, whose load_state_dict does not take them "
            f"({' '.join(str(error).split())}); load with the config saved beside it"
        ) from error


def _read_all(engine: ZeroEngine, opened: OpenFiles, tensors: Sequence[SavedTensor], origins: Origins) -> None:
    for shard in engine.named_shards(resident=True):
        if shard.name in origins.of:
            origins.of[shard.name].read(opened.read_range, shard.start, shard.tensor)
    for saved in tensors:
        if saved.buffer is not None and saved.name in origins.of:
            saved.fill_buffer(partial(origins.of[saved.name].read, opened.read_range, 0))
