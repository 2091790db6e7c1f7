"""The public way to whole parameters: `hf_zero.gathered`."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from hf_zero.engine.unit import Uncopyable, Unit
from hf_zero.errors import LifecycleError


UNIT_ATTRIBUTE = "_hf_zero_unit"


def remember(units: list[Unit]) -> None:
    """Notes on every parameter which unit holds it, so that a parameter alone can be gathered."""
    for unit in units:
        for flat in unit.flats:
            for param in flat.params:
                setattr(param, UNIT_ATTRIBUTE, unit)


def unit_of(param: Tensor) -> Unit | None:
    """The unit that holds a parameter, or `None` when it is not sharded."""
    return getattr(param, UNIT_ATTRIBUTE, None)


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

    def mark(self, module: nn.Module) -> None:
        """Tells `generate` of a module of the model, and refuses there what cannot be kept in step."""
        module._is_fsdp_managed_module = self
        if hasattr(module, "_get_candidate_generator"):
            module._get_candidate_generator = partial(self._get_candidates, module)

    def _get_candidates(self, module: nn.Module, *args, assistant_model: nn.Module | None = None, **kwargs):
        """transformers' method by which assisted generation begins."""
        if self or getattr(assistant_model, "_is_fsdp_managed_module", False):
            raise LifecycleError(
                "generate: with an assistant or prompt lookup every rank takes steps of its own, which sharded "
                "parameters do not allow; generate inside `with hf_zero.gathered(model):`, and gather a sharded "
                "assistant too"
            )
        return type(module)._get_candidate_generator(module, *args, assistant_model=assistant_model, **kwargs)


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
    """
    if isinstance(what, nn.Module):
        params = list(what.parameters())
    else:
        params = [what] if isinstance(what, Tensor) else list(what)
    units = {unit_of(param) for param in params} - {None}
    held = sorted(units, key=lambda unit: unit.index)
    with ExitStack() as pinned:
        for unit in held:
            unit.pin()
            pinned.callback(unit.unpin, writeback)
        yield
