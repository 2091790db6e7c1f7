"""The tool `migrate`: turns a configuration of DeepSpeed or accelerate into flags, and names keys without any."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hf_zero.errors import ConfigError
from hf_zero.recipes.accelerate_keys import ACCELERATE, DEEPSPEED_FILE, ENGINE_SECTIONS, is_accelerate
from hf_zero.recipes.deepspeed_keys import DEEPSPEED
from hf_zero.recipes.migrate_rules import Always, Dialect, Flag, Flags, Missing, NoCounterpart, Rule, Section


POSITIONAL = ("file", "the JSON file that was given to --deepspeed, or the YAML file that `accelerate config` wrote")

YAML_SUFFIXES = (".yaml", ".yml")
AUTO = "auto"
ABSENT = "not in the file, so {program}'s default"


@dataclass
class Arguments:
    """`migrate` has no keys."""


@dataclass
class Migration:
    """The flags, and what was found of each key.

    Args:
        replaced (`str`): What the flags are given in place of.
        flags (`dict[str, str]`): Flag without dashes -> value; several values of one stand apart by spaces.
        sources (`dict[str, str]`): Flag -> the key that it comes from.
        unlike (`dict[str, str]`): Key whose flag does something else than it -> what.
        auto (`dict[str, str]`): Key whose value was "auto" -> the flags that decide, as they did.
        always (`dict[str, str]`): Key that needs no flag -> why.
        missing (`dict[str, str]`): Key without a counterpart -> why.
    """

    replaced: str
    flags: Flags = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    auto: dict[str, str] = field(default_factory=dict)
    always: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run(file: str, arguments: Arguments) -> None:
    """Prints the flags, one a line with the key that each comes from, what needs none, and what has none.

    Args:
        file (`str`): A configuration of DeepSpeed or of accelerate.
        arguments ([`Arguments`]): As parsed.

    Raises:
        ConfigError: If it cannot be read, or holds no object.
    """
    print(rendered(migrated(read_config(file))))


def read_config(file: str) -> Section:
    """Reads the object in a JSON or YAML file.

    Raises:
        ConfigError: If there is none.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        # a number such as 1e-5 is one in JSON, and a text in YAML
        config = yaml.safe_load(text) if Path(file).suffix in YAML_SUFFIXES else json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); give DeepSpeed's JSON file or accelerate's YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); a file of YAML has a name that ends in .yaml") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file}: a {type(config).__name__} at the top, expected the keys of a configuration of DeepSpeed or "
            "accelerate"
        )
    return config


def migrated(config: Section) -> Migration:
    """Applies the rules to all keys of a configuration.

    Args:
        config (`dict`): As DeepSpeed or accelerate reads it.

    Raises:
        ConfigError: If it names a file of DeepSpeed's that cannot be read.
    """
    if not is_accelerate(config):
        result = Migration(DEEPSPEED.replaced)
        _apply_all(dict(_keys(config, DEEPSPEED.rules)), DEEPSPEED, result)
        return result
    result = Migration(ACCELERATE.replaced)
    found = dict(_keys(_used(config, result), ACCELERATE.rules))
    file, _ = found.get(DEEPSPEED_FILE, (None, {}))
    if file in (None, "none"):
        _apply_all(found, ACCELERATE, result)
    else:
        _apply_all(dict(_keys(read_config(file), DEEPSPEED.rules)), DEEPSPEED, result)
        _apply_all(found, replace(ACCELERATE, defaults=()), result)  # that file has its own
    return result


def rendered(migration: Migration) -> str:
    """Returns the text to print."""
    lines = [f"{_flag(name, value):40} {migration.sources[name]}" for name, value in migration.flags.items()]
    for title, entries in (
        ("not quite the same", migration.unlike),
        ('"auto": Trainer\'s own flags decide, as they did', migration.auto),
        ("nothing to set", migration.always),
        ("no counterpart", migration.missing),
    ):
        if entries:
            lines += ["", f"{title}:", *(f"  {path}: {text}" for path, text in entries.items())]
    command = " ".join(_flag(name, value) for name, value in migration.flags.items())
    return "\n".join([*lines, "", f"in place of {migration.replaced}:", f"  {command}"])


