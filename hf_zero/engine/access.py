"""Access to full parameters: `hf_zero.gathered`."""

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
    """A parameter's weak reference to its unit. A strong one would keep the model alive forever, because autograd's
    nodes hold parameters where Python's garbage collector does not see them."""

    def __init__(self, unit: Unit):
        self.unit = weakref.ref(unit)


def remember(units: list[Unit]) -> None:
    """Stores on every parameter its name and its unit, so that a single parameter can be gathered."""
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
    """Returns the unit of a parameter, or `None` if it does not belong to a sharded model."""
    holder = getattr(param, UNIT_ATTRIBUTE, None)
    return None if holder is None else holder.unit()


@contextmanager
def gathered(what: nn.Module | Tensor | Iterable[Tensor], writeback: bool = False) -> Iterator[None]:
    """Gathers parameters on every rank for the duration of the context. All ranks must enter it together.

    Whole units are gathered, so the other parameters of the same blocks are available too. Parameters of models that
    are not sharded are left unchanged. Inside, forwards without gradients of a fully gathered model do not
    communicate: each rank may generate at its own pace, at the speed of a plain model.

    Args:
        what (`nn.Module`, `Tensor` or iterable of `Tensor`): A module (all its parameters), or parameters.
        writeback (`bool`): Whether to keep writes to the parameters. Rank 0's values are used on all ranks. If False,
            writes are lost at stage 3, with a warning, except for writes through `.data` to parameters on a GPU or on
            disk, which are lost without one.

    Raises:
        `LifecycleError`: For `writeback` inside `ShardedModel.computing_in`.
        `ConfigError`: If `what` is neither a module nor parameters.
    """
    if isinstance(what, nn.Module):
        params = list(what.parameters())
    else:
        params = [what] if isinstance(what, Tensor) else list(what) if isinstance(what, Iterable) else [what]
    for each in params:
        if not isinstance(each, Tensor):
            raise ConfigError(f"gathered: {each!r} is of type {type(each).__name__}; give a module, or parameters")
    units = dict.fromkeys(unit for unit in map(unit_of, params) if unit is not None)
    held = sorted(units, key=lambda unit: unit.index)  # stable: units of several models keep the given order
    if writeback and any(flat.cast for unit in held for flat in unit.flats):
        raise LifecycleError("gathered(writeback=True): writes inside computing_in would be lost; write outside it")
    with ExitStack() as entered:
        for unit in held:
            unit.finish_updates()
        for unit in held:
            unit.begin_gathered(writeback)
            entered.callback(unit.end_gathered, writeback)
        yield


class RanksInStep(Uncopyable):
    """A flag that is true while a model's forward gathers parameters: all ranks must then run the same number of
    forwards.

    transformers' `generate` reads it. Inside `gathered` it is false, and each rank stops generating when it is done.
    """

    def __init__(self, units: list[Unit]):
        self._units = [unit for unit in units if unit.is_sharded]

    def __bool__(self) -> bool:
        return not all(unit.num_gathered for unit in self._units)

    def marks(self, module: nn.Module) -> list[Patch]:
        """Returns patches of a module that set this flag for `generate` and make assisted generation raise while
        parameters are sharded."""
        patches = [Patch(module, "_is_fsdp_managed_module", self)]
        if hasattr(type(module), "_get_candidate_generator"):
            patches.append(Patch(module, "_get_candidate_generator", partial(self._get_candidates, module)))
        return patches

    def _get_candidates(self, module: nn.Module, *args, assistant_model: nn.Module | None = None, **kwargs):
        """Calls transformers' method. Raises [`LifecycleError`] for assisted generation with sharded parameters."""
        if self or getattr(assistant_model, "_is_fsdp_managed_module", False):
            raise LifecycleError(
                "generate: with an assistant or prompt lookup ranks run different numbers of forwards, which sharded "
                "parameters do not allow; generate inside `with hf_zero.gathered(model):`, and gather a sharded "
                "assistant too"
            )
        return type(module)._get_candidate_generator(module, *args, assistant_model=assistant_model, **kwargs)
