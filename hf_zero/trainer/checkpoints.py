"""The checkpoints of a trainer. All ranks write and read their own ranges of the tensors. Trainer writes its files
into a temporary folder, which is renamed when it is complete."""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_zero.accelerator.states import whole_state_dict
from hf_zero.checkpoint import Checkpoint, Snapshots, load_state, load_weights, plan_state, plan_weights
from hf_zero.checkpoint.adapters import load_model, plan_model
from hf_zero.checkpoint.manifest import run_of
from hf_zero.checkpoint.names import named_tensors
from hf_zero.checkpoint.plain import is_plain, load_plain_state
from hf_zero.checkpoint.staging import StagedFiles
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.compat import replaced
from hf_zero.engine import ZeroEngine
from hf_zero.errors import MissingCheckpointError
from hf_zero.trainer.resumable import read_step, rotate


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)

PARAMETERS_NAME = "parameters.safetensors"  # saved in addition, if a trainer's `_save` writes the weights


class Checkpoints:
    """Saves and loads the checkpoints of one trainer. Every rank writes and reads its own ranges, so all ranks must
    call each method.

    A subclass of Trainer may override `_save` and write the weights itself (`saves_itself`), as in
    sentence-transformers. Only that method knows the files and names, so rank 0 calls it on a model with full values,
    gathered on the CPU unit by unit. All ranks additionally write their ranges of the parameters.

    Attributes:
        current (`Checkpoint`, *optional*): The checkpoint that Trainer is writing, or `None`.
        push (`Callable`, *optional*): An upload to start when the checkpoint is complete.
    """

    def __init__(self, trainer: "ZeroTrainerMixin", *, in_background: bool):
        self.current: Checkpoint | None = None
        self.push: Callable[[], None] | None = None
        self._write_model: Callable[[str | Path], None] | None = None  # during Trainer's `write`; see `_gathered`
        self._trainer = trainer
        self._snapshots = Snapshots() if in_background else None  # copies that the background thread writes
        self._written: Checkpoint | None = None  # until `wait`
        self._newest: Path | None = None  # newest complete checkpoint

    @property
    def _engine(self) -> ZeroEngine:
        return self._trainer._engine

    def save(self, run_dir: str, write: Callable[[], None]) -> None:
        """Calls Trainer's `write` on a temporary folder, adds the tensors, and renames the folder."""
        self.wait()
        trainer, engine, state = self._trainer, self._engine, None
        folder = os.path.join(run_dir, checkpoint_name(trainer.state.global_step))
        optimizer = trainer._prepared_optimizer
        optimizer.eval()  # schedule-free optimizers save their evaluation weights; the next step switches back
        if not trainer.args.save_only_model:
            state = plan_state(engine, optimizer, **trainer._facts())
        weights = plan_parameters(engine) if trainer.saves_itself() else plan_model(engine)
        best: list[str | None] = []  # at the time of this checkpoint

        def act(path: Path) -> None:
            # A rank that fails in `write` skips no collective: Trainer's come first, and its barrier is off.
            with replaced(trainer.state, best_global_step=None):
                with replaced(self, _write_model=self._gathered()):  # and no longer: it holds what was gathered
                    write()
            self._note_best(run_dir, path)
            best.append(trainer.state.best_model_checkpoint)

        checkpoint = Checkpoint.begin(engine, folder, weights, state, StagedFiles(write_beside=act))
        limit = trainer.args.save_total_limit
        with checkpoint.or_discard(), replaced(self, current=checkpoint):
            trainer._save_other_models(checkpoint.path)
            checkpoint.finish(self._snapshots, after=lambda: rotate(run_dir, limit, best[0], folder))
        self._written = checkpoint
        if self._snapshots is None:
            self.wait()

    def _note_best(self, run_dir: str, saved: Path) -> None:
        """Records the best checkpoint, with its final path."""
        state = self._trainer.state
        if not state.best_global_step:
            return
        path = os.path.join(run_dir, checkpoint_name(state.best_global_step))
        if state.best_global_step == state.global_step or os.path.isdir(path):
            state.best_model_checkpoint = path
        if self._trainer.args.should_save:
            state.save_to_json(str(saved / TRAINER_STATE_NAME))

    def wait(self) -> Path | None:
        """Waits for the checkpoint to complete, uploads it if requested, and returns the newest checkpoint. Raises
        [`CheckpointError`] on all ranks if it could not be saved."""
        written, self._written = self._written, None
        push, self.push = self.push, None  # of a checkpoint that could not be saved, if `written` is None
        if written is not None:
            written.wait()
            self._newest = written.folder
            if push is not None:
                push()
        return self._newest

    def save_model(self, output_dir: str) -> None:
        """Writes the model into the checkpoint that is being saved, or into a separate folder."""
        trainer = self._trainer
        trainer.accelerator.shard(trainer.model)
        if trainer._zero_optimizer is not None:
            trainer._zero_optimizer.eval()
        if self._write_model is not None:
            self._write_model(output_dir)
            return
        self.wait()
        if not trainer.saves_itself():  # first, and on their own: `_save` may fail, and they are what was trained
            weights = plan_model(self._engine, resumes=False)
            Checkpoint.begin(self._engine, output_dir, weights, adds=True).finish()
        others = StagedFiles(write_beside=self._gathered())
        Checkpoint.begin(self._engine, output_dir, others, adds=True).finish()

    def _gathered(self) -> Callable[[str | Path], None]:
        """Returns a function that calls Trainer's `_save` with a folder on rank 0. All ranks must call it, since it
        gathers the full values if that method writes the weights."""
        trainer = self._trainer
        if trainer.saves_itself():
            return with_whole_values(self._engine, trainer._save)
        return trainer._save if trainer.args.should_save else lambda folder: None

    def save_schedule(self, folder: str) -> None:
        """Writes the schedule. The optimizer is in the checkpoint's state."""
        schedule = self._trainer.lr_scheduler

        def act() -> None:
            with warnings.catch_warnings(action="ignore"):  # torch warns if the optimizer is not saved with it
                torch.save(schedule.state_dict(), os.path.join(folder, SCHEDULER_NAME))

        if schedule is not None and self.current is not None:  # all ranks raise if `save` fails on one
            on_first(self._engine.comm, act)()
        elif schedule is not None:
            run_on_all_ranks(self._engine.comm, f"{folder}: saving the scheduler", on_first(self._engine.comm, act))

    def load_weights(self, folder: str) -> None:
        """Reads each rank's ranges of the weights. No rank holds the full model."""
        engine = self._trainer.accelerator.shard(self._trainer.model)
        if self._trainer.saves_itself():
            load_parameters(engine, folder)
        else:
            load_model(engine, folder)

    def load_optimizer(self, folder: str) -> None:
        """Loads optimizer state, hyperparameters and schedule, and logs the settings of this run that they replace."""
        optimizer, given = self._trainer._prepared_optimizer, self._hyperparameters()
        if is_plain(folder):
            load_plain_state(self._engine, optimizer, folder)
        elif run_of(folder) is not None:
            load_state(self._engine, optimizer, folder)
        else:
            logger.warning("%s: has no optimizer state (save_only_model); the optimizer starts from scratch", folder)
            return
        run_on_all_ranks(self._engine.comm, f"{folder}: loading the scheduler", lambda: self._load_schedule(folder))
        for (name, now), before in zip(given.items(), self._hyperparameters().values()):
            if self._trainer.args.should_log and before != now:
                logger.warning(
                    "%s: the checkpoint's %s (%s) is used instead of the given one (%s); to change it, start a new "
                    "run from its weights",
                    *(folder, name, before, now),
                )

    def _hyperparameters(self) -> dict[str, Any]:
        """Returns the values of the first parameter group that have each hyperparameter that checkpoints contain."""
        groups = self._trainer.optimizer.param_groups
        found = {"learning rate": next(iter(getattr(self._trainer.lr_scheduler, "base_lrs", ())), None)}
        for key in ("weight_decay", "betas", "eps", "momentum", "alpha"):
            value = next((group[key] for group in groups if key in group), None)
            found[key] = tuple(value) if isinstance(value, list) else value
        return found

    def _load_schedule(self, folder: str) -> None:
        schedule, path = self._trainer.lr_scheduler, Path(folder, SCHEDULER_NAME)
        groups = self._trainer.optimizer.param_groups
        saved = load_safely(path) if path.is_file() else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # DeepSpeed drops empty parameter groups, so its schedule may have fewer groups.
            if saved is not None and len(saved.get("base_lrs", groups)) == len(groups):
                schedule.load_state_dict(saved)
                return
            num_steps = read_step(Path(folder))
            logger.warning("%s: is missing or incompatible; this run's schedule continues at step %d", path, num_steps)
            for _ in range(num_steps):
                schedule.step()


