"""Loads a checkpoint into a trainer: weights, optimizer and schedule. It tells what is not as it was before."""

import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.optimization import AdafactorSchedule
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_zero.checkpoint import load_state
from hf_zero.checkpoint.adapters import load_model
from hf_zero.checkpoint.folders import recover
from hf_zero.checkpoint.manifest import run_of
from hf_zero.checkpoint.plain import is_plain, load_plain_state
from hf_zero.checkpoint.trusted import load_small
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.compat import check_overrides
from hf_zero.errors import CheckpointError
from hf_zero.trainer.batches import Position
from hf_zero.trainer.resumable import chosen, position_of, read_step, refuse_damaged
from hf_zero.trainer.trainer_base import ZeroTrainerBase
from hf_zero.trainer.whole import load_parameters, saves_whole


logger = logging.getLogger(__name__)

OVERRIDES = ("_load_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model")


def changes(
    scheduler: LRScheduler, saved: dict, *, given: list[float], num_steps: int, num_steps_before: int | None
) -> Iterator[str]:
    """Yields a sentence for each setting that differs from the run that saved the checkpoint.

    Args:
        scheduler (`LRScheduler`): as it goes on: this run's, with the state that was saved.
        given (`list[float]`): by group the learning rate that this run was given.
        num_steps, num_steps_before: for which this run makes its schedule, and the run that saved did.
    """
    for base, own in zip(getattr(scheduler, "base_lrs", ()), given):  # ReduceLROnPlateau has none
        if not math.isclose(base, own, rel_tol=1e-6):
            yield (
                f"the learning rate of the checkpoint goes on ({base:.3g}), not the given one ({own:.3g}); for that, "
                "start a new run from its weights"
            )
            break
    for before, after in zip(saved.get("_last_lr", ()), _rates(scheduler)):
        if _is_unlike(before, after):
            jumps = f"step {scheduler.last_epoch}: the learning rate goes from {before:.3g} to {after:.3g}"
            if num_steps_before not in (None, num_steps):
                yield (
                    f"{jumps}, since its schedule is now made for {num_steps} steps and was for {num_steps_before}; "
                    f"to keep the old one, resume with --max_steps {num_steps_before}"
                )
            else:
                yield (
                    f"{jumps}, since its schedule has other settings now; to keep the old one, resume with the "
                    "--lr_scheduler_type, --lr_scheduler_kwargs and --warmup_steps of before"
                )
            return


# Hyperparameters of an optimizer's groups that a checkpoint brings along.
_HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum", "alpha")


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in optimizer.param_groups]


