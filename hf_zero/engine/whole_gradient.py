"""The whole averaged gradient of one parameter, for who looks at it before the step."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.engine.divided import with_local
from hf_zero.engine.gradient import Gradient
from hf_zero.errors import LifecycleError


if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine


def whole_gradient(engine: "ZeroEngine", name: str) -> Tensor | None:
    """Returns what `ShardedModel.full_grad` does. All ranks call it.

    Raises:
        `KeyError`: when no trainable parameter has this name.
        `LifecycleError`: on all ranks, when not all hold the gradients of the same backwards.
    """
    gradient, index, what = _find(engine, name)
    if engine.has_broken_off:
        engine.recover(alone=True)
    own = torch.tensor([gradient.used[index], engine.schedule.dropped])
    is_used, dropped = engine.comm.on_host.all_gather_vector(own).unbind(1)
    if not engine.schedule.meet(dropped.tolist()):
        raise LifecycleError(
            "full_grad: some ranks have dropped gradients that others hold; call zero_grad() on all ranks after an "
            "exception in a backward"
        )
    if not is_used.any():
        return None
    engine.finish_gradients()
    span = gradient.flat.layout.spans[index]
    grad = gradient.whole(what)[span.offset : span.stop].view(span.shape)
    return with_local(gradient.flat.params[index], grad)


def _find(engine: "ZeroEngine", name: str) -> tuple[Gradient, int, str]:
    for unit in engine.units:
        for gradient in unit.gradients:
            for index, info in enumerate(gradient.flat.infos):
                if info.name == name:
                    return gradient, index, unit.name
    raise KeyError(f"{name}: no trainable parameter has this name")
