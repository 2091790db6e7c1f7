"""Compatibility with other libraries: checks that overridden methods still exist, patches attributes temporarily, and
recognizes their models."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from hf_zero.errors import ConfigError


def check_overrides(cls: type, base: type, names: tuple[str, ...]) -> None:
    """Checks that methods overridden by `cls` exist in `base`; see `check_override`. Without this check, a method that
    was renamed in `base` would silently no longer be called.

    Args:
        cls (`type`): the class with the overriding methods.
        base (`type`): the class of another library whose methods are overridden.
        names (`tuple[str, ...]`): names of the methods.

    Raises:
        `ConfigError`: if a method or a parameter no longer exists.
    """
    for name in names:
        check_override(getattr(cls, name), base, name)


def check_override(ours: Any, base: type, name: str) -> None:
    """Checks that the method in `base` has the parameters of an overriding method, the positional ones first and in
    the same order. Newer versions may have others after them.

    Args:
        ours: the overriding method, or a property.
        base (`type`): the class of another library.
        name (`str`): name of the method.

    Raises:
        `ConfigError`: if the method or a parameter no longer exists, or the order differs. Names it, both signatures
            and the installed versions.
    """
    wanted, found = _signature(ours), list(_signature(getattr(base, name, None)))
    positional = [each for each, kind in wanted.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    if not hasattr(base, name) or not wanted.keys() <= set(found) or found[: len(positional)] != positional:
        seen = f"takes ({', '.join(found)})" if hasattr(base, name) else "does not exist"
        raise ConfigError(
            f"{base.__module__}.{base.__name__}.{name} {seen} in {_versions(base)}, but this version of hf_zero "
            f"expects ({', '.join(wanted)}); install supported versions, or a newer hf_zero"
        )


def _signature(member: Any) -> dict[str, Any]:
    """Returns the kinds of a method's parameters by name, without `*args` and `**kwargs`; for a property, none."""
    more = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(member).parameters.values() if callable(member) else ()
    return {each.name: each.kind for each in found if each.kind not in more}


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
