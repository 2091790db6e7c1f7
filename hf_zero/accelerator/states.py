"""Saving and loading of `ZeroAccelerator`. All ranks write and read their ranges of models and optimizers; accelerate
handles everything else."""

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME
from torch import Tensor

from hf_zero import checkpoint as files
from hf_zero.checkpoint import Checkpoint, check_checkpoint, plan_state
from hf_zero.checkpoint.adapters import (
    is_adapter_model,
    load_model,
    lost_beside_adapters,
    plan_model,
    refuse_adapters,
)
from hf_zero.checkpoint.folders import recover, remove_folder
from hf_zero.checkpoint.names import named_tensors
from hf_zero.checkpoint.staging import StagedFiles
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.compat import replaced
from hf_zero.engine import ZeroEngine, engine_of, gathered
from hf_zero.engine.divided import with_local
from hf_zero.engine.guards import take_here
from hf_zero.errors import CheckpointError, ConfigError, LifecycleError
from hf_zero.optim import ShardedOptimizer, sharded_of


logger = logging.getLogger(__name__)


@dataclass
class LastStep:
    """The loss and the gradient norm of the last optimizer step."""

    loss: Tensor | None = None  # 0-d: this rank's sum over the micro-batches of the step
    grad_norm: Tensor | None = None  # 0-d: global norm before clipping; Trainer measures it also without clipping
    _is_over: bool = True

    def add(self, loss: Tensor, *, ends: bool) -> None:
        """Adds the loss of a micro-batch. `ends`: it is the last of the step."""
        self.loss = loss if self._is_over else self.loss + loss
        self._is_over = ends

    def facts(self, engine: ZeroEngine) -> dict[str, float | None]:
        """Returns the mean loss over the ranks and the gradient norm for a manifest; `None` if they are not finite
        (JSON has no NaN). A collective."""
        own = torch.full((1,), math.nan) if self.loss is None else self.loss.detach().float().reshape(1)
        mean = engine.comm.all_gather_vector(own.to(engine.comm.device)).mean()
        return {"loss": _as_json(mean), "grad_norm": _as_json(self.grad_norm)}


