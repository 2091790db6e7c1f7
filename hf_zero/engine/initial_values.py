"""Initial values of a model that was built on the meta device. Each rank computes the parameters of which it owns a
range, one at a time, by repeating the calls that write to the parameter (`docs/design.md`). The values depend only on
the seed and the parameter's name, not on the number of ranks or the order in which parameters are computed."""

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.compat import is_pretrained
from hf_zero.engine.source import set_source, source_of
from hf_zero.errors import UnsupportedError


logger = logging.getLogger(__name__)

# torch's methods that initialize a module; `nn.MultiheadAttention` has the second one.
_RESETS = ("reset_parameters", "_reset_parameters")
UNSET = (
    "has no data (meta device), and no initialization sets all of its values; set them in `reset_parameters` of its "
    "module or in `_init_weights` of the model, or build the model with its data"
)


@dataclass(frozen=True)
class InitialValues:
    """The initial values of one parameter, as a [`~hf_zero.engine.source.Source`].

    All parameters of a model share `computed`, so a parameter that is read in several ranges is computed once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: list[tuple[nn.Module, str]]  # the modules that hold the parameter, and its name in each
    ways: list[list["_Call"]]  # calls that set it; the second list if the first does not set all values
    seed: int
    computed: dict[str, Tensor]  # the name and values of the last parameter computed

    def read(self, start: int, out: Tensor, dtype: torch.dtype) -> None:
        """Copies a range of the parameter to `out`. Computes the full parameter unless it was the last one."""
        if self.name not in self.computed:
            self.computed.clear()  # free the last one first
            self.computed[self.name] = self._compute()
        out.copy_(self.computed[self.name].reshape(-1)[start : start + out.numel()].to(dtype))

    def _compute(self) -> Tensor:
        for calls in self.ways:
            param = nn.Parameter(_unset(self.shape, self.dtype), requires_grad=False)
            with self._alone(param, calls), _on_copies_of_buffers(calls):
                _make(calls, f"{self.seed} {self.name}")
            if not _is_unset(param):
                return param.detach()
        raise UnsupportedError(f"{self.name}: {UNSET}")

    @contextmanager
    def _alone(self, param: nn.Parameter, calls: list["_Call"]) -> Iterator[None]:
        """Puts `param` in its places, and replaces the other parameters so that no call writes to them."""
        called = _called(calls)
        held = [(module, key, p) for module in called for key, p in module._parameters.items() if p is not None]
        held += [(module, key, module._parameters[key]) for module, key in self.places if module not in called]
        own = {(module, key) for module, key in self.places}
        for module, key, p in held:
            if (module, key) in own:
                module._parameters[key] = param
            elif not p.is_meta:
                module._parameters[key] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        try:
            yield
        finally:
            for module, key, p in held:
                module._parameters[key] = p


@dataclass(frozen=True)
class _Call:
    """One call of an initialization: the module that it initializes, the path of the module, and the function."""

    module: nn.Module
    path: str
    act: Callable[[], object]

    def is_around(self, name: str) -> bool:
        """Whether the module contains the parameter `name`. A tied parameter is initialized by its first module, as if
        it were tied after initialization."""
        return not self.path or name.startswith(f"{self.path}.")


def _called(calls: list[_Call]) -> set[nn.Module]:
    return {module for call in calls for module in call.module.modules()}


@contextmanager
def _on_copies_of_buffers(calls: list[_Call], but: Tensor | None = None) -> Iterator[None]:
    """Replaces all buffers except `but` by copies while the calls run, so that a buffer does not depend on what else
    this rank initializes."""
    buffers = [(module, key, b) for module in _called(calls) for key, b in module._buffers.items()]
    held = [(module, key, b) for module, key, b in buffers if b is not None and b is not but]
    for module, key, b in held:
        module._buffers[key] = b.clone()
    try:
        yield
    finally:
        for module, key, b in held:
            module._buffers[key] = b


class _Written(TorchDispatchMode):
    """Records the storages that operations write to while it is active."""

    def __init__(self):
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, given in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Tensor):
                self.storages.add(given.untyped_storage()._cdata)
        return func(*args, **kwargs)


def is_bare(model: nn.Module) -> bool:
    """Whether a model was built on the meta device: no parameter has data or a source."""
    params = list(model.parameters())
    return bool(params) and all(p.is_meta and source_of(p) is None for p in params)


def draw_seed() -> int:
    """Draws a seed from torch's CPU generator, so that every model gets a different one."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def warn_of_constructors(model: nn.Module) -> None:
    """Warns that values set in constructors are lost. Models of transformers set all values in `_init_weights` and
    need no warning."""
    if not is_pretrained(model):
        logger.warning(
            "hf_zero: the model was built on the meta device, so values that its constructors set are lost; only "
            "`reset_parameters` and `_init_weights` are used: set the values there"
        )


