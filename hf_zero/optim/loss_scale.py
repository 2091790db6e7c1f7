"""The loss scale of fp16 training, agreed by all ranks."""

import torch
from torch.amp import GradScaler

from hf_zero.errors import LifecycleError
from hf_zero.optim.sharded import ShardedOptimizer


class ZeroGradScaler(GradScaler):
    """A `torch.amp.GradScaler` whose overflow check covers the shards of all ranks, so that all ranks skip a step or
    none does."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """Called by `unscale_`: divides the averaged gradients by the scale, and notes on every rank whether any
        rank's overflowed."""
        sharded = sharded_of(optimizer)
        if sharded is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        engine = sharded.engine
        if sharded.has_applied_gradients:
            raise LifecycleError(
                "loss scale: the gradients were applied while they came (in_backward), scaled as they were; call "
                "backward without in_backward where a loss is scaled"
            )
        engine.finish_gradients()
        reduced = [gradient.reduced for gradient in engine.gradients() if gradient.is_reduced]
        overflowed = any(not bool(torch.isfinite(grad).all()) for grad in reduced)
        torch._foreach_mul_(reduced, float(inv_scale))
        anywhere = torch.tensor([float(overflowed)])
        for comm in filter(None, (engine.comm, engine.divided_over)):
            anywhere = comm.all_gather_vector(anywhere.to(comm.device)).amax(dim=0)
        return {found_inf.device: found_inf.fill_(float(anywhere))}

    def step(self, optimizer, *args, **kwargs):
        """Steps unless a gradient overflowed; either way the gradients are consumed."""
        result = super().step(optimizer, *args, **kwargs)
        sharded = sharded_of(optimizer)
        if self._enabled and sharded is not None:
            sharded.zero_grad()
        return result


def sharded_of(optimizer) -> ShardedOptimizer | None:
    """Returns the sharded optimizer inside wrappers, or `None`."""
    while optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
