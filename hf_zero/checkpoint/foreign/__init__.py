"""Checkpoints of other programs: DeepSpeed, torch's distributed checkpoints, FSDP and plain Trainer runs.

Detects the program that made one, and reads it into a sharded model and its optimizer: every rank only the ranges that
it holds.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.foreign import dcp, deepspeed
from hf_zero.checkpoint.foreign.parts import ForeignState, ForeignTensor
from hf_zero.checkpoint.load import begin_load, end_load, ignored_pattern, load_weights
from hf_zero.checkpoint.manifest import manifest_path
from hf_zero.checkpoint.names import saved_tensors, shortened
from hf_zero.checkpoint.state import Optimizer
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.engine import Sharded, ZeroEngine, require_engine
from hf_zero.errors import CheckpointError, HfZeroError


# Parts of names that wrappers of modules leave in state dicts.
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Settings that say how a step is computed, not what it computes: this run keeps its own.
_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))
# Switches that tell optimizers apart whose state looks the same.
_SWITCHES = ("decoupled_weight_decay", "amsgrad", "nesterov", "centered", "maximize")


@dataclass(frozen=True)
class ForeignFormat:
    """The format of another program's checkpoints."""

    name: str
    read_weights: Callable[[Path], dict[str, ForeignTensor]] | None  # None where they are a model folder's safetensors
    read_state: Callable[[Path, Sequence[dict]], ForeignState]  # given this run's optimizer groups


DEEPSPEED = ForeignFormat("DeepSpeed ZeRO", deepspeed.read_weights, deepspeed.read_state)
FSDP = ForeignFormat("FSDP", dcp.fsdp_weights, dcp.fsdp_state)
DCP = ForeignFormat("torch distributed checkpoint", dcp.read_weights, dcp.read_state)
TRAINER = ForeignFormat("Trainer", None, lambda folder, groups: dcp.full_state(folder / dcp.OPTIMIZER_NAME, groups))


def detect(folder: str | os.PathLike) -> ForeignFormat | None:
    """Detects which program wrote a checkpoint, by the files in the folder. Only DeepSpeed's `latest` is opened.
    Returns `None` for a checkpoint of hf_zero's own, for weights alone and for what is not known."""
    folder = Path(folder)
    if manifest_path(folder).exists():
        return None
    if deepspeed.tag_folder(folder) is not None:
        return DEEPSPEED
    sharded, full = folder / f"{dcp.FSDP_WEIGHTS}_0" / dcp.INDEX_NAME, folder / f"{dcp.FSDP_WEIGHTS}.bin"
    if sharded.exists() or full.exists():
        return FSDP
    if (folder / dcp.INDEX_NAME).exists():
        return DCP
    return TRAINER if (folder / dcp.OPTIMIZER_NAME).exists() else None


@dataclass(frozen=True)
class Carried:
    """The facts that a foreign checkpoint has of its run, beside weights and optimizer state."""

    num_steps: int | None  # optimizer steps taken, where a file says it
    position: bool  # `trainer_state.json`, from which Trainer finds its place in the data
    scheduler: bool  # `scheduler.pt`; without it a schedule can only be moved on to `num_steps`
    rng_ranks: int  # whose random states were saved; Trainer takes them up when it runs on as many


def carried(folder: str | os.PathLike) -> Carried:
    """Returns the facts of a foreign run that can be taken over beside weights and optimizer state. Raises
    [`CheckpointError`] for a damaged DeepSpeed checkpoint."""
    folder = Path(folder)
    position = folder / "trainer_state.json"
    num_steps = None
    if position.exists():
        num_steps = read_json(position).get("global_step")
    elif detect(folder) is DEEPSPEED:
        num_steps = deepspeed.num_steps(folder)
    rng = [path for path in folder.glob("rng_state*.pth") if re.fullmatch(r"rng_state(_\d+)?\.pth", path.name)]
    return Carried(num_steps, position.exists(), (folder / "scheduler.pt").exists(), len(rng))


def load_foreign(model: Sharded, optimizer: Optimizer, folder: str | os.PathLike) -> None:
    """Loads weights and optimizer state of a run of DeepSpeed, FSDP, torch's distributed checkpoints or plain Trainer.
    Collective.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        optimizer ([`Optimizer`]): of the same kind, over the same trainable parameters, not stepped yet.
        folder (`str` or `os.PathLike`): the checkpoint, seen by all ranks.

    Raises:
        `CheckpointError`: as `load_foreign_weights` and `load_foreign_state`.
    """
    engine = require_engine(model)
    load_foreign_weights(engine, folder)
    load_foreign_state(engine, optimizer, folder)