def initialize(model: nn.Module, seed: int) -> None:
    """Sets `InitialValues` as the sources of all parameters of a model on the meta device (`is_bare`), and initializes
    its buffers. The seed must be equal on all ranks. Raises [`UnsupportedError`] if no initialization sets a parameter
    or a buffer, or if the model has an adapter."""
    ways = _ways_by_storage(model)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                places.setdefault(id(p), []).append((module, key))
    own = {name: _around(name, ways.get(p.untyped_storage()._cdata, [])) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if not own[name] and p.numel():
            raise UnsupportedError(f"{name}: {UNSET}")
        if weakref.getweakrefs(p):  # `swap_tensors`, which gives it data, refuses weak references
            raise UnsupportedError(
                f"{name}: has no data (meta device), and its module keeps weak references to it, as LSTM does; build "
                "the model with its data"
            )
    _initialize_buffers(model, ways, seed)
    computed: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        set_source(p, InitialValues(name, tuple(p.shape), p.dtype, places[id(p)], own[name] or [[]], seed, computed))


def _around(name: str, ways: list[list[_Call]]) -> list[list[_Call]]:
    found = [[call for call in calls if call.is_around(name)] for calls in ways]
    return [calls for calls in found if calls]


def _ways_by_storage(model: nn.Module) -> dict[int, list[list[_Call]]]:
    """Maps each storage to the lists of calls that initialize it: the `_init_weights` calls that write to it, and
    these after the `reset_parameters` calls, for values that `_init_weights` does not set."""
    resets: dict[int, list[_Call]] = {}
    found: dict[int, list[_Call]] = {}
    for into, calls in ((resets, _resets(model)), (found, _initialisations(model))):
        for call in calls:
            with _Written() as written:
                _make([call], "")
            for storage in written.storages:
                into.setdefault(storage, []).append(call)
    ways = {}
    for storage in resets | found:
        first, second = resets.get(storage, []), found.get(storage, [])
        ways[storage] = [each for each in (second, first + second if first else []) if each]
    return ways


def _resets(model: nn.Module) -> Iterator[_Call]:
    """Yields the `reset_parameters` calls of all modules, children first."""
    for path, module in reversed(list(model.named_modules())):
        if hasattr(module, "adapter_layer_names"):  # PEFT initializes adapters in its own way
            raise UnsupportedError(
                f"{path}: has an adapter, and the model has no data (meta device); build it with its data, or load it "
                "with hf_zero.load_pretrained, and add the adapter inside hf_zero.placeholders(model)"
            )
        reset = next((getattr(module, each) for each in _RESETS if callable(getattr(module, each, None))), None)
        if reset is not None:
            yield _Call(module, path, reset)


def _initialisations(model: nn.Module) -> Iterator[_Call]:
    """Yields the `_init_weights` calls that `initialize_weights` of transformers makes, children first. A nested model
    uses its own `_init_weights`."""
    by_path: dict[str, Callable | None] = {}
    calls = []
    for path, module in model.named_modules():
        own = getattr(module, "_init_weights", None)
        by_path[path] = own if callable(own) else by_path.get(path.rpartition(".")[0])
        if (act := by_path[path]) is not None:
            calls.append(_Call(module, path, partial(act, module)))
    yield from reversed(calls)


def _initialize_buffers(model: nn.Module, ways: dict[int, list[list[_Call]]], seed: int) -> None:
    """Allocates the buffers on the meta device and initializes them."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name, own = f"{path}.{key}".lstrip("."), ways.get(buffer.untyped_storage()._cdata, [])
            module._buffers[key] = values = _unset(buffer.shape, buffer.dtype)
            for calls in own:
                with _on_copies_of_buffers(calls, but=values):
                    _make(calls, f"{seed} {name}")
            if (not own and buffer.numel()) or _is_unset(values):
                module._buffers[key] = buffer
                raise UnsupportedError(f"{name}: is a buffer that {UNSET}")


def _make(calls: list[_Call], text: str) -> None:
    """Runs calls with a random state derived from `text`. Raises [`UnsupportedError`] if a call needs other arguments,
    or values of other tensors."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        for call in calls:
            try:
                call.act()
            except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
                reason = str(error).strip().partition("\n")[0]
                needs = "arguments or values" if isinstance(error, (TypeError, AttributeError)) else "values"
                raise UnsupportedError(
                    f"{f'{call.path}, ' if call.path else ''}{type(call.module).__name__}: its initialization needs "
                    f"{needs} that are not available, because the model "
                    f"is on the meta device ({reason}); build the model with its data"
                ) from error


def _unset(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocates CPU memory whose elements are marked as not set: NaN, or zero for dtypes without NaN."""
    is_number = not (dtype.is_floating_point or dtype.is_complex)
    return torch.zeros(shape, dtype=dtype) if is_number else torch.full(shape, float("nan"), dtype=dtype)


def _is_unset(values: Tensor) -> bool:
    """Whether any value is still as `_unset` made it. Always `False` for integers, where this cannot be detected."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.is_floating_point() and bool(values.numel()) and bool(values.amin().isnan())