def changed_hyperparameters(given: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a sentence for each hyperparameter that this run was given and that the checkpoint's replaces."""
    for key in _HYPERPARAMETERS:
        pairs = [(old[key], new[key]) for old, new in zip(loaded, given) if key in old and key in new]
        for before, now in [(old, new) for old, new in pairs if _numbers(old) != _numbers(new)][:1]:
            yield (
                f"the {key} of the checkpoint goes on ({before}), not the given one ({now}); for that, start a new "
                "run from its weights"
            )


def _numbers(value: Any) -> list[float]:
    return [float(each) for each in (value if isinstance(value, (list, tuple)) else [value])]


def take_new_rates(scheduler: LRScheduler) -> None:
    """Sets the learning rates of the next step by the present schedule, where the one that was saved had others: the
    optimizer has those of the run that saved, and Trainer sets others only after its first step. Where the schedule is
    as it was, a rate that a callback had set stays."""
    for index, (group, rate) in enumerate(zip(scheduler.optimizer.param_groups, _rates(scheduler))):
        if _is_unlike(scheduler._last_lr[index], rate):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            scheduler._last_lr[index] = rate


def _rates(scheduler: LRScheduler) -> list[float]:
    """Returns the learning rate of the next step by group, for schedules that are functions of the step; `None` for
    others."""
    if type(scheduler) is not LambdaLR:
        return []
    return [base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]


def _is_unlike(rate: float, other: float) -> bool:
    return not math.isclose(rate, other, rel_tol=1e-6, abs_tol=1e-12)


class ShardedAdafactorSchedule(AdafactorSchedule):
    """Adafactor's schedule, which shows the rates of the parameters that this rank updates. The stock one looks at
    gradients, which are consumed in the step."""

    def get_lr(self) -> list[float]:
        optimizer = self.optimizer
        rates = []
        for group, base in zip(optimizer.param_groups, self.base_lrs):
            state = optimizer.state.get(group["params"][0], {})
            rates.append(optimizer._get_lr(group, state) if group.get("relative_step") and "step" in state else base)
        return rates


def show_rates(scheduler: LRScheduler | None) -> None:
    """Lets the schedule of transformers' Adafactor show the rates of an optimizer over shards."""
    if type(scheduler) is AdafactorSchedule:
        scheduler.__class__ = ShardedAdafactorSchedule


@dataclass(frozen=True)
class Resumed:
    """The record of the earlier run that a resumed run has."""

    position: Position = Position(0, 0, 0)  # in its data
    passed: dict | None = None  # what its loader had given, see `Pass.facts`
    loss: float | None = None  # of its last step
    accumulation: int | None = None  # micro-batches in a step; some models' losses grow with it


def resumed_from(folder: str | os.PathLike | None) -> Resumed:
    """Reads the record of a checkpoint. Weights without a state have none."""
    run = None if folder is None else run_of(folder)
    if folder is None or run is None:
        return Resumed()
    position = position_of(folder, run) or Position(0, 0, 0)
    return Resumed(position, run.extra.get("pass"), run.loss, run.extra.get("accumulation"))


class CompareLoss(TrainerCallback):
    """Warns when the first loss after resuming is far from the last loss before, which means other data, another model
    or other settings."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._before: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        before = self._trainer.resumed
        self._before = before.loss if before.accumulation == args.gradient_accumulation_steps else None

    def on_step_end(self, args, state, control, **kwargs):
        before, self._before = self._before, None
        if before is None:
            return
        after = self._trainer.accelerator.last_step.mean_loss(self._trainer._engine)
        if state.is_world_process_zero and (after is None or after > 1.5 * before + 0.1):
            logger.warning(
                "step %d: the first loss after resuming is %s, the last before was %s; check that data, model and "
                "settings are those of the checkpoint",
                state.global_step,
                after,
                before,
            )


class RestoringMixin(ZeroTrainerBase):
    """The part of `ZeroTrainerMixin` that loads a checkpoint. Every rank reads its own ranges."""

    resumed = Resumed()

    def _checkpoint_of(self, given: str | os.PathLike | bool | None) -> str | os.PathLike | bool | None:
        """Checks the checkpoint from which a run goes on, notes the position of that run, and returns the value for
        Trainer."""
        if given is True:
            given = chosen(self.args)
        elif given:
            recover(Path(given).parent)
            refuse_damaged(Path(given))
        self.resumed = resumed_from(given or None)
        return given

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._prepared_optimizer.eval()  # it was saved so: nothing is to be turned later
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        """Reads each rank's ranges from the folder. No rank holds the whole model."""
        engine = self.accelerator.shard(self.model)
        if saves_whole(type(self)):
            load_parameters(engine, folder)
        else:
            load_model(engine, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._load_state(checkpoint)
        theirs = super()._load_optimizer_and_scheduler
        if theirs.__func__ is not Trainer._load_optimizer_and_scheduler:  # GRPO's, which reads more, calls Trainer's
            with mock.patch.object(Trainer, "_load_optimizer_and_scheduler", lambda *_, **__: None):
                theirs(checkpoint)

    def _load_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        given = _hyperparameters(self.optimizer)
        if is_plain(checkpoint):
            load_plain_state(self._engine, self._prepared_optimizer, checkpoint)
        elif run_of(checkpoint) is not None:
            load_state(self._engine, self._prepared_optimizer, checkpoint)
        else:
            logger.warning("%s: has no optimizer state (save_only_model), so the optimizer starts anew", checkpoint)
            return
        for sentence in changed_hyperparameters(given, _hyperparameters(self.optimizer)):
            if self.args.should_log:
                logger.warning("%s: %s", checkpoint, sentence)
        subject = f"{checkpoint}: loading the scheduler"
        run_on_all_ranks(self._engine.comm, subject, lambda: self._load_scheduler(checkpoint))

    def _load_scheduler(self, checkpoint: str) -> None:
        path = os.path.join(checkpoint, SCHEDULER_NAME)
        # Other programs may have saved no schedule, or one that does not fit.
        run = run_of(checkpoint)
        is_ours = run is not None and run.step is not None
        if is_ours and not os.path.isfile(path):
            raise CheckpointError(
                f"{path}: is missing, so the schedule would start anew; resume from another checkpoint"
            )
        saved = load_small(Path(path)) if os.path.isfile(path) else None
        groups = self.optimizer.param_groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # DeepSpeed drops groups without parameters, which leaves its schedule with fewer of them.
            if saved is not None and len(saved.get("base_lrs", groups)) == len(groups):
                given = list(getattr(self.lr_scheduler, "base_lrs", ()))
                self.lr_scheduler.load_state_dict(saved)
                self._tell_changes(checkpoint, saved, given)
                take_new_rates(self.lr_scheduler)
            elif not is_ours:
                num_steps = read_step(Path(checkpoint))
                logger.warning("%s: does not fit; this run's schedule goes on at step %d", path, num_steps)
                for _ in range(num_steps):
                    self.lr_scheduler.step()

    def _tell_changes(self, checkpoint: str, saved: dict, given: list[float]) -> None:
        path = os.path.join(checkpoint, TRAINER_STATE_NAME)
        before = TrainerState.load_from_json(path).max_steps if os.path.isfile(path) else None
        found = changes(self.lr_scheduler, saved, given=given, num_steps=self.state.max_steps, num_steps_before=before)
        for sentence in found if self.args.should_log else ():
            logger.warning("%s: %s", checkpoint, sentence)


check_overrides(RestoringMixin, Trainer, OVERRIDES)
