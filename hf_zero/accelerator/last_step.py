"""The loss and the gradient norm of the last optimizer step, which a checkpoint records."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.engine import ZeroEngine


@dataclass
class LastStep:
    """The loss and the gradient norm of the last optimizer step.

    Args:
        loss (`Tensor`, *optional*): 0-d, of this rank: the sum over the micro-batches of the step.
        grad_norm (`Tensor`, *optional*): 0-d, before clipping, of all ranks; Trainer measures it also
            where it does not clip.
    """

    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    _is_over: bool = True

    def add(self, loss: Tensor, *, ends: bool) -> None:
        """Adds the loss of one micro-batch; `ends` says that it is the step's last."""
        self.loss = loss if self._is_over else self.loss + loss
        self._is_over = ends

    def mean_loss(self, engine: ZeroEngine) -> float | None:
        """Returns the mean loss over the ranks, or `None` if it is not finite, which JSON cannot hold. Collective."""
        own = torch.full((1,), math.nan) if self.loss is None else self.loss.detach().float().reshape(1)
        return _as_json(engine.comm.all_gather_vector(own.to(engine.comm.device)).mean())

    def facts(self, engine: ZeroEngine) -> dict[str, float | None]:
        """Returns loss and gradient norm for a manifest, as numbers that JSON can hold. Collective."""
        return {"loss": self.mean_loss(engine), "grad_norm": _as_json(self.grad_norm)}


def _as_json(value: Tensor | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
