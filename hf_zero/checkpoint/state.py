"""Optimizer state beside the weights, as whole tensors by parameter name, for any number of ranks and any stage.

`zero/optimizer.safetensors` holds the moments (`{parameter}.{state key}`), `zero/master.safetensors` the master values
of parameters whose saved weights are of another dtype, `zero/manifest.json` the rest. Nothing is pickled.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hf_zero.checkpoint.files import OpenFiles, Ranges
from hf_zero.checkpoint.folders import remove_replaced, take_name
from hf_zero.checkpoint.format import FileLayout, TensorEntry, WeightFiles
from hf_zero.checkpoint.load import begin_load, check_ranges, end_load
from hf_zero.checkpoint.manifest import (
    MASTER_NAME,
    OPTIMIZER_NAME,
    STATE_FOLDER,
    Manifest,
    manifest_path,
    read_saved_state,
)
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.staging import Staged, StagedFiles, connected, inside
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks
from hf_zero.engine import NamedShard, Sharded, ZeroEngine, require_engine
from hf_zero.errors import CheckpointError


class Optimizer(Protocol):
    """What saving and loading need of an optimizer over shards."""

    torn: str | None  # see `ShardedState`

    def named_state_shards(self, resident: bool = False, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
        """(state key such as "exp_avg", shard): of the parameter's shape, or of one of its own (factors, scales); see
        `ZeroEngine.named_shards`."""

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """{parameter: {"step": 12.0}} for the parameters of which this rank holds parts."""

    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Loads the numbers of the state, and allocates the tensors, which are loaded afterwards."""

    def groups_state(self) -> list[dict]:
        """Hyperparameters of each group as JSON knows them, and "param_names"."""

    def load_groups_state(self, groups: list[dict]) -> None: ...


def save_state(model: Sharded, optimizer: Optimizer, folder: str | os.PathLike, *, extra: dict | None = None) -> None:
    """Saves masters and optimizer state into `folder/zero`, so that a run can go on. Collective; see
    `save_pretrained`.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        optimizer ([`Optimizer`]): its optimizer.
        folder (`str` or `os.PathLike`): the checkpoint, seen by all ranks, where `save_pretrained` was called before.
        extra (`dict`, *optional*): JSON-able, rank 0's counts; `load_state` gives it back.

    Raises:
        `CheckpointError`: the disk is full, the folder cannot be written, a value that JSON does not know.
    """
    engine = require_engine(model)
    engine.check_before_save()
    state = plan_state(engine, optimizer, extra=extra or {})
    staged = Staged.open(connected(engine.comm), folder, [state], inside=True)
    staged.write([state])
    staged.publish(lambda path: _publish(path, staged.destination))


def plan_state(engine: ZeroEngine, optimizer: Optimizer, **facts) -> StagedFiles:
    """Plans the files of `save_state`. Collective. The facts are fields of `Manifest` that only the caller knows.
    Raises [`CheckpointError`] where the ranks hold different state, or a value that JSON does not know."""
    comm, subject = engine.comm, "saving the optimizer's state"
    entries = _whole_tensors(comm, subject, lambda: _state_pieces(optimizer, values=False))
    masters = _whole_tensors(comm, subject, lambda: _master_pieces(engine, values=False))
    layouts = {OPTIMIZER_NAME: FileLayout.build(entries)}
    if masters:
        layouts[MASTER_NAME] = FileLayout.build(masters)
    scalars = _merged_scalars(comm, subject, optimizer, entries)
    manifest = _manifest(engine, layouts, groups=optimizer.groups_state(), scalars=scalars, **facts)
    text = run_on_all_ranks(comm, subject, manifest.text)

    def pieces() -> Iterator[tuple[str, int, Tensor]]:
        for name, shard in chain(_state_pieces(optimizer), _master_pieces(engine)):
            yield name, shard.start, shard.tensor

    def write_manifest(folder: Path) -> None:
        manifest_path(folder).write_text(text, encoding="utf-8")

    return StagedFiles(WeightFiles.of(layouts), pieces, write_manifest, STATE_FOLDER)


