"""Parameters that are not trained, named by patterns."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from hf_zero.errors import ConfigError, nearest
from hf_zero.recipes.parser import option


NUMBERS = re.compile(r"\[(\d+-\d{2,}|\d{2,}-)")  # meant as numbers of layers, but read as one letter


@dataclass
class FreezingArguments:
    """Keys for parameters that stay as they are."""

    freeze: list[str] | None = option(
        None,
        "Parameters, or modules with all of theirs, that are not trained, such as model.embed_tokens or "
        "model.layers.[0-3]; * stands for any letters, [0-3] for one.",
    )
    unfreeze: list[str] | None = option(None, "Of those that freeze names, the ones that are trained all the same.")


def check_freezing(arguments: FreezingArguments, *, use_peft: bool) -> None:
    """Refuses keys that contradict each other. Beside an adapter all of the model is frozen."""
    for key in ("freeze", "unfreeze"):
        for pattern in filter(NUMBERS.search, getattr(arguments, key) or ()):
            raise ConfigError(
                f"{key} {pattern!r}: [ ] stands for one letter, never for a number of two digits; write two patterns, "
                "such as model.layers.[0-9] model.layers.1[0-5]"
            )
        if getattr(arguments, key) and use_peft:
            raise ConfigError(
                f"{key}: with use_peft the model is frozen, but for lora_modules_to_save; leave one of them out"
            )
    if arguments.unfreeze and not arguments.freeze:
        raise ConfigError("unfreeze: nothing is frozen that could be trained; give --freeze too, such as --freeze '*'")


def freeze_parameters(model: nn.Module, arguments: FreezingArguments) -> list[str]:
    """Freezes the parameters that patterns name, by their names or those of modules around them; of tied parameters
    each name counts. No weights are needed yet. Raises [`ConfigError`] where a pattern matches nothing, or nothing is
    left to train."""
    if not arguments.freeze:
        return []
    params = dict(model.named_parameters(remove_duplicate=False))
    frozen = _matching(params, "freeze", arguments.freeze)
    kept = _matching({name: params[name] for name in frozen}, "unfreeze", arguments.unfreeze or [])
    ids = {id(params[name]) for name in frozen} - {id(params[name]) for name in kept}
    for param in params.values():
        if id(param) in ids:
            param.requires_grad_(False)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    if not trained:
        raise ConfigError(f"freeze {arguments.freeze}: nothing is left to train; freeze less, or unfreeze some")
    total = sum(param.numel() for param in model.parameters())
    return [f"trained: {trained:,} of {total:,} parameters"]


def _matching(names: dict[str, nn.Parameter], key: str, patterns: list[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matches:
            some = f"{', '.join(list(names)[:3])} and so on"
            near = nearest(pattern, _with_modules(names))
            hint = f"did you mean {near}?" if near else some
            raise ConfigError(f"{key} {pattern!r}: matches none of {len(names)} parameters; {hint}")
        found |= matches
    return found


def _with_modules(names: Iterable[str]) -> set[str]:
    """The names of parameters, and of the modules around them."""
    parts = [name.split(".") for name in names]
    return {".".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}
