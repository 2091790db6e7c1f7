"""The loss scale of fp16 training, agreed by all ranks."""

import torch
from torch.amp import GradScaler

from hf_zero.optim.sharded import ShardedOptimizer


class ZeroGradScaler(GradScaler):
    """`torch.amp.GradScaler` whose overflow check covers all ranks' shards, so that all skip a step or none does."""

    def unscale_(self, optimizer) -> None:
        """Divides the averaged gradients by the scale, and notes on every rank whether any rank's overflowed."""
        sharded = sharded_of(optimizer)
        if self._enabled and sharded is not None:
            sharded.reduce_gradients()
        super().unscale_(optimizer)
        if self._enabled and sharded is not None:
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            comm = sharded.engine.comm
            own = torch.stack([flag.reshape(()) for flag in found.values()] or [torch.zeros((), device=comm.device)])
            anywhere = comm.all_gather_vector(own.amax().reshape(1)).amax()
            found.setdefault(comm.device, torch.zeros(1, device=comm.device)).fill_(float(anywhere))

    def step(self, optimizer, *args, **kwargs):
        """Steps unless a gradient overflowed; either way the gradients are consumed."""
        result = super().step(optimizer, *args, **kwargs)
        sharded = sharded_of(optimizer)
        if self._enabled and sharded is not None:
            sharded.zero_grad()
        return result


def sharded_of(optimizer) -> ShardedOptimizer | None:
    """The sharded optimizer inside whatever wraps it, or `None`."""
    while optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
