"""Differences between the schedule and hyperparameters of a resumed run and those of its checkpoint."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.optimization import AdafactorSchedule


def changes(
    scheduler: LRScheduler, saved: dict, *, given: list[float], num_steps: int, num_steps_before: int | None
) -> Iterator[str]:
    """Yields a sentence for each setting of the schedule that differs from the checkpoint.

    Args:
        scheduler (`LRScheduler`): This run's scheduler with the saved state loaded.
        saved (`dict`): The saved state.
        given (`list[float]`): The learning rates passed to this run, by group.
        num_steps, num_steps_before (`int`): The lengths of this run's and the checkpoint's schedule.
    """
    for base, own in zip(getattr(scheduler, "base_lrs", ()), given):  # ReduceLROnPlateau has none
        if not math.isclose(base, own, rel_tol=1e-6):
            yield (
                f"the checkpoint's learning rate ({base:.3g}) is used instead of the given one ({own:.3g}); to change "
                "it, start a new run from its weights"
            )
            break
    for before, after in zip(saved.get("_last_lr", ()), _rates(scheduler)):
        if _is_unlike(before, after):
            jumps = f"step {scheduler.last_epoch}: the learning rate changes from {before:.3g} to {after:.3g}"
            if num_steps_before not in (None, num_steps):
                yield (
                    f"{jumps}, because the schedule's length changes from {num_steps_before} to {num_steps} steps; "
                    f"to keep the old schedule, resume with --max_steps {num_steps_before}"
                )
            else:
                yield (
                    f"{jumps}, because the schedule's settings have changed; to keep the old ones, resume with the "
                    "previous --lr_scheduler_type, --lr_scheduler_kwargs and --warmup_steps"
                )
            return


# Hyperparameters of parameter groups that checkpoints contain.
_HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum", "alpha")


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in optimizer.param_groups]


def changed_hyperparameters(given: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a sentence for each given hyperparameter that the checkpoint's value replaces."""
    for key in _HYPERPARAMETERS:
        pairs = [(old[key], new[key]) for old, new in zip(loaded, given) if key in old and key in new]
        for before, now in [(old, new) for old, new in pairs if _numbers(old) != _numbers(new)][:1]:
            yield (
                f"the checkpoint's {key} ({before}) is used instead of the given one ({now}); to change it, start a "
                "new run from its weights"
            )


def _numbers(value: Any) -> list[float]:
    return [float(each) for each in (value if isinstance(value, (list, tuple)) else [value])]


def take_new_rates(scheduler: LRScheduler) -> None:
    """Applies the current schedule's learning rates if they differ from the saved schedule's: the optimizer has loaded
    the saved rates, and Trainer updates them only after the first step. If the schedule is unchanged, rates that a
    callback has set are kept."""
    for index, (group, rate) in enumerate(zip(scheduler.optimizer.param_groups, _rates(scheduler))):
        if _is_unlike(scheduler._last_lr[index], rate):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            scheduler._last_lr[index] = rate


def _rates(scheduler: LRScheduler) -> list[float]:
    """Returns the learning rates of the next step by group if the schedule is a function of the step, and otherwise an
    empty list."""
    if type(scheduler) is not LambdaLR:
        return []
    return [base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]


def _is_unlike(rate: float, other: float) -> bool:
    return not math.isclose(rate, other, rel_tol=1e-6, abs_tol=1e-12)


class ShardedAdafactorSchedule(AdafactorSchedule):
    """Adafactor's schedule, which reports the learning rates of the parameters that this rank updates. The stock class
    reads gradients, which the step has released."""

    def get_lr(self) -> list[float]:
        optimizer = self.optimizer
        rates = []
        for group, base in zip(optimizer.param_groups, self.base_lrs):
            state = optimizer.state.get(group["params"][0], {})
            rates.append(optimizer._get_lr(group, state) if group.get("relative_step") and "step" in state else base)
        return rates


def show_rates(scheduler: LRScheduler | None) -> None:
    """Makes the schedule of transformers' Adafactor report the learning rates of a sharded optimizer."""
    if type(scheduler) is AdafactorSchedule:
        scheduler.__class__ = ShardedAdafactorSchedule
