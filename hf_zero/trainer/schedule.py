"""The schedule and the hyperparameters of a resumed run: what differs from the run that saved the checkpoint."""

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


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
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
