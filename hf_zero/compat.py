"""What is overridden in transformers and accelerate must still be there, with the parameters that it had."""

import inspect
from importlib import metadata

from hf_zero.errors import ConfigError


def check_overrides(cls: type, base: type, names: tuple[str, ...]) -> None:
    """Checks that methods which `cls` overrides exist in `base` and take the same parameters.

    A method that was renamed there would never be called here, and training would go on without what it does.

    Args:
        cls (`type`): has the overriding methods.
        base (`type`): the class of another library that they stand in for.
        names (`tuple[str, ...]`): the methods.

    Raises:
        `ConfigError`: naming the method, both signatures and the installed versions.
    """
    for name in names:
        wanted = _parameters(getattr(cls, name))
        found = _parameters(getattr(base, name)) if hasattr(base, name) else None
        if found is not None and (found == wanted or (_hands_on(getattr(cls, name)) and set(wanted) <= set(found))):
            continue
        seen = "does not exist" if found is None else f"takes ({', '.join(found)})"
        raise ConfigError(
            f"{base.__module__}.{base.__name__}.{name} {seen} in {_versions()}; this hf_zero was written for "
            f"({', '.join(wanted)}): install versions that it was tested with, or a newer hf_zero"
        )


def _parameters(member) -> list[str]:
    """Names of a method's parameters but for `**kwargs` that it hands on; a property has none."""
    if not callable(member):
        return []
    named = inspect.signature(member).parameters
    return [name for name, parameter in named.items() if parameter.kind is not parameter.VAR_KEYWORD]


def _hands_on(member) -> bool:
    """Whether a method takes further arguments by name, and so need not know them."""
    kinds = [parameter.kind for parameter in inspect.signature(member).parameters.values()] if callable(member) else []
    return inspect.Parameter.VAR_KEYWORD in kinds


def _versions() -> str:
    return " and ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "accelerate"))