def _as_json(value: Tensor | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def save_run(
    accelerator: Accelerator,
    last_step: LastStep,
    save_rest: Callable[[str], object],
    output_dir: str | os.PathLike | None,
    *,
    max_shard_size: int | str = "50GB",
) -> str:
    """Writes a checkpoint, see `ZeroAccelerator.save_state`. `save_rest` makes accelerate save everything except
    models and optimizers into a folder."""
    settings = accelerator.project_configuration
    (engine, optimizer), *others = _prepared(accelerator, "save_state")
    folder = run_on_all_ranks(engine.comm, "save_state", lambda: _new_folder(accelerator, output_dir))
    rest = StagedFiles(write_beside=lambda path: save_rest(str(path)))
    checkpoint = _begin(last_step, engine, optimizer, folder, max_shard_size, rest)
    with checkpoint.or_discard():
        for index, (other, its_optimizer) in enumerate(others, 1):
            _begin(last_step, other, its_optimizer, checkpoint.path / f"model_{index}", max_shard_size).finish()
        with _without_models(accelerator):
            checkpoint.finish()
    if settings.automatic_checkpoint_naming and settings.total_limit is not None and accelerator.is_main_process:
        for old in _named(Path(folder).parent)[: -settings.total_limit]:
            remove_folder(old)
    return str(folder)


def load_run(
    accelerator: Accelerator, load_rest: Callable[[str], object], input_dir: str | os.PathLike | None
) -> None:
    """Loads a checkpoint, see `ZeroAccelerator.load_state`. `load_rest` makes accelerate load everything except models
    and optimizers from a folder."""
    prepared = _prepared(accelerator, "load_state")
    comm = prepared[0][0].comm
    folder = run_on_all_ranks(comm, "load_state", lambda: _existing(accelerator, input_dir))
    folders = [folder, *(folder / f"model_{index}" for index in range(1, len(prepared)))]

    def check() -> None:
        if (folder / f"model_{len(prepared)}").exists():
            raise CheckpointError(
                f"{folder}: has more models than the {len(prepared)} prepared ones; prepare them all"
            )
        for each in folders:
            check_checkpoint(each)

    run_on_all_ranks(comm, f"loading {folder}", check)
    for (engine, optimizer), each in zip(prepared, folders, strict=True):
        load_model(engine, str(each))
        if optimizer is not None:
            files.load_state(engine, optimizer, each)
    with _without_models(accelerator):
        run_on_all_ranks(comm, f"loading {folder}", lambda: load_rest(str(folder)))
    if not (folder / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl").exists():
        logger.warning("%s: has no random state of rank %d; it is not restored", folder, accelerator.process_index)


def save_model(engine: ZeroEngine, folder: str | os.PathLike, *, max_shard_size: int | str) -> None:
    """Saves a model for `from_pretrained`, or its adapters for PEFT. A collective."""
    lost = lost_beside_adapters(engine.model) if is_adapter_model(engine.model) else None
    if lost is not None and engine.comm.rank == 0:
        logger.warning("%s: %s", folder, lost)
    files.save_pretrained(engine, folder, max_shard_size=max_shard_size)


def save_prepared(
    engine: ZeroEngine,
    own: Callable[..., object],
    save_directory: str | os.PathLike,
    is_main_process: bool | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    **kwargs,
) -> None:
    """Replaces `save_pretrained` of a prepared model. With `state_dict`, or if the parameters are gathered, it calls
    the original method. Otherwise all ranks must call it with `is_main_process`, as in accelerate's examples.

    Args:
        engine (`ZeroEngine`): The model's engine.
        own (`Callable`): The original method.
        save_directory, is_main_process, state_dict, kwargs: Arguments of the original method.

    Raises:
        `LifecycleError`: If the parameters are sharded and `is_main_process` is not passed.
        `ConfigError`: If the parameters are sharded and an argument needs the original method.
    """
    if state_dict is not None or all(unit.is_unsharded for unit in engine.units):
        if is_main_process in (None, True):
            own(save_directory, **kwargs, **({} if state_dict is None else {"state_dict": state_dict}))
        return
    if is_main_process is None:
        raise LifecycleError(
            f"save_pretrained: the parameters are sharded over {engine.comm.shard_group.num_ranks} ranks; call it on "
            "all ranks with is_main_process=accelerator.is_main_process, or inside `with hf_zero.gathered(model):`"
        )
    refuse_pickles(kwargs.pop("safe_serialization", True))
    kwargs.pop("save_function", None)
    max_shard_size = kwargs.pop("max_shard_size", "50GB")
    if kwargs:
        raise ConfigError(
            f"save_pretrained: {next(iter(kwargs))} is not supported while the parameters are sharded; also pass "
            "state_dict=accelerator.get_state_dict(model)"
        )
    save_model(engine, save_directory, max_shard_size=max_shard_size)


def whole_state_dict(engine: ZeroEngine) -> dict[str, Tensor]:
    """Gathers the full state dict unit by unit on the CPU of rank 0. Other ranks get an empty one. A collective.

    Parameters with master weights of another dtype have the values of the masters, as in `save_model`.
    """
    whole: dict[int, Tensor] = {}
    engine.check_before_save()
    if not engine.is_cast:
        take_here(engine, engine.flats)  # apply user writes to replicated parameters
    for unit in engine.units:
        shown = [p for flat in unit.flats if flat.masters.dtype is flat.dtype for p in flat.params]
        with gathered(shown):
            if engine.comm.rank == 0:
                whole |= {id(p): p.detach().cpu().clone() for p in shown}
        for flat in unit.flats:
            for p, values in flat.whole_params(unit.name) if flat.masters.dtype is not flat.dtype else ():
                if engine.comm.rank == 0:
                    whole[id(p)] = with_local(p, values).detach().cpu().clone()
    named = named_tensors(engine.model) if engine.comm.rank == 0 else ()
    return {name: whole[id(tensor)] if id(tensor) in whole else tensor.detach().cpu() for name, tensor in named}


def refuse_pickles(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ConfigError("safe_serialization: only safetensors files are supported; remove it")


def _prepared(accelerator: Accelerator, what: str) -> list[tuple[ZeroEngine, ShardedOptimizer | None]]:
    """Returns the engines of the prepared models, each with its optimizer."""
    engines = [engine_of(model) for model in accelerator._models]
    if not engines:
        raise ConfigError(f"{what}: no model is prepared; prepare model and optimizer first")
    optimizers = {sharded.engine: sharded for sharded in map(sharded_of, accelerator._optimizers)}
    return [(engine, optimizers.get(engine)) for engine in engines]


def _begin(
    last_step: LastStep,
    engine: ZeroEngine,
    optimizer: ShardedOptimizer | None,
    folder: str | os.PathLike,
    max_shard_size: int | str,
    rest: StagedFiles | None = None,
) -> Checkpoint:
    if is_adapter_model(engine.model):
        refuse_adapters(engine.model)
    state = None
    if optimizer is not None:
        state = plan_state(engine, optimizer, step=optimizer.num_steps, **last_step.facts(engine))
    return Checkpoint.begin(engine, folder, plan_model(engine, max_shard_size=max_shard_size), state, rest)


@contextmanager
def _without_models(accelerator: Accelerator) -> Iterator[None]:
    """Hides models and optimizers from accelerate, and makes it use the given folder."""
    settings = accelerator.project_configuration
    with replaced(accelerator, _models=[], _optimizers=[]), replaced(settings, automatic_checkpoint_naming=False):
        yield


def _new_folder(accelerator: Accelerator, given: str | os.PathLike | None) -> Path:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        if given is None:
            raise ConfigError(
                "save_state: needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(os.path.expanduser(given))
    folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
    if folder.exists():
        raise ConfigError(
            f"{folder}: already exists; set ProjectConfiguration(iteration=...) to the number of the next checkpoint"
        )
    return folder


def _existing(accelerator: Accelerator, given: str | os.PathLike | None) -> Path:
    if given is not None:
        folder = Path(os.path.expanduser(given))
        recover(folder.absolute().parent)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: does not exist; pass a folder of save_state")
        return folder
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("load_state: needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
    folder = Path(accelerator.project_dir, "checkpoints")
    found = _named(folder)
    if not found:
        raise CheckpointError(f"{folder}: has no checkpoint; pass input_dir")
    return found[-1]


def _named(folder: Path) -> list[Path]:
    """Returns the numbered checkpoints, oldest first."""
    found = [(re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.glob("checkpoint_*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]
