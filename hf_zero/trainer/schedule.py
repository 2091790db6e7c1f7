"""The schedule of transformers' Adafactor for a sharded optimizer."""

from typing import Any

from transformers.optimization import AdafactorSchedule


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


def shown_by_shards(schedule: Any) -> Any:
    """Returns a schedule that reports the learning rates of a sharded optimizer in place of Adafactor's own."""
    is_adafactors = type(schedule) is AdafactorSchedule
    return ShardedAdafactorSchedule(schedule.optimizer, schedule.base_lrs[0]) if is_adafactors else schedule
