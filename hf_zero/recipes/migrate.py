"""`migrate ds_config.json`: the flags that a DeepSpeed configuration stands for, and what has none."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.recipes.deepspeed_keys import RULES
from hf_zero.recipes.deepspeed_rules import Always, Flag, Flags, Missing, NoCounterpart, Section


POSITIONAL = ("file", "the JSON file that was given to --deepspeed")

AUTO = "auto"
UNKNOWN = "no key of DeepSpeed 0.19"


@dataclass
class Arguments:
    """`migrate` takes nothing beside the file."""


@dataclass
class Migration:
    """What became of each key.

    Args:
        flags (`dict[str, str]`): Flag without dashes -> value; several values of one stand apart by spaces.
        sources (`dict[str, str]`): Flag -> the key that it comes from.
        auto (`dict[str, str]`): Key whose value was "auto" -> the flags that decide, as they did.
        always (`dict[str, str]`): Key that needs no flag -> why.
        missing (`dict[str, str]`): Key without a counterpart -> why.
    """

    flags: Flags = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    auto: dict[str, str] = field(default_factory=dict)
    always: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run(file: str, arguments: Arguments) -> None:
    """Prints the flags, one a line with the key that each comes from, what needs none, and what has none.

    Args:
        file (`str`): A DeepSpeed configuration.
        arguments ([`Arguments`]): As parsed.

    Raises:
        ConfigError: If it cannot be read, or holds no object.
    """
    print(rendered(migrated(read_config(file))))


def read_config(file: str) -> Section:
    """The object in a JSON file.

    Raises:
        ConfigError: If there is none.
    """
    try:
        config = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); give DeepSpeed's JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: a {type(config).__name__} at the top, expected the keys of a DeepSpeed config")
    return config


def migrated(config: Section) -> Migration:
    """Applies the rules to all keys of a configuration.

    Args:
        config (`dict`): As DeepSpeed reads it.
    """
    result = Migration()
    found = {path: (value, section) for path, value, section in _keys(config)}
    if "zero_optimization.stage" not in found:
        found["zero_optimization.stage"] = (0, {})  # DeepSpeed's default
    for path in sorted(found, key=_turn):
        _apply(path, *found[path], result)
    return result


def rendered(migration: Migration) -> str:
    """What is printed."""
    lines = [f"{_flag(name, value):40} {migration.sources[name]}" for name, value in migration.flags.items()]
    for title, entries in (
        ('"auto": Trainer\'s own flags decide, as they did', migration.auto),
        ("nothing to set", migration.always),
        ("no counterpart", migration.missing),
    ):
        if entries:
            lines += ["", f"{title}:", *(f"  {path}: {text}" for path, text in entries.items())]
    command = " ".join(_flag(name, value) for name, value in migration.flags.items())
    return "\n".join([*lines, "", "in place of --deepspeed:", f"  {command}"])


def _flag(name: str, value: str) -> str:
    takes_several = any(isinstance(rule, Flag) and rule.is_added and name in rule.flags for rule in RULES.values())
    return f"--{name} {value if takes_several else shlex.quote(value)}"


def _keys(section: Section, prefix: str = "") -> Iterator[tuple[str, Any, Section]]:
    """Every key that has a rule, whatever it holds, and every value that is under none."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path not in RULES and isinstance(value, dict) and value:
            yield from _keys(value, f"{path}.")
        else:
            yield path, value, section


def _turn(path: str) -> int:
    return list(RULES).index(path) if path in RULES else len(RULES)


def _apply(path: str, value: Any, section: Section, result: Migration) -> None:
    rule = RULES.get(path)
    if rule is None:
        result.missing[path] = UNKNOWN
    elif isinstance(rule, Always):
        _apply_always(path, value, section, rule, result)
    elif isinstance(rule, Missing):
        _apply_missing(path, value, section, rule, result)
    elif value == AUTO:
        result.auto[path] = " ".join(f"--{name}" for name in rule.flags)
    else:
        _apply_flag(path, value, section, rule, result)


def _apply_always(path: str, value: Any, section: Section, rule: Always, result: Migration) -> None:
    if value == AUTO or all(section.get(name) not in (None, AUTO) for name in rule.beside):
        result.always[path] = rule.reason
    else:
        result.missing[path] = f"{json.dumps(value)}: {rule.otherwise}"


def _apply_missing(path: str, value: Any, section: Section, rule: Missing, result: Migration) -> None:
    is_on = value.get("enabled", True) if isinstance(value, dict) else value
    if not is_on or value == AUTO or value in rule.off or section.get("enabled") is False:
        result.always[path] = f"{json.dumps(is_on)}: not asked for"
    else:
        result.missing[path] = rule.reason


def _apply_flag(path: str, value: Any, section: Section, rule: Flag, result: Migration) -> None:
    try:
        flags = rule.convert(value, section) if rule.convert else {rule.flags[0]: str(value)}
    except NoCounterpart as reason:
        result.missing[path] = f"{json.dumps(value)}: {reason}"
        return
    except (TypeError, IndexError, KeyError):
        result.missing[path] = f"{json.dumps(value)}: not a value that DeepSpeed takes"
        return
    if not flags:
        result.always[path] = f"{json.dumps(value)}: the default" + (f" ({rule.note})" if rule.note else "")
    for name, text in flags.items():
        is_beside = rule.is_added and name in result.flags
        result.flags[name] = f"{result.flags[name]} {text}" if is_beside else text
        result.sources[name] = f"{result.sources[name]}, {path}" if is_beside else path