def load_foreign_weights(engine: ZeroEngine, folder: str | os.PathLike) -> None:
    """Loads a foreign checkpoint's weights into the masters. Collective; fails on all ranks or on none.

    fp32 values are taken where the checkpoint has them. Names, shapes and the completeness of files are checked before
    the first value is written. Of a PEFT model, frozen weights that were left out keep their values. Any number of
    ranks may have written them. Raises [`CheckpointError`] where the folder is of no known kind, damaged, names code
    to run, or tensors are missing, left over or of other shapes.
    """
    kind = run_on_all_ranks(engine.comm, f"loading {folder}", lambda: _known(folder))
    read_weights = kind.read_weights
    if read_weights is None:
        load_weights(engine, folder)
        return

    def read() -> list[str]:
        with _understood(folder):
            found = _by_own_name(engine.model, read_weights(Path(folder)))
        buffers = [saved for saved in saved_tensors(engine.model, engine.param_infos()) if saved.buffer is not None]
        _check_weights(engine, folder, found, {saved.name: tuple(saved.shape) for saved in buffers})
        names = [info.name for info in engine.param_infos() if info.name in found]
        names += [saved.name for saved in buffers]
        begin_load(engine, names, folder)
        with torch.no_grad():
            for shard in engine.named_shards(resident=True):
                if shard.name in found:
                    found[shard.name].read_range(shard.start, shard.tensor)
            for saved in buffers:
                saved.fill_buffer(partial(found[saved.name].read_range, 0))
        return names

    engine.begin_update()
    engine.evict_all()
    end_load(engine, run_on_all_ranks(engine.comm, f"loading {folder}", read))


def load_foreign_state(engine: ZeroEngine, optimizer: Optimizer, folder: str | os.PathLike) -> None:
    """Loads a foreign checkpoint's optimizer state and hyperparameters. Collective. Load the weights first.

    A parameter without state in the checkpoint has had no gradient there and starts without state here. Raises
    [`CheckpointError`] where the state is missing, damaged, of other parameters, shapes or of another optimizer.
    """
    kind = run_on_all_ranks(engine.comm, f"loading {folder}", lambda: _known(folder))

    def read() -> None:
        groups = optimizer.groups_state()
        with _understood(folder):
            state = kind.read_state(Path(folder), groups)
        state.tensors = _by_own_name(engine.model, state.tensors)
        state.numbers = _by_own_name(engine.model, state.numbers)
        state.settings = _by_own_name(engine.model, state.settings)
        shape_of = {info.name: tuple(info.shape) for info in engine.param_infos()}
        _check_names(folder, state, {name for group in groups for name in group["param_names"]}, shape_of)
        loaded = _groups(folder, groups, state.settings)
        optimizer.torn = f"loading the state of {folder}"
        optimizer.load_groups_state(loaded)
        if not state.numbers and not all("dampening" in group and not group["momentum"] for group in loaded):
            raise CheckpointError(f"{folder}: has no optimizer state; remove its file to go on with a new optimizer")
        optimizer.load_scalar_state(state.numbers)
        _check_keys(folder, state, optimizer)
        with torch.no_grad():
            for key, shard in optimizer.named_state_shards(resident=True):
                tensor = state.tensors.get(shard.name, {}).get(key)
                if tensor is not None:
                    tensor.read_range(shard.start, shard.tensor)

    engine.begin_update()
    run_on_all_ranks(engine.comm, f"loading the optimizer of {folder}", read)
    engine.mark_updated()
    optimizer.torn = None


@contextmanager
def _understood(folder: str | os.PathLike) -> Iterator[None]:
    """Turns errors that arise while foreign files are read into one line, since the files may hold anything."""
    try:
        yield
    except (HfZeroError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{folder}: cannot be understood ({type(error).__name__}: {reason}); copy the checkpoint again"
        ) from error


def _known(folder: str | os.PathLike) -> ForeignFormat:
    kind = detect(folder)
    if kind is None:
        raise CheckpointError(
            f"{folder}: is no checkpoint of DeepSpeed ZeRO, FSDP, torch.distributed.checkpoint or Trainer with its "
            "optimizer; give the folder that holds such files, e.g. checkpoint-500"
        )
    return kind


