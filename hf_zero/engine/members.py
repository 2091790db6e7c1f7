"""What the modules of a model held when it was sharded; what is put there later would not be trained."""

from operator import is_

from torch import nn

from hf_zero.engine.access import unit_of
from hf_zero.errors import LifecycleError


class Members:
    """The parameters and modules that a module holds by itself.

    Args:
        path (`str`): the module's name.
        module (`nn.Module`): of a model that is being sharded.
    """

    def __init__(self, path: str, module: nn.Module):
        self._path = path
        self._module = module
        self._trained = {key for key, p in module._parameters.items() if p is not None and p.requires_grad}
        self._known = self._present()

    def refuse_new(self) -> None:
        """Refuses parameters that came later, in place of others or beside them, alone or with a module. Those that
        are frozen may come beside others.

        Raises:
            `LifecycleError`: with the first one's name.
        """
        present = self._present()
        if len(present) == len(self._known) and all(map(is_, present, self._known)):
            return
        for key, param in self._module.named_parameters():
            if unit_of(param) is None and (param.requires_grad or key in self._trained):
                name = f"{self._path}.{key}".lstrip(".")
                raise LifecycleError(
                    f"{name}: was put into the model, by itself or with its module, after the model was sharded, and "
                    "would not be trained; write into the parameter that is there, or put it there before sharding"
                )
        self._known = present

    def _present(self) -> list[nn.Parameter | nn.Module | None]:
        return [*self._module._parameters.values(), *self._module._modules.values()]
