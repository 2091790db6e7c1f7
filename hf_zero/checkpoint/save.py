"""Saves of a sharded model as a folder that `from_pretrained` loads, alone or with its state, by all ranks at once."""

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.conversion import Origin, file_tensors, reverted
from hf_zero.checkpoint.format import WEIGHTS_NAME, TensorEntry, WeightFiles, is_weight_file
from hf_zero.checkpoint.manifest import STATE_FOLDER
from hf_zero.checkpoint.names import SavedTensor, renamed, saved_tensors
from hf_zero.checkpoint.staging import Snapshots, Staged, StagedFiles, added, connected, move_into
from hf_zero.checkpoint.state import Optimizer, plan_state
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, reraise, run_on_all_ranks
from hf_zero.engine import Sharded, ZeroEngine, require_engine
from hf_zero.engine.opaque import is_opaque
from hf_zero.errors import CheckpointError


def save_pretrained(
    model: Sharded,
    folder: str | os.PathLike,
    *,
    max_shard_size: int | str = "50GB",
    weights_name: str = WEIGHTS_NAME,
    keys: Mapping[str, str] | None = None,
    write_beside: Callable[[Path], None] | None = None,
) -> None:
    """Saves the model: weights, config and generation config, as `PreTrainedModel.save_pretrained` lays them out. Of a
    model with PEFT adapters it saves the adapters, as PEFT does.

    Collective. The offsets follow from the layout, so each rank writes the ranges it owns; extra memory is a few MiB.
    A new folder appears when it is complete. In one that holds something, new files grow in a temporary folder and
    replace the old ones when all are on disk. If any rank fails, all raise and `folder` is as before. Optimizer state
    saved beside older weights in the same folder becomes invalid: save the model first, then the state.

    Tied parameters are saved once, buffers from rank 0, each parameter in the dtype that the engine gives for it. Keys
    and shapes are those of the model's published checkpoints, where they differ from the model's own: transformers
    converts them when it loads, and so does `load_weights`.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model. A model without a config is saved as weights alone.
        folder (`str` or `os.PathLike`): seen by all ranks; created where it is missing.
        max_shard_size (`int` or `str`): bytes of tensors in one file, such as `"5GB"`.
        weights_name (`str`): name of the file, or of the first part of its name when there are several.
        keys (`Mapping[str, str]`, *optional*): parameter or buffer name to its name in the file, to save only those
            (an adapter, say). By default all of them under the names that transformers writes.
        write_beside (`Callable`, *optional*): called on rank 0 with the temporary folder, writes
            what lies beside the weights. By default the model's config, generation config and, for custom code, its
            source files.

    Raises:
        `CheckpointError`: the disk is full, the folder cannot be written or is not shared by the ranks.
        `ConfigError`: `max_shard_size` is not a size.
    """
    engine = require_engine(model)
    engine.check_before_save()
    folder = os.path.realpath(folder)  # a symbolic link stays one, and the files lie on the disk that it leads to
    if keys is None and write_beside is None and weights_name == WEIGHTS_NAME:
        from hf_zero.checkpoint.adapters import is_adapter_model, save_adapters  # which imports this module

        if is_adapter_model(engine.model):
            with added(engine.comm, folder) as adapters:
                save_adapters(engine, adapters)
            return
    weights = plan_weights(
        engine, max_shard_size=max_shard_size, weights_name=weights_name, keys=keys, write_beside=write_beside
    )
    comm = connected(engine.comm)
    holds_something = any(collect_from_all_ranks(comm, f"saving to {folder}", lambda: _holds_something(Path(folder))))
    is_weights = partial(is_weight_file, weights_name=weights_name)

    def replaces(name: str) -> bool:
        return is_weights(name) or name.startswith(f"{STATE_FOLDER}/")  # the state belongs to the former weights

    move = partial(move_into, is_weights=is_weights, replaces=replaces) if holds_something else None
    staged = Staged.open(comm, folder, [weights], move)
    staged.write([weights])
    staged.publish()


def _holds_something(folder: Path) -> bool:
    return folder.is_file() or folder.is_dir() and any(folder.iterdir())


