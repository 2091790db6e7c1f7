"""The public way to whole parameters: `hf_zero.gathered`."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from hf_zero.engine.unit import Unit
from hf_zero.errors import LifecycleError


UNIT_ATTRIBUTE = "_hf_zero_unit"


def remember(units: list[Unit]) -> None:
    """Notes on every parameter which unit holds it, so that a parameter alone can be gathered."""
    for unit in units:
        for flat in unit.flats:
            for param in flat.params:
                setattr(param, UNIT_ATTRIBUTE, unit)


def forget(units: list[Unit]) -> None:
    """Undoes `remember`."""
    for param in (param for unit in units for flat in unit.flats for param in flat.params):
        delattr(param, UNIT_ATTRIBUTE)


def unit_of(param: Tensor) -> Unit | None:
    """The unit that holds a parameter, or `None` when it is not sharded."""
    return getattr(param, UNIT_ATTRIBUTE, None)


@contextmanager
def gathered(what: nn.Module | Tensor | Iterable[Tensor], writeback: bool = False) -> Iterator[None]:
    """Makes parameters whole on every rank for as long as the context lasts. All ranks enter it together.

    Whole units are gathered: the parameters' neighbours in their blocks become whole too. Parameters of a model that
    is not sharded are left as they are. Inside, forwards without gradients communicate nothing: each rank may generate
    as much and as long as it likes, at the speed of a plain model.

    Args:
        what (`nn.Module`, `Tensor` or iterable of `Tensor`): a module (all its parameters), or parameters.
        writeback (`bool`): keeps what was written to the parameters; rank 0's values become everyone's. Without it,
            changes are lost at stage 3.

    Raises:
        `LifecycleError`: for `writeback` inside `engine.computing_in`.
    """
    if isinstance(what, nn.Module):
        params = list(what.parameters())
    else:
        params = [what] if isinstance(what, Tensor) else list(what)
    units = dict.fromkeys(unit for unit in map(unit_of, params) if unit is not None)
    held = sorted(units, key=lambda unit: unit.index)  # of several models, in the order given: all ranks have one
    if writeback and any(flat.cast for unit in held for flat in unit.flats):
        raise LifecycleError("gathered(writeback=True): what is written inside computing_in is lost; write outside")
    with ExitStack() as pinned:
        for unit in held:
            unit.let_count()
        for unit in held:
            unit.pin(writeback)
            pinned.callback(unit.unpin, writeback)
        yield