def load_state(model: Sharded, optimizer: Optimizer, folder: str | os.PathLike) -> Manifest:
    """Loads the files of `save_state`, at any stage and with any number of ranks. Collective.

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
    engine.evict_all()
    comm, subject, state_folder = engine.comm, f"loading state from {folder}", Path(folder) / STATE_FOLDER
    manifest, files, table = run_on_all_ranks(comm, subject, lambda: read_saved_state(folder))
    masters = files.layouts[MASTER_NAME].entries if MASTER_NAME in files.layouts else {}
    own = [info.name for info in engine.param_infos() if info.name in masters]

    def read() -> Ranges:
        optimizer.torn = f"loading the state of {folder}"
        optimizer.load_groups_state(manifest.groups)
        optimizer.load_scalar_state(manifest.scalars)
        with OpenFiles(state_folder, files) as opened:
            _read_pieces(opened, _state_pieces(optimizer, resident=True))
            begin_load(engine, own, folder)
            held = engine.named_shards(resident=True) if own else ()
            _read_pieces(opened, ((shard.name, shard) for shard in held if shard.name in masters))
            return opened.ranges

    ranges = collect_from_all_ranks(comm, subject, read)
    check_ranges(comm, subject, ranges, files, table, folder, STATE_FOLDER)
    consumed = set().union(*ranges)
    left = [name for name in files.file_of if name not in consumed and files.entry(name).numel]
    if left:
        raise CheckpointError(
            f"{state_folder}: no place for {shortened(left)} in this run; "
            "resume with the optimizer and the trainable parameters that it was saved with"
        )
    end_load(engine, own)
    optimizer.torn = None
    return manifest


def _read_pieces(opened: OpenFiles, pieces: Iterable[tuple[str, NamedShard]]) -> None:
    for name, shard in pieces:
        opened.check_shape(name, tuple(shard.shape))
        opened.read_range(name, shard.start, shard.tensor)


def _manifest(engine: ZeroEngine, layouts: Mapping[str, FileLayout], **content) -> Manifest:
    dtypes = {name: {entry.dtype for entry in layout.entries.values()} for name, layout in layouts.items()}
    dtypes["weights"] = {info.save_dtype for info in engine.param_infos()}
    return Manifest(
        stage=int(engine.stage),
        num_ranks=engine.comm.num_ranks,
        dtypes={name: sorted(str(dtype).removeprefix("torch.") for dtype in found) for name, found in dtypes.items()},
        **content,
    )


def masters_nbytes(engine: ZeroEngine) -> int:
    """Returns the bytes of this rank's part of the masters that are saved beside the weights."""
    return sum(shard.tensor.numel() * shard.tensor.element_size() for _, shard in _master_pieces(engine, values=False))


def _state_pieces(optimizer: Optimizer, **settings: bool) -> Iterator[tuple[str, NamedShard]]:
    for key, shard in optimizer.named_state_shards(**settings):
        yield f"{shard.name}.{key}", shard


def _master_pieces(engine: ZeroEngine, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
    """Yields the masters that the dtype of the saved weights cannot hold."""
    save_dtype_of = {info.name: info.save_dtype for info in engine.param_infos()}
    for shard in engine.named_shards(values=values):
        if torch.promote_types(shard.tensor.dtype, save_dtype_of[shard.name]) != save_dtype_of[shard.name]:
            yield shard.name, shard


def _whole_tensors(comm: Comm, subject: str, pieces) -> list[TensorEntry]:
    """Returns the tensors of which the ranks hold pieces. The list is the same on all ranks."""

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
    """Merges the numbers of all parameters over the ranks. Parameters that have tensors only get an empty dict."""
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


def _publish(staged: Path, folder: Path) -> None:
    with inside(staged, folder, replaces=lambda name: name.startswith(f"{STATE_FOLDER}/")):
        take_name(staged / STATE_FOLDER, folder / STATE_FOLDER)
        remove_replaced(folder / STATE_FOLDER)
