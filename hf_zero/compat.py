"""What depends on other libraries: whether overridden methods still exist there, what is replaced in them for a while,
and whose models are theirs."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from hf_zero.errors import ConfigError


logger = logging.getLogger(__name__)

_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # the kinds of `*args` and `**kwargs`


def check_overrides(cls: type, base: type, names: tuple[str, ...], *, hands_on: bool = True) -> None:
    """Checks that methods which `cls` overrides exist in `base`, and adapts them to its parameters; see `override`.

    A method that was renamed there would never be called here, and training would go on without what it does.

    Args:
        cls (`type`): has the overriding methods.
        base (`type`): the class of another library that they stand in for.
        names (`tuple[str, ...]`): the methods.
        hands_on (`bool`): see `override`.

    Raises:
        `ConfigError`: a method or a parameter is gone.
    """
    for name in names:
        ours = getattr(cls, name)
        adapted = override(ours, base, name, hands_on=hands_on)
        if adapted is not ours:
            setattr(cls, name, adapted)


def override(ours: Any, base: type, name: str, *, hands_on: bool = True) -> Any:
    """Returns a method that stands in for one of `base`, so that it can be called with the parameters that this takes.

    Where `base` takes further parameters, as newer versions do, the method hands them on by its `**kwargs`; one that
    has none leaves them out, and says so when it is first given another value than the default. A method that takes
    `*args` hands on what it is given as it is.

    Args:
        ours: the overriding method, or a property.
        base (`type`): the class of another library.
        name (`str`): the method there.
        hands_on (`bool`): its `**kwargs` are given to the method of `base`, which knows further parameters.

    Raises:
        `ConfigError`: the method or a parameter is gone; names it, both signatures and the installed versions.
    """
    theirs = getattr(base, name, None)
    wanted, found = _parameters(ours), _parameters(theirs)
    if not hasattr(base, name) or not set(wanted) <= set(found):
        seen = f"takes ({', '.join(found)})" if hasattr(base, name) else "does not exist"
        raise ConfigError(
            f"{base.__module__}.{base.__name__}.{name} {seen} in {_versions(base)}; this hf_zero was written for "
            f"({', '.join(wanted)}): install versions that it was tested with, or a newer hf_zero"
        )
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in _signature(ours))
    return ours if found == wanted or takes_any else _adapted(ours, theirs, f"{base.__name__}.{name}", hands_on)


def _adapted(ours: Callable, theirs: Any, subject: str, hands_on: bool) -> Callable:
    """Wraps `ours` so that it can be called as `theirs`, with each argument given by its name."""
    names, known = _parameters(theirs), _parameters(ours)
    hands_on = hands_on and len(known) < len(_signature(ours))
    left_out = {p.name: p.default for p in _signature(theirs) if p.name in set(names) - set(known) and not hands_on}
    warned: set[str] = set()

    def understood(given: dict[str, Any]) -> dict[str, Any]:
        for name in given.keys() & left_out.keys():
            if given[name] is not left_out[name] and name not in warned:
                warned.add(name)
                logger.warning("%s: %s=%r is left out; this hf_zero does not know it", subject, name, given[name])
        return {name: value for name, value in given.items() if name not in left_out}

    @functools.wraps(ours)
    def adapted(*args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"{subject} takes at most {len(names)} arguments, {len(args)} were given")
        return ours(**understood(dict(zip(names, args))), **understood(kwargs))

    return adapted


def _parameters(member) -> list[str]:
    """Returns the names of a method's parameters, without `*args` and `**kwargs`."""
    return [parameter.name for parameter in _signature(member) if parameter.kind not in _MORE]


def _signature(member) -> list[inspect.Parameter]:
    """Returns the parameters of a method. A property has none."""
    return list(inspect.signature(member).parameters.values()) if callable(member) else []


def _versions(base: type) -> str:
    names = ("transformers", "accelerate", base.__module__.partition(".")[0])
    installed = metadata.packages_distributions()
    return " and ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(names) if name in installed)


def is_pretrained(module: object) -> bool:
    """Whether this is a model of transformers, which is not imported to find that out."""
    return isinstance(module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ()))


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replaces attributes of an object, class or module while it is entered."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