def _flag(name: str, value: str) -> str:
    rules = DEEPSPEED.rules.values()
    takes_several = any(isinstance(rule, Flag) and rule.is_added and name in rule.flags for rule in rules)
    return f"--{name} {value if takes_several else shlex.quote(value)}"


def _keys(section: Section, rules: dict[str, Rule], prefix: str = "") -> Iterator[tuple[str, tuple[Any, Section]]]:
    """Yields the path of each key that has a rule, and of each value under no rule, with the value and its section."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path not in rules and isinstance(value, dict) and value:
            yield from _keys(value, rules, f"{path}.")
        else:
            yield path, (value, section)


def _used(config: Section, result: Migration) -> Section:
    """Returns the keys that accelerate uses, and adds the prefix that it allows to leave out of FSDP's keys."""
    used = {key: value for key, value in config.items() if value not in ({}, None)}
    kind = str(config.get("distributed_type", "")).upper()
    for key in [key for owner, key in ENGINE_SECTIONS.items() if kind and owner != kind and key in used]:
        del used[key]
        result.always[key] = f"distributed_type is {kind}, so it is not used"
    if isinstance(used.get("fsdp_config"), dict):
        fsdp = used["fsdp_config"].items()
        used["fsdp_config"] = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in fsdp}
    return used


def _apply_all(found: dict[str, tuple[Any, Section]], dialect: Dialect, result: Migration) -> None:
    absent = set()
    for default in dialect.defaults:
        if default.applies({path: value for path, (value, _) in found.items()}):
            found[default.path] = (default.value, {})
            absent.add(default.path)
    order = {path: turn for turn, path in enumerate(dialect.rules)}
    for path in sorted(found, key=lambda path: order.get(path, len(order))):
        value, section = found[path]
        note = f" ({ABSENT.format(program=dialect.program.split()[0])})" if path in absent else ""
        _apply(_Key(path, value, section, note), dialect, result)


@dataclass(frozen=True)
class _Key:
    """A key of a file, with its value, its section and a note on its origin."""

    path: str
    value: Any
    section: Section
    note: str

    @property
    def shown(self) -> str:
        """The value, as in the file."""
        return json.dumps(self.value, default=str) + self.note


def _apply(key: _Key, dialect: Dialect, result: Migration) -> None:
    rule = dialect.rules.get(key.path)
    if rule is None:
        result.missing[key.path] = f"no key of {dialect.program}"
    elif isinstance(rule, Always):
        _apply_always(key, rule, result)
    elif isinstance(rule, Missing):
        _apply_missing(key, rule, result)
    elif key.value == AUTO:
        result.auto[key.path] = " ".join(f"--{name}" for name in rule.flags)
    else:
        _apply_flag(key, rule, result)


def _apply_always(key: _Key, rule: Always, result: Migration) -> None:
    if key.value == AUTO or all(key.section.get(name) not in (None, AUTO) for name in rule.beside):
        result.always[key.path] = rule.reason
    else:
        result.missing[key.path] = f"{key.shown}: {rule.otherwise}"


def _apply_missing(key: _Key, rule: Missing, result: Migration) -> None:
    value = key.value
    is_on = value.get("enabled", True) if isinstance(value, dict) else value
    if not is_on or value == AUTO or value in rule.off or key.section.get("enabled") is False:
        result.always[key.path] = f"{json.dumps(is_on, default=str)}: not asked for"
    else:
        result.missing[key.path] = f"{key.shown}: {rule.reason}" if key.note else rule.reason


def _apply_flag(key: _Key, rule: Flag, result: Migration) -> None:
    try:
        flags = rule.convert(key.value, key.section) if rule.convert else {rule.flags[0]: str(key.value)}
    except NoCounterpart as reason:
        result.missing[key.path] = f"{key.shown}: {reason}"
        return
    except (TypeError, IndexError, KeyError):
        result.missing[key.path] = f"{key.shown}: not a value that is taken there"
        return
    if not flags:
        result.always[key.path] = f"{key.shown}: the default" + (f" ({rule.note})" if rule.note else "")
    if rule.unlike and key.value:
        result.unlike[key.path] = rule.unlike
    for name, text in flags.items():
        is_beside = rule.is_added and name in result.flags
        result.flags[name] = f"{result.flags[name]} {text}" if is_beside else text
        result.sources[name] = f"{result.sources[name]}, {key.path}" if is_beside else f"{key.path}{key.note}"