def checkpoint_name(step: int) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


# Trainers that write the weights themselves


def plan_parameters(engine: ZeroEngine) -> StagedFiles:
    """Plans the parameters and buffers under the model's own names. All ranks must call it."""
    return plan_weights(engine, weights_name=PARAMETERS_NAME, keys=_keys(engine), write_beside=lambda _: None)


def load_parameters(engine: ZeroEngine, folder: str | os.PathLike) -> None:
    """Reads the file of `plan_parameters`; every rank reads its own ranges. All ranks must call it."""

    def check() -> None:
        if not os.path.isfile(os.path.join(folder, PARAMETERS_NAME)):
            raise MissingCheckpointError(
                f"{folder}: has no {PARAMETERS_NAME}, so it is not a checkpoint of this trainer with ZeRO; load the "
                "model from it and start a new run, or pass another checkpoint"
            )

    run_on_all_ranks(engine.comm, f"loading {folder}", check)
    load_weights(engine, folder, weights_name=PARAMETERS_NAME, keys=_keys(engine))


def with_whole_values(engine: ZeroEngine, save: Callable[[str | Path], None]) -> Callable[[str | Path], None]:
    """Gathers the full values, and returns a function that calls `save` with a folder while the model has these values
    in the dtypes in which they are saved. On ranks other than 0 the function does nothing. All ranks must call it."""
    whole = whole_state_dict(engine)
    if engine.comm.rank:
        return lambda folder: None
    values = {f"model.{info.name}": whole[info.name].to(info.save_dtype) for info in engine.param_infos()}
    return lambda folder: functional_call(_Act(engine.model, save), values, (folder,))


def _keys(engine: ZeroEngine) -> dict[str, str]:
    return {name: name for name, _ in named_tensors(engine.model)}


class _Act(nn.Module):
    def __init__(self, model: nn.Module, act: Callable[[str | Path], None]):
        super().__init__()
        self.model, self._act = model, act

    def forward(self, folder: str | Path) -> None:
        self._act(folder)
