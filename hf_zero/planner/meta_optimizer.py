"""An optimizer that keeps state as another one does, and computes nothing."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hf_zero.errors import ConfigError


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# What the other one is tried on: large enough that its state is kept in blocks, if that is its way.
SAMPLE_SHAPE = (128, 128)


class MetaOptimizer(torch.optim.Optimizer):
    """Makes the state of its parameters in its first step, and takes nothing else: fused optimizers update in place.

    Args:
        params (iterable of `nn.Parameter`): on the meta device.
        make (`Callable`): makes the optimizer to be told, of some parameters.
    """

    elementwise = True
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[nn.Parameter], make: MakeOptimizer):
        self._make = make
        self._dtypes: dict[torch.dtype, dict[str, torch.dtype]] = {}  # of the state, by the parameter's
        super().__init__(params, {"fused": True})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Makes the state that is not there yet."""
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if param not in self.state:
                self.state[param] = {
                    key: torch.empty(param.shape, dtype=dtype, device=param.device)
                    for key, dtype in self._dtypes_of(param.dtype).items()
                }

    def _dtypes_of(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if dtype not in self._dtypes:
            self._dtypes[dtype] = {key: tensor.dtype for key, tensor in _sample(self._make, dtype).items()}
        return self._dtypes[dtype]


def _sample(make: MakeOptimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the state tensors, by key, that an optimizer makes for one parameter in a step with zero gradients.

    Raises:
        `ConfigError`: for one whose state is not shaped like its parameters.
    """
    param = nn.Parameter(torch.zeros(SAMPLE_SHAPE, dtype=dtype))
    param.grad = torch.zeros_like(param)
    optimizer = make([param])
    if hasattr(optimizer, "train"):
        optimizer.train()  # schedule-free ones step in training alone
    optimizer.step()
    tensors: dict[str, Tensor] = {}
    for key, value in optimizer.state[param].items():
        if isinstance(value, Tensor) and value.shape[1:] == param.shape:  # several for each element, as in AdEMAMix
            tensors.update((f"{key}_{index}", row) for index, row in enumerate(value))
        elif isinstance(value, Tensor) and value.dim():
            tensors[key] = value
    strange = [key for key, tensor in tensors.items() if tensor.shape != param.shape]
    if strange:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: its state {strange[0]!r} is not shaped like a parameter, and is "
            "not predicted; plan with one that is elementwise, such as AdamW"
        )
    return tensors
