"""The loss scale of fp16 training, the same on all ranks."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.amp import GradScaler

from hf_zero.errors import LifecycleError
from hf_zero.optim.sharded import ShardedOptimizer


class ZeroGradScaler(GradScaler):
    """A `torch.amp.GradScaler` whose overflow check covers the shards of all ranks, so that either all ranks skip a
    step or none does."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """Called by `unscale_`: divides the averaged gradients by the scale and records on every rank whether the
        gradients of any rank have overflowed."""
        sharded = sharded_of(optimizer)
        if sharded is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        engine = sharded.engine
        if sharded.has_applied_gradients:
            raise LifecycleError(
                "loss scale: in_backward has already applied the scaled gradients; do not use in_backward with a "
                "scaled loss"
            )
        engine.finish_gradients()
        with engine.changing_gradients():
            groups: defaultdict[tuple, list[Tensor]] = defaultdict(list)
            for gradient in engine.gradients:
                if gradient.is_reduced:
                    groups[gradient.reduced.device, gradient.reduced.dtype].append(gradient.reduced)
            for (device, _), reduced in groups.items():
                found = found_inf.new_zeros((), device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(reduced, found, inv_scale.to(device))
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
            for comm in filter(None, (engine.comm, engine.divided_over)):
                found_inf.copy_(comm.all_gather_rows(found_inf.reshape(1).to(comm.device)).amax())
        return {found_inf.device: found_inf}

    def step(self, optimizer, *args, **kwargs):
        """Steps unless a gradient has overflowed. The gradients are dropped in both cases."""
        sharded = sharded_of(optimizer) if self._enabled else None
        if sharded is None:
            return super().step(optimizer, *args, **kwargs)
        num_steps, sharded.step_was_skipped = sharded.num_steps, False
        result = super().step(optimizer, *args, **kwargs)
        if sharded.num_steps == num_steps and not sharded.step_was_skipped:  # otherwise `sharded.step` dropped them
            sharded.engine.drop_step()
        return result


def sharded_of(optimizer) -> ShardedOptimizer | None:
    """Returns the sharded optimizer inside wrappers, or `None` if there is none."""
    while optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
