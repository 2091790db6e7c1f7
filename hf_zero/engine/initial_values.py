"""Initial values of a model that was built on the meta device: each rank computes the parameters of which it owns a
part, one at a time, by the calls that write to it (`docs/design.md`). Its values depend on the seed and its name
alone: not on the number of ranks, nor on the order in which parameters are read."""

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

# What sets the parameters of a module that no `_init_weights` knows: torch's name, and that of its attention.
_RESETS = ("reset_parameters", "_reset_parameters")
UNSET = (
    "has no data (meta device), and no initialisation sets all of it; give its module a `reset_parameters`, or the "
    "model an `_init_weights`, that does, or build the model with its data"
)


@dataclass(frozen=True)
class InitialValues:
    """The values that initialisation gives one parameter, see `hf_zero.engine.source.Source`.

    All parameters of a model share `computed`, so that one that is read in several ranges is computed once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: list[tuple[nn.Module, str]]  # the modules that hold it, and its name there
    ways: list[list["_Call"]]  # what is called to set it; the second where the first does not set all of it
    seed: int
    computed: dict[str, Tensor]  # the values of the parameter that was computed last, by its name

    def read(self, start: int, out: Tensor, dtype: torch.dtype) -> None:
        """Computes the whole parameter, where it is not the last one that was, and gives the range."""
        if self.name not in self.computed:
            self.computed.clear()  # first, so that no two are held
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
        """Puts a parameter in its places, and lets no call write to another one."""
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
    """One call of an initialisation: the module that it is made on, the path of that, and what is called."""

    module: nn.Module
    path: str
    act: Callable[[], object]

    def is_around(self, name: str) -> bool:
        """Whether a parameter of this name is the module's own or of one within it. A tied parameter is what its first
        module makes it, as where ties are made after initialisation."""
        return not self.path or name.startswith(f"{self.path}.")


def _called(calls: list[_Call]) -> set[nn.Module]:
    return {module for call in calls for module in call.module.modules()}


@contextmanager
def _on_copies_of_buffers(calls: list[_Call], but: Tensor | None = None) -> Iterator[None]:
    """Lets calls write to copies of buffers, and puts the buffers back; to one of them calls write itself. So a buffer
    does not depend on what else was initialised on this rank."""
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
    """Notes, while it is entered, the memory that operations write to."""

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
    """Whether a model was built on the meta device: all of its parameters have no data, and no file to read it
    from."""
    params = list(model.parameters())
    return bool(params) and all(p.is_meta and source_of(p) is None for p in params)


def draw_seed() -> int:
    """Draws the seed of a model from torch's generator on the CPU, so that the next model gets another one."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def warn_of_constructors(model: nn.Module) -> None:
    """Says of a model that is not transformers' that its constructors' own values are not known. transformers' models
    set all in `_init_weights`."""
    if not is_pretrained(model):
        logger.warning(
            "hf_zero: the model was built on the meta device: values that its constructors set by themselves are not "
            "known there, and what `reset_parameters` and `_init_weights` set counts; move such values into these"
        )


def initialize(model: nn.Module, seed: int) -> None:
    """Gives the parameters of a model for which `is_bare` holds initial values as their sources, and initialises its
    buffers. The seed is equal on all ranks. Refuses a model of which no initialisation sets a parameter or a buffer,
    or that has an adapter."""
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
        if weakref.getweakrefs(p):  # a parameter without data cannot be given any then
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
    """Returns the calls that write to each tensor: those of its model and, for what these leave, behind those of its
    module on itself."""
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
    """Yields the calls of modules on themselves, children first."""
    for path, module in reversed(list(model.named_modules())):
        if hasattr(module, "adapter_layer_names"):  # PEFT's, whose initial values are its own
            raise UnsupportedError(
                f"{path}: has an adapter, and the model has no data (meta device); build it with its data, or load it "
                "with hf_zero.load_pretrained, and add the adapter inside hf_zero.placeholders(model)"
            )
        reset = next((getattr(module, each) for each in _RESETS if callable(getattr(module, each, None))), None)
        if reset is not None:
            yield _Call(module, path, reset)


def _initialisations(model: nn.Module) -> Iterator[_Call]:
    """Yields the calls of transformers' `initialize_weights`, children first; a model within a model sets its own."""
    by_path: dict[str, Callable | None] = {}
    calls = []
    for path, module in model.named_modules():
        own = getattr(module, "_init_weights", None)
        by_path[path] = own if callable(own) else by_path.get(path.rpartition(".")[0])
        if (act := by_path[path]) is not None:
            calls.append(_Call(module, path, partial(act, module)))
    yield from reversed(calls)


def _initialize_buffers(model: nn.Module, ways: dict[int, list[list[_Call]]], seed: int) -> None:
    """Gives the buffers without data memory, and the values that they have in a model that was built with data."""
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
    """Makes calls from a random state that a text says. Raises [`UnsupportedError`] when one of them needs the data of
    others, or other arguments."""
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
                    f"{f'{call.path}, ' if call.path else ''}{type(call.module).__name__}: its initialisation needs "
                    f"{needs} that are not there, as the model "
                    f"is on the meta device ({reason}); build the model with its data"
                ) from error


def _unset(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns memory on the CPU in which nothing was set yet: NaN where there is one."""
    is_number = not (dtype.is_floating_point or dtype.is_complex)
    return torch.zeros(shape, dtype=dtype) if is_number else torch.full(shape, float("nan"), dtype=dtype)


def _is_unset(values: Tensor) -> bool:
    """Whether a value was left as `_unset` made it. Of integers it is not known."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.is_floating_point() and bool(values.numel()) and bool(values.amin().isnan())
