"""Saving of a sharded model for `from_pretrained`, with or without optimizer state. All ranks write in parallel."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.conversion import Conversion, Origin, file_tensors
from hf_zero.checkpoint.names import SavedTensor, renamed, saved_tensors
from hf_zero.checkpoint.safetensors import WEIGHTS_NAME, TensorEntry, WeightFiles
from hf_zero.checkpoint.staging import Checkpoint, Snapshots, StagedFiles, connected
from hf_zero.checkpoint.state import Optimizer, plan_state
from hf_zero.comm import Comm
from hf_zero.comm.agreement import reraise
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
    """Saves weights, config and generation config in the layout of `PreTrainedModel.save_pretrained`. For a model with
    PEFT adapters, it saves the adapters in PEFT's format.

    A collective. Each rank writes the ranges that it owns; the additional memory is a few MiB. New files are written
    into a temporary folder inside of `folder`, and replace old ones when all are on disk. If any rank fails, all
    raise, and the files of `folder` are unchanged. Optimizer state of older weights in the same folder is removed.

    Tied parameters are saved once, and buffers from rank 0. Each parameter is saved in the engine's save dtype. Keys
    and shapes are those of the model's published checkpoints, if they differ from the model's own; transformers and
    `load_weights` convert them.

    Args:
        model (`nn.Module` or [`ShardedModel`]): The sharded model. If it has no config, only weights are saved.
        folder (`str` or `os.PathLike`): The folder, on storage that all ranks share. Created if it does not exist.
        max_shard_size (`int` or `str`): Maximum bytes of tensors per file, such as `"5GB"`.
        weights_name (`str`): Name of the file. The names of several files are derived from it.
        keys (`Mapping[str, str]`, *optional*): Parameters and buffers to save, with their names in the file. By
            default, all are saved under the names that transformers uses.
        write_beside (`Callable`, *optional*): Called on rank 0 with the temporary folder to write other files. By
            default, the model's config, generation config and custom code are written.

    Raises:
        `CheckpointError`: If the disk is full, or the folder is not writable or not shared by the ranks.
        `ConfigError`: If `max_shard_size` is invalid.
    """
    engine = require_engine(model)
    if keys is None and write_beside is None and weights_name == WEIGHTS_NAME:
        from hf_zero.checkpoint.adapters import plan_model  # circular import

        weights = plan_model(engine, max_shard_size=max_shard_size, resumes=False)
    else:
        weights = plan_weights(
            engine, max_shard_size=max_shard_size, weights_name=weights_name, keys=keys, write_beside=write_beside
        )
    Checkpoint.begin(engine, folder, weights, adds=True).finish()


def plan_weights(
    engine: ZeroEngine,
    *,
    max_shard_size: int | str = "50GB",
    weights_name: str = WEIGHTS_NAME,
    keys: Mapping[str, str] | None = None,
    write_beside: Callable[[Path], None] | None = None,
) -> StagedFiles:
    """Plans the files of `save_pretrained`. The arguments are the same."""
    model = engine.model
    if keys is None and hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{type(model).__name__} has PEFT adapters, so its base model would be saved under names that cannot be "
            "loaded; pass `keys` with the adapter's parameters, or merge the adapter first"
        )
    tensors = saved_tensors(model, engine.param_infos())
    if keys is not None:
        tensors = renamed(tensors, keys)
    _refuse_opaque(model, tensors)
    content = file_tensors(None if keys is not None else model, tensors)
    files = WeightFiles.plan(content, max_shard_size=max_shard_size, weights_name=weights_name)

    def beside(staged: Path) -> None:
        if engine.comm.rank != 0:
            return
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
                f"{name}: quantized weights ({type(param).__name__}) cannot be saved without their quantizer's state; "
                "save only the trained parameters, with `keys` or as an adapter"
            )


def _pieces(
    engine: ZeroEngine, tensors: Sequence[SavedTensor], content: Mapping[TensorEntry, Origin]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yields this rank's ranges of the files: (key, first element, 1-D values)."""
    yield from _converted(engine, tensors, content)
    places: dict[str, list[tuple[str, int, int]]] = {}  # by parameter: key and the range of elements in it
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
    """Yields tensors that are converted from full parameters. The parameters of one conversion at a time are gathered
    on one rank, in round-robin order over the ranks. All ranks must call it. A rank that fails continues to the end,
    since the others need its shards."""
    names_of: dict[int, list[str]] = {}  # results of each conversion
    conversions: dict[int, Conversion] = {}
    for origin in content.values():
        if origin.conversion is not None:
            conversions[id(origin.conversion)] = origin.conversion
            names_of.setdefault(id(origin.conversion), []).append(origin.name)
    if not conversions:
        return
    comm = connected(engine.comm)  # can send CPU tensors
    buffers = {saved.name: saved.buffer for saved in tensors if saved.buffer is not None}
    failure: Exception | None = None
    for index, (key, conversion) in enumerate(conversions.items()):
        owner = index % comm.num_ranks
        sources = [entry for entry, _ in conversion.sources]
        own: dict[str, tuple[int, Tensor]] = {}
        try:
            own = _own_ranges(engine, sources)
        except Exception as error:  # for example out of memory
            failure = error
        whole = _gathered(comm, sources, own, owner)
        if comm.rank != owner or failure is not None:
            continue
        try:
            whole |= {name: buffers[name].detach().cpu().clone() for name in whole.keys() & buffers.keys()}
            results = conversion.run({entry.name: whole[entry.name].view(entry.shape) for entry in sources})
        except Exception as error:
            failure = error
            continue
        for name in names_of[key]:
            yield name, 0, results[name].reshape(-1)
        del whole, results  # free them before the next conversion
    reraise(failure)