def _by_own_name(model: nn.Module, found: Mapping[str, Any]) -> dict[str, Any]:
    """Renames tied parameters to their first name, which is the engine's."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    own = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    renamed: dict[str, Any] = {}
    for name, value in found.items():
        name = _WRAPPERS.sub("", name)
        renamed.setdefault(own.get(name, name), value)
    return renamed


def _check_weights(
    engine: ZeroEngine,
    folder: str | os.PathLike,
    found: Mapping[str, ForeignTensor],
    buffers: Mapping[str, tuple[int, ...]],
) -> None:
    wanted = {info.name: tuple(info.shape) for info in engine.param_infos()} | dict(buffers)
    frozen = {info.name for info in engine.param_infos() if not info.trainable}
    missing = [name for name in wanted if name not in found]
    if hasattr(engine.model, "peft_config") and frozen.issuperset(missing):
        missing = []
    ignored = ignored_pattern(engine.model)
    known = set(wanted) | {name for name, _ in engine.model.named_buffers(remove_duplicate=False)}
    left = [name for name in found if name not in known and not (ignored is not None and ignored.search(name))]
    if missing or left:
        raise CheckpointError(f"{folder}: {_differences(missing, left)}; give a checkpoint of this model")
    for name in wanted.keys() & found.keys():
        _check_shape(folder, name, found[name], wanted[name])


def _check_names(
    folder: str | os.PathLike, state: ForeignState, trainable: set[str], shape_of: Mapping[str, tuple[int, ...]]
) -> None:
    missing = [name for name in trainable if math.prod(shape_of[name]) and name not in state.settings]
    left = [name for name in state.numbers | state.settings if name not in trainable]
    if missing or left:
        raise CheckpointError(
            f"{folder}: of the optimizer, {_differences(missing, left)}; "
            "resume with the model and the trainable parameters that it was saved with"
        )


def _check_shape(folder: str | os.PathLike, name: str, tensor: ForeignTensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{folder}: {name} has shape {list(tensor.shape)}, {list(wanted)} in this model; "
            "use the config that it was saved with"
        )


def _check_keys(folder: str | os.PathLike, state: ForeignState, optimizer: Optimizer) -> None:
    """Refuses state whose keys or shapes are not those of this optimizer."""
    held: dict[str, set[str]] = {}
    for key, shard in optimizer.named_state_shards(resident=True, values=False):
        held.setdefault(shard.name, set()).add(key)
        tensor = state.tensors.get(shard.name, {}).get(key)
        if tensor is not None:
            _check_shape(folder, f"{shard.name}.{key}", tensor, tuple(shard.shape))
    for name, keys in held.items():
        found = set(state.tensors.get(name, ()))
        if found - keys or keys - found - set(state.numbers.get(name, ())):
            raise CheckpointError(
                f"{folder}: the optimizer state of {name} is {sorted(found)}, this run's {sorted(keys)}; "
                "resume with the optimizer that it was saved with"
            )


def _groups(folder: str | os.PathLike, groups: Iterable[dict], settings: Mapping[str, dict]) -> list[dict]:
    """Returns this run's groups with the hyperparameters that their parameters had."""
    loaded = []
    for group in groups:
        keys = (group.keys() | {"initial_lr"}) - _HOW - {"param_names"}
        first, found = None, {}
        for name in group["param_names"]:
            own = {key: _plain(value) for key, value in settings.get(name, {}).items() if key in keys}
            if own and first is None:
                first, found = name, own
            elif own and own != found:
                key = next(key for key in own.keys() | found.keys() if own.get(key) != found.get(key))
                raise CheckpointError(
                    f"{folder}: {key} is {found.get(key)} for {first}, {own.get(key)} for {name}, which are one group "
                    "here; make the groups as in the run that saved it"
                )
        _check_settings(folder, group, found)
        loaded.append({"param_names": group["param_names"], **found} if found else group)
    return loaded


def _check_settings(folder: str | os.PathLike, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuses hyperparameters of another optimizer."""
    for key in _SWITCHES:
        if key in found and bool(found[key]) != bool(own[key]):
            raise CheckpointError(
                f"{folder}: was saved with {key}={found[key]}, this run's optimizer has {own[key]}; "
                "resume with the optimizer that it was saved with"
            )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _differences(missing: list[str], left: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing ({shortened(missing)})")
    if left:
        parts.append(f"{len(left)} are not this run's ({shortened(left)})")
    return ", ".join(parts)
