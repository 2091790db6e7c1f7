"""What the modules of a model held when it was sharded; what is put there later would not be trained."""

from collections.abc import Iterator
from itertools import chain
from operator import is_

from torch import nn

from hf_zero.engine.access import unit_of
from hf_zero.errors import LifecycleError


class Members:
    """The parameters and modules that the modules of a model hold."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._learn()

    def refuse_new(self) -> None:
        """Refuses parameters that came later, in place of others or beside them, alone or with a module. Those that
        are frozen may come beside others, as long as they are.

        Raises:
            `LifecycleError`: with the first one's name.
        """
        # each step comes here: no Python code runs for a module
        if all(map(is_, self._present(), self._known)):
            return
        has_frozen = False
        for name, param in self._model.named_parameters(remove_duplicate=False):
            if unit_of(param) is not None:
                continue
            if param.requires_grad or name in self._trained:
                raise LifecycleError(
                    f"{name}: was put into the model, by itself or with its module, after the model was sharded, and "
                    "would not be trained; write into the parameter that is there, or put it there before sharding"
                )
            has_frozen = True
        if not has_frozen:  # else it is looked at in each step, since it may be unfrozen
            self._learn()

    def _learn(self) -> None:
        modules = self._model.modules()
        self._held: list[dict] = [held for each in modules for held in (each._parameters, each._modules)]
        self._known = list(self._present())

    def _present(self) -> Iterator[nn.Parameter | nn.Module | None]:
        return chain(chain.from_iterable(map(dict.values, self._held)), [self._model])  # which marks the end