def _own_ranges(engine: ZeroEngine, sources: Sequence[TensorEntry]) -> dict[str, tuple[int, Tensor]]:
    """Returns the first element and the values of this rank's range of each parameter, in the dtype in which it is
    saved."""
    dtype_of = {entry.name: entry.dtype for entry in sources}
    found: dict[str, tuple[int, Tensor]] = {}
    for shard in engine.named_shards(only=dtype_of):  # the shards of a parameter follow one another
        values = shard.tensor.detach().to("cpu", dtype_of[shard.name])
        start, before = found.get(shard.name, (shard.start, values[:0]))
        found[shard.name] = start, torch.cat([before, values])
    return found


def _gathered(
    comm: Comm, sources: Sequence[TensorEntry], own: Mapping[str, tuple[int, Tensor]], owner: int
) -> dict[str, Tensor]:
    """Gathers full parameters, 1-D, on rank `owner` from the ranges of all ranks, which must all call it."""
    held = [own.get(entry.name, (0, torch.empty(0, dtype=entry.dtype))) for entry in sources]
    ranges = torch.tensor([[start, values.numel()] for start, values in held])
    if comm.rank != owner:
        for values in (ranges, *(values for _, values in held if values.numel())):
            comm.send(values, owner)
        return {}
    whole = {entry.name: torch.empty(entry.numel, dtype=entry.dtype) for entry in sources}
    for rank in range(comm.num_ranks):
        theirs = ranges if rank == owner else torch.empty_like(ranges)
        if rank != owner:
            comm.receive(theirs, rank)
        for entry, (_, values), (start, numel) in zip(sources, held, theirs.tolist()):
            target = whole[entry.name][start : start + numel]
            if rank == owner:
                target.copy_(values)
            elif numel:
                comm.receive(target, rank)
    return whole


def _write_configs(model: nn.Module, tensors: Sequence[SavedTensor], folder: Path) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)  # do not change the running model
    config.architectures = [type(model).__name__]
    floats = [saved.dtype for saved in tensors if saved.buffer is None and saved.dtype.is_floating_point]
    if floats:
        config.dtype = str(floats[0]).removeprefix("torch.")  # default dtype of `from_pretrained`
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


def save_checkpoint(
    model: Sharded,
    optimizer: Optimizer | None,
    folder: str | os.PathLike,
    *,
    max_shard_size: int | str = "50GB",
    background: Snapshots | None = None,
    **facts,
) -> "Checkpoint":
    """Saves a model folder with optimizer state. `folder` appears when it is complete and on disk. For a model with
    PEFT adapters, it saves the adapters in PEFT's format.

    A collective. Every rank writes its own ranges of the files. An existing checkpoint of that name is replaced. All
    hosts must share `folder`.

    Args:
        model (`nn.Module` or [`ShardedModel`]): The sharded model.
        optimizer ([`Optimizer`], *optional*): Its optimizer. By default no state is saved.
        folder (`str` or `os.PathLike`): The checkpoint.
        max_shard_size (`int` or `str`): Maximum bytes of tensors per file, such as `"5GB"`.
        background ([`Snapshots`], *optional*): Copies the values and writes them in a background thread. Pass the same
            object to every save, also of several models, to reuse its memory. The next save waits for this one.
        facts: `step`, `loss`, `grad_norm` and `extra` of the manifest.

    Returns:
        [`Checkpoint`]: Its `wait` raises errors of the background thread.

    Raises:
        `CheckpointError`: If the disk is full, permission is denied, or a write fails. The incomplete folder is
            removed, and an existing checkpoint is kept.
    """
    from hf_zero.checkpoint.adapters import plan_model  # circular import

    engine = require_engine(model)
    checkpoint = Checkpoint.begin(
        engine,
        folder,
        plan_model(engine, max_shard_size=max_shard_size),
        None if optimizer is None else plan_state(engine, optimizer, **facts),
    )
    checkpoint.finish(background)
    return checkpoint
