"""The public way to whole parameters: `hf_zero.gathered`."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from hf_zero.engine.away import NAME
from hf_zero.engine.patch import Patch, Uncopyable
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError, LifecycleError


UNIT_ATTRIBUTE = "_hf_zero_unit"


class _UnitReference(Uncopyable):
    """The reference of a parameter to its unit, which does not keep it alive: autograd's nodes keep a parameter where
    Python's garbage collector does not see it, so a model whose parameters kept the engine would never be freed."""

    def __init__(self, unit: Unit):
        self.unit = weakref.ref(unit)


def remember(units: list[Unit]) -> None:
    """Stores on every parameter its unit, so that a single parameter can be gathered, and its name."""
    for unit in units:
        for flat in unit.flats:
            for info, param in zip(flat.infos, flat.params):
                setattr(param, UNIT_ATTRIBUTE, _UnitReference(unit))
                setattr(param, NAME, info.name)


def forget(units: list[Unit]) -> None:
    """Undoes `remember`."""
    for param in (param for unit in units for flat in unit.flats for param in flat.params):
        delattr(param, UNIT_ATTRIBUTE)
        delattr(param, NAME)


def unit_of(param: Tensor) -> Unit | None:
    """Returns the unit that holds a parameter, or `None` when it is not sharded."""
    holder = getattr(param, UNIT_ATTRIBUTE, None)
    return None if holder is None else holder.unit()


@contextmanager
def gathered(what: nn.Module | Tensor | Iterable[Tensor], writeback: bool = False) -> Iterator[None]:
    """Makes parameters whole on every rank for as long as the context lasts. All ranks enter it together.

    Whole units are gathered: the parameters' neighbours in their blocks become whole too. Parameters of a model that
    is not sharded are left as they are. Inside, forwards without gradients of a model that is whole communicate
    nothing: each rank may generate as much and as long as it likes, at the speed of a plain model.

    Args:
        what (`nn.Module`, `Tensor` or iterable of `Tensor`): a module (all its parameters), or parameters.
        writeback (`bool`): keeps what was written to the parameters; rank 0's values become everyone's. Without it,
            changes are lost at stage 3, with a warning, but for those through `.data` to parameters of a GPU or a
            disk.

    Raises:
        `LifecycleError`: for `writeback` inside `ShardedModel.computing_in`.
        `ConfigError`: for what is neither module nor parameter.
    """
    if isinstance(what, nn.Module):
        params = list(what.parameters())
    else:
        params = [what] if isinstance(what, Tensor) else list(what) if isinstance(what, Iterable) else [what]
    for each in params:
        if not isinstance(each, Tensor):
            raise ConfigError(f"gathered: {each!r} is of type {type(each).__name__}; give a module, or parameters")
    units = dict.fromkeys(unit for unit in map(unit_of, params) if unit is not None)
    held = sorted(units, key=lambda unit: unit.index)  # of several models, in the order given: all ranks have one
    if writeback and any(flat.cast for unit in held for flat in unit.flats):
        raise LifecycleError("gathered(writeback=True): what is written inside computing_in is lost; write outside")
    with ExitStack() as entered:
        for unit in held:
            unit.finish_updates()
        for unit in held:
            unit.begin_gathered(writeback)
            entered.callback(unit.end_gathered, writeback)
        yield


class RanksInStep(Uncopyable):
    """An object that is true while forwards of a model gather parameters, so that all ranks must run equally many.

    It stands where transformers' `generate` looks for a flag, which follows `gathered` in this way: inside it, each
    rank generates at its own pace and stops when it is done.
    """

    def __init__(self, units: list[Unit]):
        self._units = [unit for unit in units if unit.is_sharded]

    def __bool__(self) -> bool:
        return not all(unit.num_gathered for unit in self._units)

    def marks(self, module: nn.Module) -> list[Patch]:
        """Returns the patches that show this object to `generate` of a module, and that refuse what ranks cannot do in
        step."""
        patches = [Patch(module, "_is_fsdp_managed_module", self)]
        if hasattr(type(module), "_get_candidate_generator"):
            patches.append(Patch(module, "_get_candidate_generator", partial(self._get_candidates, module)))
        return patches

    def _get_candidates(self, module: nn.Module, *args, assistant_model: nn.Module | None = None, **kwargs):
        """Refuses assisted generation on sharded parameters, else calls transformers' own method."""
        if self or getattr(assistant_model, "_is_fsdp_managed_module", False):
            raise LifecycleError(
                "generate: with an assistant or prompt lookup every rank takes steps of its own, which sharded "
                "parameters do not allow; generate inside `with hf_zero.gathered(model):`, and gather a sharded "
                "assistant too"
            )
        return type(module)._get_candidate_generator(module, *args, assistant_model=assistant_model, **kwargs)
