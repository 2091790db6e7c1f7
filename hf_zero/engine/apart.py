"""What transformers' `generate` has to know of a sharded model."""

from functools import partial

from torch import nn

from hf_zero.engine.patch import Patch
from hf_zero.engine.unit import Uncopyable, Unit
from hf_zero.errors import LifecycleError


class Apart(Uncopyable):
    """True while forwards of a model gather parameters, so that every rank must run as many as the others.

    It stands where transformers' `generate` looks for a flag, which follows `gathered` in this way: inside it, each
    rank generates at its own pace and stops when it is done.

    Args:
        units (`list[Unit]`): of the model.
    """

    def __init__(self, units: list[Unit]):
        self._units = [unit for unit in units if unit.is_sharded]

    def __bool__(self) -> bool:
        return not all(unit.pins for unit in self._units)

    def marks(self, module: nn.Module) -> list[Patch]:
        """Tells `generate` of a module of the model, and refuses there what cannot be kept in step."""
        patches = [Patch(module, "_is_fsdp_managed_module", self)]
        if hasattr(type(module), "_get_candidate_generator"):
            patches.append(Patch(module, "_get_candidate_generator", partial(self._get_candidates, module)))
        return patches

    def _get_candidates(self, module: nn.Module, *args, assistant_model: nn.Module | None = None, **kwargs):
        """transformers' method by which assisted generation begins."""
        if self or getattr(assistant_model, "_is_fsdp_managed_module", False):
            raise LifecycleError(
                "generate: with an assistant or prompt lookup every rank takes steps of its own, which sharded "
                "parameters do not allow; generate inside `with hf_zero.gathered(model):`, and gather a sharded "
                "assistant too"
            )
        return type(module)._get_candidate_generator(module, *args, assistant_model=assistant_model, **kwargs)