def plan_weights(
    engine: ZeroEngine,
    *,
    max_shard_size: int | str = "50GB",
    weights_name: str = WEIGHTS_NAME,
    keys: Mapping[str, str] | None = None,
    write_beside: Callable[[Path], None] | None = None,
) -> StagedFiles:
    """Plans the files of `save_pretrained`, which takes the same arguments."""
    model = engine.model
    if keys is None and hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{type(model).__name__} has PEFT adapters, whose base would be saved under names that nothing loads; "
            "pass `keys` with the adapter's parameters, or merge the adapter first"
        )
    tensors = saved_tensors(model, engine.param_infos())
    if keys is not None:
        tensors = renamed(tensors, keys)
    _refuse_opaque(model, tensors)
    content = file_tensors(None if keys is not None else model, tensors)
    files = WeightFiles.plan(content, max_shard_size=max_shard_size, weights_name=weights_name)

    def beside(staged: Path) -> None:
        if files.index_name is not None:
            num_parameters = sum(saved.entry.numel for saved in tensors if saved.buffer is None)
            (staged / files.index_name).write_text(files.index_text(num_parameters), encoding="utf-8")
        (write_beside or (lambda path: _write_configs(model, tensors, path)))(staged)

    return StagedFiles(files, lambda: _pieces(engine, tensors, content), beside)


def _refuse_opaque(model: nn.Module, tensors: Sequence[SavedTensor]) -> None:
    saved = {tensor.name for tensor in tensors}
    for name, param in model.named_parameters():
        if is_opaque(param) and name in saved:
            raise CheckpointError(
                f"{name}: quantized weights ({type(param).__name__}) mean nothing without their quantizer's state; "
                "save the trained parameters alone, by `keys` or as an adapter"
            )


