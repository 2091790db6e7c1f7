"""Optimizer state beside the weights: whole tensors by parameter name, for any number of ranks and any stage.

`zero/optimizer.safetensors` holds the moments (`{parameter}.{state key}`), `zero/master.safetensors` the master values
of parameters whose saved weights are of another dtype, `zero/manifest.json` the rest. Nothing is pickled.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.file_layout import FileLayout, TensorEntry
from hf_zero.checkpoint.folders import sync_path
from hf_zero.checkpoint.interfaces import Engine, Optimizer, Shard
from hf_zero.checkpoint.manifest import MANIFEST_NAME, STATE_FOLDER, Manifest, manifest_path, recorded
from hf_zero.checkpoint.open_files import OpenFiles, Ranges, check_ranges
from hf_zero.checkpoint.pretrained import check_configs, check_weights
from hf_zero.checkpoint.replacing import inside
from hf_zero.checkpoint.staging import Staged, StagedFiles, connected
from hf_zero.checkpoint.table import ChecksumTable
from hf_zero.checkpoint.tensor_names import shortened
from hf_zero.checkpoint.weight_files import WeightFiles
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks
from hf_zero.engine import Sharded, require_engine
from hf_zero.errors import CheckpointError


OPTIMIZER_NAME = "optimizer.safetensors"
MASTER_NAME = "master.safetensors"


def save_state(model: Sharded, optimizer: Optimizer, folder: str | os.PathLike, *, extra: dict | None = None) -> None:
    """Saves what a run needs beside its weights to go on, into `folder/zero`. Collective; see `save_pretrained`.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        optimizer ([`Optimizer`]): its optimizer.
        folder (`str` or `os.PathLike`): the checkpoint, seen by all ranks, where `save_pretrained` was called before.
        extra (`dict`, *optional*): JSON-able, rank 0's counts; `load_state` gives it back.

    Raises:
        `CheckpointError`: the disk is full, the folder cannot be written, a value that JSON does not know.
    """
    engine = require_engine(model)
    state = plan_state(engine, optimizer, extra=extra or {})
    staged = Staged.open(connected(engine.comm), folder, [state.part], inside=True)
    staged.write([state.part])
    staged.write_beside(state.write_manifest)
    staged.publish(lambda path: _publish(path, staged.destination))


@dataclass(frozen=True)
class State:
    """What a run needs beside its weights to go on, as it will be saved."""

    part: StagedFiles
    manifest: Manifest

    def write_manifest(self, folder: Path) -> None:
        """Writes the manifest of a checkpoint into a folder."""
        manifest_path(folder).write_text(self.manifest.text(), encoding="utf-8")


def plan_state(engine: Engine, optimizer: Optimizer, **facts) -> State:
    """Plans what `save_state` writes. Collective.

    Args:
        engine ([`Engine`]): the sharded model.
        optimizer ([`Optimizer`]): its optimizer.
        facts: fields of `Manifest` that only the caller knows.

    Raises:
        `CheckpointError`: the ranks hold different state, or a value that JSON does not know.
    """
    comm, subject = engine.comm, "saving the optimizer's state"
    entries = _whole_tensors(comm, subject, lambda: _state_pieces(optimizer, values=False))
    masters = _whole_tensors(comm, subject, lambda: _master_pieces(engine, values=False))
    layouts = {OPTIMIZER_NAME: FileLayout.build(entries)}
    if masters:
        layouts[MASTER_NAME] = FileLayout.build(masters)
    scalars = _merged_scalars(comm, subject, optimizer, entries)
    manifest = _manifest(engine, layouts, groups=optimizer.groups_state(), scalars=scalars, **facts)
    run_on_all_ranks(comm, subject, manifest.text)

    def pieces() -> Iterator[tuple[str, int, Tensor]]:
        for name, shard in chain(_state_pieces(optimizer), _master_pieces(engine)):
            yield name, shard.start, shard.tensor

    return State(StagedFiles(WeightFiles.of(layouts), pieces, STATE_FOLDER), manifest)


def load_state(model: Sharded, optimizer: Optimizer, folder: str | os.PathLike) -> Manifest:
    """Loads what `save_state` wrote, whatever the stage and number of ranks then and now. Collective.

    Each rank reads only the ranges that it holds. Load the weights first: masters are read where they were saved, the
    others follow from the weights. When it fails it fails on all ranks; the state may then be partly loaded.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model, its weights loaded.
        optimizer ([`Optimizer`]): an optimizer of the same kind over the same trainable parameters.
        folder (`str` or `os.PathLike`): the checkpoint.

    Returns:
        [`Manifest`]: with the `extra` of the run that saved.

    Raises:
        `CheckpointError`: state is missing, damaged, of other shapes, or of an optimizer with other state.
    """
    engine = require_engine(model)
    engine.begin_update()
    comm, subject, state_folder = engine.comm, f"loading state from {folder}", Path(folder) / STATE_FOLDER
    manifest = run_on_all_ranks(comm, subject, lambda: Manifest.read(folder))
    table = run_on_all_ranks(comm, subject, lambda: recorded(folder) or ChecksumTable())
    files = run_on_all_ranks(comm, subject, lambda: _read_files(folder, manifest, table))

    def read() -> tuple[set[str], Ranges]:
        optimizer.load_groups_state(manifest.groups)
        optimizer.load_scalar_state(manifest.scalars)
        with OpenFiles(state_folder, files) as opened:
            names = _read_state(opened, optimizer) | _read_masters(opened, engine)
            return names, opened.ranges

    names, ranges = zip(*collect_from_all_ranks(comm, subject, read))
    consumed = set().union(*names)
    check_ranges(comm, subject, ranges, files, table.tensors_in(STATE_FOLDER), state_folder)
    left = [name for name in files.file_of if name not in consumed and files.entry(name).numel]
    if left:
        raise CheckpointError(
            f"{state_folder}: no place for {shortened(left)} in this run; "
            "resume with the optimizer and the trainable parameters that it was saved with"
        )
    engine.mark_updated()
    return manifest


def check_checkpoint(folder: str | os.PathLike) -> None:
    """Checks that what a run reads of a checkpoint is complete and, but for the values of tensors, as it was saved.

    Costs a read of headers and small files; `hf_zero.checkpoint.verify.check_checksums` reads the tensors, too, and
    what people may have edited since.

    Raises:
        `CheckpointError`: says what is missing or damaged.
    """
    folder = Path(folder)
    table = recorded(folder) or ChecksumTable()
    table.check_files(folder)
    check_weights(folder)
    check_configs(folder)
    if (folder / STATE_FOLDER).is_dir():
        _read_files(folder, Manifest.read(folder), table)


def _manifest(engine: Engine, layouts: Mapping[str, FileLayout], **content) -> Manifest:
    dtypes = {name: {entry.dtype for entry in layout.entries.values()} for name, layout in layouts.items()}
    dtypes["weights"] = {info.save_dtype for info in engine.param_infos()}
    return Manifest(
        stage=int(engine.stage),
        num_ranks=engine.comm.num_ranks,
        dtypes={name: sorted(str(dtype).removeprefix("torch.") for dtype in found) for name, found in dtypes.items()},
        **content,
    )


def masters_nbytes(engine: Engine) -> int:
    """Bytes of this rank's part of the masters that are saved beside the weights."""
    return sum(shard.tensor.numel() * shard.tensor.element_size() for _, shard in _master_pieces(engine, values=False))


