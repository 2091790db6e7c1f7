"""The optimizer state of a plain Trainer run (`optimizer.pt`), from which ZeroTrainer can resume."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.convert.state import SavedState, state_by_name
from hf_zero.checkpoint.manifest import is_saved_here
from hf_zero.checkpoint.state import Optimizer
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.engine import ZeroEngine
from hf_zero.errors import CheckpointError


PLAIN_OPTIMIZER = "optimizer.pt"


def is_plain(folder: str | os.PathLike) -> bool:
    """Returns whether a checkpoint was saved by a plain Trainer, with optimizer state."""
    return (Path(folder) / PLAIN_OPTIMIZER).exists() and not is_saved_here(folder)


def load_plain_state(engine: ZeroEngine, optimizer: Optimizer, folder: str | os.PathLike) -> None:
    """Loads `optimizer.pt`; every rank copies its own ranges. A collective. Load the weights first.

    Parameters without state in the file had no gradient, and start without state. Raises [`CheckpointError`] if the
    state is missing, damaged, or of other parameters, shapes or another optimizer.
    """
    path = Path(folder) / PLAIN_OPTIMIZER

    def read() -> None:
        groups = optimizer.groups_state()
        saved = load_safely(path, mmap=True)
        state = state_by_name(path, saved, _names(path, saved.get("param_groups", ()), groups))
        optimizer.torn = f"loading the state of {folder}"
        optimizer.load_groups_state(state.groups())
        if not state.numbers and not all("dampening" in group and not group["momentum"] for group in groups):
            raise CheckpointError(f"{path}: has no optimizer state; remove it to continue with a new optimizer")
        optimizer.load_scalar_state(state.numbers)
        _check_keys(path, state, optimizer)
        with torch.no_grad():
            for key, shard in optimizer.named_state_shards(resident=True):
                tensor = state.tensors.get(shard.name, {}).get(key)
                if tensor is not None:
                    shard.tensor.copy_(tensor.reshape(-1)[shard.start : shard.start + shard.tensor.numel()])

    engine.begin_update()
    run_on_all_ranks(engine.comm, f"loading the optimizer of {folder}", read)
    engine.mark_updated()
    optimizer.torn = None


def _names(path: Path, saved_groups: Sequence[dict], groups: Sequence[dict]) -> Mapping[Any, str]:
    """Returns the name of each parameter index. A plain optimizer numbers parameters in the order of its groups, which
    Trainer creates in the order of the model, so the names are those of this run's groups."""
    if not all("param_names" in group for group in saved_groups):
        found, own = (
            [len(group[key]) for group in of] for of, key in ((saved_groups, "params"), (groups, "param_names"))
        )
        if found != own:
            raise CheckpointError(
                f"{path}: its groups have {found} parameters, but this run's have {own}; "
                "resume with the trainable parameters and groups of the run that saved it"
            )
    named = [group if "param_names" in group else own for group, own in zip(saved_groups, groups)]
    return {
        param: name
        for saved, group in zip(saved_groups, named)
        for param, name in zip(saved["params"], group["param_names"], strict=True)
    }


def _check_keys(path: Path, state: SavedState, optimizer: Optimizer) -> None:
    """Raises if keys or shapes of the state differ from this optimizer's."""
    held: dict[str, dict[str, torch.Size]] = {}
    for key, shard in optimizer.named_state_shards(resident=True, values=False):
        held.setdefault(shard.name, {})[key] = torch.Size(shard.shape)
    for name, shapes in held.items():
        found = {key: tensor.shape for key, tensor in state.tensors.get(name, {}).items()}
        wanted = {key: shape for key, shape in shapes.items() if key not in state.numbers.get(name, ())}
        if found != wanted:
            raise CheckpointError(
                f"{path}: the optimizer state of {name} is {_described(found)}, but this run's is "
                f"{_described(wanted)}; resume with the optimizer and the config that it was saved with"
            )


def _described(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in sorted(shapes.items())) or "empty"
