"""A learning-rate schedule that is resumed: what of it is not as it was is said before training."""

import math
from collections.abc import Iterator

from torch.optim.lr_scheduler import LambdaLR, LRScheduler


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
    for base, own in zip(scheduler.base_lrs, given):
        if not math.isclose(base, own, rel_tol=1e-6):
            yield (
                f"the learning rate of the checkpoint goes on ({base:.3g}), not the given one ({own:.3g}); for that, "
                "start a new run from its weights"
            )
            break
    if type(scheduler) is not LambdaLR:
        return
    rates = [base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for before, after in zip(saved["_last_lr"], rates):
        if not math.isclose(before, after, rel_tol=1e-6, abs_tol=1e-12):
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