def _state_pieces(optimizer: Optimizer, values: bool = True) -> Iterator[tuple[str, Shard]]:
    for key, shard in optimizer.named_state_shards(values=values):
        yield f"{shard.name}.{key}", shard


def _master_pieces(engine: Engine, values: bool = True) -> Iterator[tuple[str, Shard]]:
    """The masters that the saved weights cannot hold."""
    save_dtype_of = {info.name: info.save_dtype for info in engine.param_infos()}
    for shard in engine.named_shards(values=values):
        if torch.promote_types(shard.tensor.dtype, save_dtype_of[shard.name]) != save_dtype_of[shard.name]:
            yield shard.name, shard


def _whole_tensors(comm: Comm, subject: str, pieces) -> list[TensorEntry]:
    """The tensors of which the ranks hold pieces, the same list on all of them."""

    def own() -> dict[str, TensorEntry]:
        return {name: TensorEntry(name, shard.tensor.dtype, tuple(shard.shape)) for name, shard in pieces()}

    merged: dict[str, TensorEntry] = {}
    for rank, found in enumerate(collect_from_all_ranks(comm, subject, own)):
        for name, entry in found.items():
            if merged.setdefault(name, entry) != entry:
                raise CheckpointError(
                    f"{subject}: {name} is {entry.dtype} {list(entry.shape)} on rank {rank}, {merged[name].dtype} "
                    f"{list(merged[name].shape)} before it; build the same model and optimizer on every rank"
                )
    return list(merged.values())


