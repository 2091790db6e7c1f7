"""Compatibility with other libraries: checks that overridden methods still exist, patches attributes temporarily, and
recognizes their models."""

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


def check_overrides(cls: type, base: type, names: tuple[str, ...]) -> None:
    """Checks that methods overridden by `cls` exist in `base` and adapts them to its parameters; see `override`.

    Without this check, a method that was renamed in `base` would silently no longer be called.

    Args:
        cls (`type`): the class with the overriding methods.
        base (`type`): the class of another library whose methods are overridden.
        names (`tuple[str, ...]`): names of the methods.

    Raises:
        `ConfigError`: if a method or a parameter no longer exists.
    """
    for name in names:
        ours = getattr(cls, name)
        adapted = override(ours, base, name)
        if adapted is not ours:
            setattr(cls, name, adapted)


def override(ours: Any, base: type, name: str) -> Any:
    """Returns an overriding method that accepts the parameters of the method in `base`.

    If the method in `base` has further parameters, as in newer versions, they are passed on through the `**kwargs` of
    the overriding method. If it has no `**kwargs`, they are ignored, with a warning for a value other than the
    default. A method with `*args` is returned unchanged.

    Args:
        ours: the overriding method, or a property.
        base (`type`): the class of another library.
        name (`str`): name of the method.

    Raises:
        `ConfigError`: if the method or a parameter no longer exists. Names it, both signatures and the installed
            versions.
    """
    theirs = getattr(base, name, None)
    wanted, found = _parameters(ours), _parameters(theirs)
    if not hasattr(base, name) or not set(wanted) <= set(found):
        seen = f"takes ({', '.join(found)})" if hasattr(base, name) else "does not exist"
        raise ConfigError(
            f"{base.__module__}.{base.__name__}.{name} {seen} in {_versions(base)}, but this version of hf_zero "
            f"expects ({', '.join(wanted)}); install supported versions, or a newer hf_zero"
        )
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in _signature(ours))
    return ours if found == wanted or takes_any else _adapted(ours, theirs, f"{base.__name__}.{name}")


def _adapted(ours: Callable, theirs: Any, subject: str) -> Callable:
    """Wraps `ours` with the signature of `theirs`; passes each argument by name."""
    names, known = _parameters(theirs), _parameters(ours)
    hands_on = len(known) < len(_signature(ours))  # through its `**kwargs`
    ignored = {p.name: p.default for p in _signature(theirs) if p.name in set(names) - set(known) and not hands_on}
    warned: set[str] = set()

    def understood(given: dict[str, Any]) -> dict[str, Any]:
        for name in given.keys() & ignored.keys():
            if given[name] is not ignored[name] and name not in warned:
                warned.add(name)
                logger.warning("%s: %s=%r is ignored: this hf_zero does not support it", subject, name, given[name])
        return {name: value for name, value in given.items() if name not in ignored}

    @functools.wraps(ours)
    def adapted(*args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"{subject} takes at most {len(names)} arguments, {len(args)} were given")
        return ours(**understood(dict(zip(names, args))), **understood(kwargs))

    return adapted


def _parameters(member) -> list[str]:
    """Returns the parameter names of a method, without `*args` and `**kwargs`."""
    return [parameter.name for parameter in _signature(member) if parameter.kind not in _MORE]


def _signature(member) -> list[inspect.Parameter]:
    """Returns the parameters of a method, or an empty list for a property."""
    return list(inspect.signature(member).parameters.values()) if callable(member) else []


def _versions(base: type) -> str:
    names = ("transformers", "accelerate", base.__module__.partition(".")[0])
    installed = metadata.packages_distributions()
    return " and ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(names) if name in installed)


def is_pretrained(module: object) -> bool:
    """Whether an object is a transformers model, without importing transformers."""
    return isinstance(module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ()))


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Temporarily replaces attributes of an object, class or module."""
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
