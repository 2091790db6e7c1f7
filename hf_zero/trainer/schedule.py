"""Learning-rate schedules: what is not as it was is said before a resumed training; Adafactor's shows its rates."""

import math
from collections.abc import Iterator

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.optimization import AdafactorSchedule


def changes(
    scheduler: LRScheduler, saved: dict, *, given: list[float], num_steps: int, num_steps_before: int | None
) -> Iterator[str]:
    """What will be unlike the run that saved, a sentence each.

    Args:
        scheduler (`LRScheduler`): as it goes on: this run's, with the state that was saved.
        saved (`dict`): that state.
        given (`list[float]`): by group the learning rate that this run was given.
        num_steps (`int`): for which this run makes its schedule.
        num_steps_before (`int`, *optional*): for which the run that saved did.
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


def take_new_rates(scheduler: LRScheduler) -> None:
    """Lets the next step have the rates of the schedule as it is now. The optimizer's are those of the run that saved,
    and Trainer sets others behind its first step only."""
    for index, (group, rate) in enumerate(zip(scheduler.optimizer.param_groups, _rates(scheduler))):
        if _is_unlike(float(group["lr"]), rate):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            scheduler._last_lr[index] = rate


def _rates(scheduler: LRScheduler) -> list[float]:
    """By group, what a schedule that is a function of the step gives for the next one; of others nothing is known."""
    if type(scheduler) is not LambdaLR:
        return []
    return [base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]


def _is_unlike(rate: float, other: float) -> bool:
    return not math.isclose(rate, other, rel_tol=1e-6, abs_tol=1e-12)


class ShardedAdafactorSchedule(AdafactorSchedule):
    """Shows the rates of the parameters that this rank updates. The stock one looks at gradients, which are consumed
    in the step."""

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