def _merged_scalars(
    comm: Comm, subject: str, optimizer: Optimizer, entries: Iterable[TensorEntry]
) -> dict[str, dict[str, float]]:
    """Merges the numbers of all parameters. Those that have tensors only get an empty dict: loading makes it first."""
    merged: dict[str, dict[str, float]] = {entry.name.rpartition(".")[0]: {} for entry in entries}
    for rank, found in enumerate(collect_from_all_ranks(comm, subject, optimizer.named_scalar_state)):
        for name, numbers in found.items():
            known = merged.setdefault(name, {})
            for key, number in numbers.items():
                if known.setdefault(key, number) != number:
                    raise CheckpointError(
                        f"{subject}: {key} of {name} is {number} on rank {rank}, {known[key]} before it; "
                        "step the optimizer on every rank"
                    )
    return merged


def _read_files(folder: str | os.PathLike, manifest: Manifest, table: ChecksumTable) -> WeightFiles:
    """The state's files, their headers as they were saved."""
    layouts = {name: FileLayout.read(Path(folder) / STATE_FOLDER / name) for name in manifest.state_files}
    for name, layout in layouts.items():
        table.check_layout(folder, f"{STATE_FOLDER}/{name}", layout)
    return WeightFiles.of(layouts)


def _read_state(opened: OpenFiles, optimizer: Optimizer) -> set[str]:
    consumed = set()
    for key, shard in optimizer.named_state_shards(resident=True):
        name = f"{shard.name}.{key}"
        _read_shard(opened, name, shard)
        consumed.add(name)
    return consumed


def _read_masters(opened: OpenFiles, engine: Engine) -> set[str]:
    masters = opened.files.layouts.get(MASTER_NAME)
    consumed: set[str] = set()
    if masters is None:
        return consumed
    for shard in engine.named_shards(resident=True):
        if shard.name in masters.entries:
            _read_shard(opened, shard.name, shard)
            consumed.add(shard.name)
    return consumed


def _read_shard(opened: OpenFiles, name: str, shard: Shard) -> None:
    opened.check_shape(name, tuple(shard.shape))
    opened.read_range(name, shard.start, shard.tensor)


def _publish(staged: Path, folder: Path) -> None:
    new = staged / STATE_FOLDER
    with inside(staged, folder, replaces=lambda name: name.startswith(f"{STATE_FOLDER}/")):
        manifest = manifest_path(folder)
        manifest.parent.mkdir(exist_ok=True)
        manifest.unlink(missing_ok=True)
        for name in (OPTIMIZER_NAME, MASTER_NAME):
            if (new / name).exists():
                os.replace(new / name, manifest.parent / name)
            else:
                (manifest.parent / name).unlink(missing_ok=True)
        os.replace(new / MANIFEST_NAME, manifest)
        sync_path(manifest.parent)
