"""Optimizer state in a checkpoint, as full tensors by parameter name, for any number of ranks and any stage.

`zero/optimizer.safetensors` has the moments (`{parameter}.{state key}`), `zero/master.safetensors` the master weights
of parameters that are saved in another dtype, and the folder's manifest everything else. Nothing is pickled.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hf_zero.checkpoint.load import begin_load, check_ranges, end_load
from hf_zero.checkpoint.manifest import MASTER_NAME, OPTIMIZER_NAME, STATE_FOLDER, Manifest, SavedRun
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.safetensors import FileLayout, OpenFiles, TensorEntry, WeightFiles
from hf_zero.checkpoint.staging import StagedFiles
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks
from hf_zero.engine import NamedShard, Sharded, ZeroEngine, require_engine
from hf_zero.errors import CheckpointError


Value = TypeVar("Value")


class Optimizer(Protocol):
    """The interface of sharded optimizers for saving and loading."""

    torn: str | None  # see `ShardedState`

    def named_state_shards(self, resident: bool = False, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
        """Yields (state key, shard), for example with the key "exp_avg". The state has the parameter's shape or
        another one (factors, scales); see `ZeroEngine.named_shards`."""

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """Returns {parameter: {"step": 12.0}} for the parameters with a shard on this rank."""

    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Loads the numbers of the state, and allocates its tensors, which are loaded afterwards."""

    def groups_state(self) -> list[dict]:
        """Returns the hyperparameters of each group as JSON values, and "param_names"."""

    def load_groups_state(self, groups: list[dict]) -> None: ...


def plan_state(engine: ZeroEngine, optimizer: Optimizer, **facts) -> StagedFiles:
    """Plans the files of the optimizer state and the master weights. A collective. `facts` are other fields of
    `SavedRun`. Raises [`CheckpointError`] if JSON does not support a value."""
    subject = "saving the optimizer's state"
    weight_dtypes = {str(info.save_dtype).removeprefix("torch.") for info in engine.param_infos()}
    run = SavedRun(
        stage=int(engine.stage),
        num_ranks=engine.comm.num_ranks,
        weight_dtypes=sorted(weight_dtypes),
        groups=optimizer.groups_state(),
        scalars={},
        **facts,
    )

    def own() -> tuple[dict[str, TensorEntry], dict[str, TensorEntry], dict[str, dict[str, float]]]:
        run.check()
        moments, masters = _state_pieces(optimizer, values=False), _master_pieces(engine, values=False)
        return _entries(moments), _entries(masters), optimizer.named_scalar_state()

    of_ranks = collect_from_all_ranks(engine.comm, subject, own)
    moments, masters, scalars = zip(*of_ranks)
    entries: dict[str, TensorEntry] = _merged(moments)
    layouts = {OPTIMIZER_NAME: FileLayout.build(entries.values())}
    if any(masters):
        layouts[MASTER_NAME] = FileLayout.build(_merged(masters).values())
    with_tensors_only: dict[str, dict[str, float]] = {name.rpartition(".")[0]: {} for name in entries}
    run = replace(run, scalars=with_tensors_only | _merged(scalars))

    def pieces() -> Iterator[tuple[str, int, Tensor]]:
        for name, shard in chain(_state_pieces(optimizer), _master_pieces(engine)):
            yield name, shard.start, shard.tensor

    return StagedFiles(WeightFiles.of(layouts), pieces, run=run)


def load_state(model: Sharded, optimizer: Optimizer, folder: str | os.PathLike) -> SavedRun:
    """Loads the optimizer state of `save_checkpoint`, at any stage and with any number of ranks. A collective.

    Each rank reads only its own ranges. Load the weights first: master weights that were not saved are computed from
    the weights. Errors are raised on all ranks; the state may then be partly loaded.

    Args:
        model (`nn.Module` or [`ShardedModel`]): The sharded model with loaded weights.
        optimizer ([`Optimizer`]): An optimizer of the same kind and over the same trainable parameters.
        folder (`str` or `os.PathLike`): The checkpoint.

    Returns:
        [`SavedRun`]: The record of the run that saved the checkpoint, with its `extra`.

    Raises:
        `CheckpointError`: If state is missing, damaged, of other shapes, or of another optimizer.
    """
    engine = require_engine(model)
    engine.begin_update()
    engine.evict_all()
    subject = f"loading state from {folder}"
    manifest, run, files = run_on_all_ranks(engine.comm, subject, lambda: _read_saved(folder))
    masters = files.layouts[MASTER_NAME].entries if MASTER_NAME in files.layouts else {}
    own = [info.name for info in engine.param_infos() if info.name in masters]

    def read() -> OpenFiles:
        optimizer.torn = f"loading the state of {folder}"
        optimizer.load_groups_state(run.groups)
        optimizer.load_scalar_state(run.scalars)
        with OpenFiles(folder, files) as opened:
            _read_pieces(opened, _state_pieces(optimizer, resident=True))
            begin_load(engine, own, folder)
            held = engine.named_shards(resident=True) if own else ()
            _read_pieces(opened, ((shard.name, shard) for shard in held if shard.name in masters))
            return opened

    opened = run_on_all_ranks(engine.comm, subject, read)
    consumed = set().union(*check_ranges(engine.comm, opened, manifest))
    left = [name for name in files.file_of if name not in consumed and files.entry(name).numel]
    if left:
        raise CheckpointError(
            f"{Path(folder) / STATE_FOLDER}: unexpected state {shortened(left)}; "
            "resume with the optimizer and the trainable parameters that it was saved with"
        )
    end_load(engine, own)
    optimizer.torn = None
    return run


def _read_saved(folder: str | os.PathLike) -> tuple[Manifest, SavedRun, WeightFiles]:
    """Reads the manifest and the headers of the state. Raises [`CheckpointError`] if the state is missing, damaged or
    incomplete."""
    manifest = Manifest.read(folder)
    if manifest is None or manifest.run is None:
        raise CheckpointError(
            f"{folder}: has no complete optimizer state; resume from another checkpoint, or start a new run from its "
            "weights"
        )
    layouts = {}
    for name in (OPTIMIZER_NAME, MASTER_NAME):
        if name in manifest.files:
            manifest.check_file(folder, name)
            layouts[name] = FileLayout.read(Path(folder) / name)
    return manifest, manifest.run, WeightFiles.of(layouts)


def _read_pieces(opened: OpenFiles, pieces: Iterable[tuple[str, NamedShard]]) -> None:
    for name, shard in pieces:
        opened.check_shape(name, tuple(shard.shape))
        opened.read_range(name, shard.start, shard.tensor)


def _state_pieces(optimizer: Optimizer, **settings: bool) -> Iterator[tuple[str, NamedShard]]:
    for key, shard in optimizer.named_state_shards(**settings):
        yield f"{shard.name}.{key}", shard


def _master_pieces(engine: ZeroEngine, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
    """Yields the master weights whose values the dtype of the saved weights cannot represent."""
    save_dtype_of = {info.name: info.save_dtype for info in engine.param_infos()}
    for shard in engine.named_shards(values=values):
        if torch.promote_types(shard.tensor.dtype, save_dtype_of[shard.name]) != save_dtype_of[shard.name]:
            yield shard.name, shard


def _entries(pieces: Iterable[tuple[str, NamedShard]]) -> dict[str, TensorEntry]:
    """Returns the entries of the full tensors of these shards."""
    return {name: TensorEntry(name, shard.tensor.dtype, tuple(shard.shape)) for name, shard in pieces}


def _merged(of_ranks: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Merges the entries of all ranks, which are equal if several ranks have them."""
    return {name: value for found in of_ranks for name, value in found.items()}