def _pieces(
    engine: ZeroEngine, tensors: Sequence[SavedTensor], content: Mapping[TensorEntry, Origin]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yields this rank's part of the files: (key, first element, 1-D values)."""
    yield from _converted(engine, tensors, content)
    places: dict[str, list[tuple[str, int, int]]] = {}  # of a parameter: key, and the elements that it holds
    for entry, origin in content.items():
        if origin.start is not None:
            place = entry.name, origin.start, origin.start + entry.numel
            places.setdefault(origin.sources[0].name, []).append(place)
    held = ((shard.name, shard.start, shard.tensor) for shard in engine.named_shards())
    buffers = [(saved.name, 0, saved.buffer.reshape(-1)) for saved in tensors if saved.buffer is not None]
    for name, start, values in chain(held, buffers if engine.comm.rank == 0 else ()):
        for key, begin, end in places.get(name, ()):
            first, last = max(start, begin), min(start + values.numel(), end)
            if first < last:
                yield key, first - begin, values[first - start : last - start]


def _converted(
    engine: ZeroEngine, tensors: Sequence[SavedTensor], content: Mapping[TensorEntry, Origin]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yields tensors that are converted from whole parameters. One parameter, or several that are converted together,
    is whole at a time, on one rank; the ranks take turns. All ranks call it. A rank that fails to convert goes on to
    the end, since others wait for its part in their turns."""
    keys_of: dict[tuple[TensorEntry, ...], list[str]] = {}
    for entry, origin in content.items():
        if origin.start is None:
            keys_of.setdefault(origin.sources, []).append(entry.name)
    if not keys_of:
        return
    comm = connected(engine.comm)  # which sends what lies on the CPU
    saved_of = {saved.name: saved for saved in tensors}
    names = {entry.name for sources in keys_of for entry in sources}

    def own() -> list[Place]:
        held = engine.named_shards(values=False, only=names)
        return [(shard.name, shard.start, shard.tensor.numel()) for shard in held]

    places = collect_from_all_ranks(comm, "saving converted tensors", own)
    failure: Exception | None = None
    for index, (sources, keys) in enumerate(keys_of.items()):
        owner = index % comm.num_ranks
        whole = _gathered(engine, comm, sources, places, owner)
        if comm.rank != owner:
            continue
        try:
            for entry in sources:
                buffer = saved_of[entry.name].buffer
                if buffer is not None:
                    whole[entry.name] = buffer.detach().cpu().reshape(-1).clone()
            state = {saved_of[entry.name].key: whole[entry.name].view(entry.shape) for entry in sources}
            results = reverted(engine.model, state)
        except Exception as error:  # such as no memory for a whole tensor
            failure = error
            continue
        for key in keys:
            yield key, 0, results[key].reshape(-1)
        del whole, state, results  # before the next ones are there
    reraise(failure)


Place = tuple[str, int, int]  # of a shard: its parameter, first element and number of elements


def _gathered(
    engine: ZeroEngine, comm: Comm, sources: Sequence[TensorEntry], places: Sequence[Sequence[Place]], owner: int
) -> dict[str, Tensor]:
    """Returns whole parameters on one rank, 1-D and in the dtype in which they are saved. All ranks call it, with the
    places of all ranks' shards."""
    dtype_of = {entry.name: entry.dtype for entry in sources}
    own = {
        (name, start): torch.empty(numel, dtype=dtype_of[name])
        for name, start, numel in places[comm.rank]
        if name in dtype_of
    }
    for shard in engine.named_shards(only=dtype_of):  # in other pieces where they lie on disk
        for (name, start), values in own.items():
            if name == shard.name and start <= shard.start < start + values.numel():
                values[shard.start - start :][: shard.tensor.numel()].copy_(shard.tensor.detach())
    if comm.rank != owner:
        for values in own.values():
            comm.send(values, owner)
        return {}
    whole = {entry.name: torch.empty(entry.numel, dtype=entry.dtype) for entry in sources}
    for rank, of_rank in enumerate(places):
        for name, start, numel in of_rank:
            if name in whole:
                target = whole[name][start : start + numel]
                target.copy_(own[name, start]) if rank == owner else comm.receive(target, rank)
    return whole


def _write_configs(model: nn.Module, tensors: Sequence[SavedTensor], folder: Path) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)  # what is particular to this file is not the running model's business
    config.architectures = [type(model).__name__]
    floats = [saved.dtype for saved in tensors if saved.buffer is None and saved.dtype.is_floating_point]
    if floats:
        config.dtype = str(floats[0]).removeprefix("torch.")  # what `from_pretrained` loads with by default
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


logger = logging.getLogger(__name__)


def save_checkpoint(
    model: Sharded,
    optimizer: Optimizer | None,
    folder: str | os.PathLike,
    *,
    max_shard_size: int | str = "50GB",
    background: Snapshots | None = None,
    **facts,
) -> "Checkpoint":
    """Saves a model folder with its optimizer's state. `folder` appears when it is complete and on disk.

    Collective. Every rank writes its own ranges of the files; a folder of that name is replaced. All hosts must see
    `folder`.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        optimizer ([`Optimizer`], *optional*): its optimizer; without it no state is written.
        folder (`str` or `os.PathLike`): the checkpoint.
        max_shard_size (`int` or `str`): bytes of tensors in one file, such as `"5GB"`.
        background ([`Snapshots`], *optional*): copies the values and lets a thread write them; give the same object
            to every save, also of several models: they reuse its memory. The next save waits for this one.
        facts: `step`, `loss`, `grad_norm` and `extra` of the manifest.

    Returns:
        [`Checkpoint`]: to `wait` for, which raises what went wrong in the background.

    Raises:
        `CheckpointError`: no room, no permission, or the system refused a write. Nothing is left, and nothing lost.
    """
    engine = require_engine(model)
    checkpoint = Checkpoint.begin(
        engine,
        folder,
        plan_weights(engine, max_shard_size=max_shard_size),
        None if optimizer is None else plan_state(engine, optimizer, **facts),
    )
    checkpoint.finish(background)
    return checkpoint


class Checkpoint:
    """A checkpoint that is being saved: from `begin` to `finish`, small files may be written into its `path`."""

    def __init__(self, staged: Staged, parts: Sequence[StagedFiles]):
        self._staged = staged
        self._parts = parts
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @classmethod
    def begin(
        cls, engine: ZeroEngine, folder: str | os.PathLike, weights: StagedFiles | None, state: StagedFiles | None
    ) -> "Checkpoint":
        """Checks the space, and makes the temporary folder with all small files in it. Collective. Weights are planned
        by `plan_weights`, unless the caller writes them."""
        engine.check_before_save()
        parts = [part for part in (weights, state) if part is not None]
        return cls(Staged.open(connected(engine.comm), folder, parts), parts)

    @property
    def path(self) -> Path:
        """The temporary folder."""
        return self._staged.path

    @property
    def folder(self) -> Path:
        """The final path of the checkpoint."""
        return self._staged.destination

    def finish(self, background: Snapshots | None = None, after: Callable[[], None] | None = None) -> None:
        """Writes the tensors and gives the folder its name, on this thread or on another. Rank 0 calls `after` when
        the folder is complete."""
        if background is None:
            self._write(after)
            return
        comm = self._staged.comm
        with self._staged.or_discard():
            self._parts = run_on_all_ranks(comm, f"copying {self.folder}", lambda: background.take(self._parts))
        comm.user = self  # until it is waited for, by the caller or by the next save
        name = f"saving {self.folder.name}"
        self._thread = threading.Thread(target=self._write_in_background, args=(after,), name=name)
        background.reader = self._thread
        self._thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. Raises [`CheckpointError`], on all ranks, where it could not be
        saved."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._staged.comm.user = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def discard(self) -> None:
        """Discards a checkpoint that was not finished."""
        self._staged.discard()

    def _write_in_background(self, after: Callable[[], None] | None) -> None:
        try:
            self._write(after)
        except BaseException as error:
            logger.error("hf_zero: %s", error)  # at once; it is raised when the checkpoint is waited for
            self._failure = error

    def _write(self, after: Callable[[], None] | None) -> None:
        self._staged.write(self._parts)
        self._staged.publish(after=after)
