"""The tool `migrate`: translates a configuration of DeepSpeed or accelerate into flags, and names keys without any.

The table `migrate.yaml` contains all keys; its first lines explain the notation.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hf_zero.errors import ConfigError


POSITIONAL = (
    ("file", "the JSON file that was given to --deepspeed, or the YAML file that `accelerate config` wrote"),
)

TABLE = Path(__file__).with_name("migrate.yaml")
AUTO = "auto"
# accelerate reads only the section of its `distributed_type`.
ENGINE_SECTIONS = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
# Keys that name a model, and the programs that have them.
OTHERS = {"base_model": "Axolotl", "base_model_config": "Axolotl", "model_name_or_path": "LLaMA-Factory and TRL"}
OTHERS |= {"finetuning_type": "LLaMA-Factory", "dataset_name": "TRL"}
TAKES_SEVERAL = ("report_to",)  # collects the values of several keys

Flags = dict[str, str]  # by name without dashes
Section = Mapping[str, Any]


class NoCounterpart(Exception):
    """Raised if a value has no counterpart, although other values of its key have one."""


@dataclass(frozen=True)
class Rule:
    """A line of the table."""

    verdict: str  # "flag", "if", "always" or "none"
    flags: Flags  # with the values that the table gives, or ""
    remark: str
    more: dict[str, Any]  # the other keys of a line that is a mapping

    def convert(self, value: Any, section: Section) -> Flags:
        """Returns the flags for a value. Raises [`NoCounterpart`] if it has none, and `TypeError` or `ValueError` if
        it is of the wrong type."""
        if any(section.get(name) != wanted for name, wanted in self.more.get("where", {}).items()):
            return {}
        if self.verdict == "if":
            is_on = value.get("enabled") if isinstance(value, dict) else value
            return {name: text or "True" for name, text in self.flags.items()} if is_on else {}
        first = next(iter(self.flags))
        for pattern, found in self.more.get("values", {}).items():
            if fnmatchcase(_lower(value), _lower(pattern)):
                found = found if isinstance(found, dict) else {} if found is None else {first: found}
                return {name: str(text).replace("$", _lower(value)) for name, text in found.items()}
        if "else" in self.more:
            raise NoCounterpart(self.more["else"])
        if len(self.flags) > 1:
            return {name: str(item) for name, item in zip(self.flags, value, strict=True)}
        return {first: str(value)}


@dataclass(frozen=True)
class Dialect:
    """The table for the configurations of one program."""

    program: str  # name and version
    rules: dict[str, Rule]  # by key, in the order in which they are applied
    defaults: list[dict[str, Any]]  # for keys that are absent
    replaced: str  # what the flags replace


@cache
def dialects() -> dict[str, Dialect]:
    """Reads the table of keys, and returns the [`Dialect`] of "deepspeed" and that of "accelerate"."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: Dialect(rules=dict(_rules(found.pop("keys"))), **found) for name, found in table.items()}


def _rules(section: Section, prefix: str = "") -> Iterator[tuple[str, Rule]]:
    for keys, entry in section.items():
        for key in keys.split():
            if isinstance(entry, dict) and "is" not in entry:
                yield from _rules(entry, f"{prefix}{key}.")
            else:
                more = dict(entry) if isinstance(entry, dict) else {"is": entry}
                verdict, _, remark = more.pop("is").partition("; ")
                flags = [word.removeprefix("--").partition("=") for word in verdict.split() if word.startswith("--")]
                kind = "flag" if verdict.startswith("--") else verdict.split()[0]
                yield f"{prefix}{key}", Rule(kind, {name: text for name, _, text in flags}, remark, more)


def _lower(value: Any) -> str:
    """Returns a value or a pattern in lower case; 1.0 is 1."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).lower()


@dataclass
class Arguments:
    """`migrate` has no keys."""


@dataclass(frozen=True)
class Key:
    """A key of a file."""

    value: Any
    section: Section  # its neighbours
    note: str = ""  # on its origin

    @property
    def shown(self) -> str:
        return json.dumps(self.value, default=str) + self.note


@dataclass
class Migration:
    """The flags, and a remark on each key without one."""

    replaced: str  # what the flags replace
    flags: Flags = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # flag -> its key
    remarks: dict[str, str] = field(default_factory=dict)  # flag -> how it differs from its key
    always: dict[str, str] = field(default_factory=dict)  # needs no flag
    missing: dict[str, str] = field(default_factory=dict)  # has no counterpart

    def apply(self, config: Section, dialect: Dialect, *, with_defaults: bool = True) -> None:
        """Applies the rules of a program to all keys of a configuration."""
        found = dict(_keys(config, dialect.rules))
        note = f" (not in the file, so {dialect.program.split()[0]}'s default)"
        for default in dialect.defaults if with_defaults else ():
            other, among = found.get(default.get("where")), default.get("among")
            is_used = "where" not in default or other is not None and (among is None or _lower(other.value) in among)
            if is_used and default["key"] not in found and default.get("unless") not in found:
                found[default["key"]] = Key(default["value"], {} if other is None else other.section, note)
        order = {path: turn for turn, path in enumerate(dialect.rules)}
        for path in sorted(found, key=lambda path: order.get(path, len(order))):
            self._apply(path, found[path], dialect)

    def _apply(self, path: str, key: Key, dialect: Dialect) -> None:
        rule, value = dialect.rules.get(path), key.value
        if rule is None:
            self.missing[path] = f"not among the keys of {dialect.program} that are known here"
        elif rule.verdict == "always":
            if value == AUTO or all(key.section.get(name) not in (None, AUTO) for name in rule.more.get("beside", ())):
                self.always[path] = rule.remark
            else:
                self.missing[path] = f"{key.shown}: {rule.more['else']}"
        elif rule.verdict == "none":
            is_on = value.get("enabled", True) if isinstance(value, dict) else value
            is_off = not is_on or value == AUTO or value in rule.more.get("inactive", ())
            if is_off or key.section.get("enabled") is False:
                self.always[path] = f"{json.dumps(is_on, default=str)}: not asked for"
            else:
                self.missing[path] = f"{key.shown}: {rule.remark}" if key.note else rule.remark
        elif value == AUTO:
            self.always[path] = _left_to(*rule.flags)
        else:
            self._convert(path, key, rule)

    def _convert(self, path: str, key: Key, rule: Rule) -> None:
        try:
            flags = rule.convert(key.value, key.section)
        except (NoCounterpart, TypeError, ValueError) as error:
            reason = error if isinstance(error, NoCounterpart) else "not a value that is taken there"
            self.missing[path] = f"{key.shown}: {reason}"
            return
        if not flags:
            says_more = rule.remark and not rule.more.get("unlike")
            self.always[path] = f"{key.shown}: the default" + (f" ({rule.remark})" if says_more else "")
        for name, text in flags.items():
            is_beside = name in TAKES_SEVERAL and name in self.flags
            if not is_beside and self.flags.get(name, text) != text:
                self.always[self.sources[name]] = f"{self.flags[name]}: overruled by {path}, which is {key.shown}"
            if key.note:  # a default wins over "auto"; beside a value in the file, transformers makes both equal
                for each in [each for each, text in self.always.items() if text == _left_to(name)]:
                    self.always[each] = f"{AUTO}: overruled by {path}, which is {key.shown}"
            self.remarks[name] = rule.remark if rule.more.get("unlike") and key.value else ""
            self.flags[name] = f"{self.flags[name]} {text}" if is_beside else text
            self.sources[name] = f"{self.sources[name]}, {path}" if is_beside else f"{path}{key.note}"


def _left_to(*names: str) -> str:
    flags = " and ".join(f"--{name}" for name in names)
    return f'"auto": Trainer\'s own {flags} {"decide" if len(names) > 1 else "decides"}, as before'


def _keys(section: Section, rules: Mapping[str, Rule], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yields, by their paths, the keys that have a rule, and those of values under no rule."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path not in rules and isinstance(value, dict):
            yield from _keys(value, rules, f"{path}.")
        else:
            yield path, Key(value, section)


def run(file: str, arguments: Arguments) -> None:
    """Prints one flag per line with its key, then the keys that need none or have none."""
    print(rendered(migrated(_read_config(file))))


def _read_config(file: str) -> dict[str, Any]:
    is_yaml = Path(file).suffix in (".yaml", ".yml")
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        # JSON has numbers such as 1e-5, which are texts in YAML
        config = yaml.safe_load(text) if is_yaml else json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); give DeepSpeed's JSON file or accelerate's YAML file"
        ) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind, hint = ("YAML", "") if is_yaml else ("JSON", "; a file of YAML has a name that ends in .yaml")
        raise ConfigError(f"{file}: not valid {kind} ({' '.join(str(error).split())}){hint}") from error
    if not isinstance(config, dict):
        found = f"a {type(config).__name__} at the top"
    elif other := next((key for key in OTHERS if key in config), None):
        found = f"has {other!r}, a key of {OTHERS[other]} (see docs/coming-from.md)"
    elif config.keys().isdisjoint(path.partition(".")[0] for each in dialects().values() for path in each.rules):
        found = f"has the keys {', '.join(map(str, config)) or 'none'}"[:200]
    else:
        return config
    raise ConfigError(f"{file}: {found}, expected the keys of a configuration of DeepSpeed or accelerate")


def migrated(config: Section) -> Migration:
    """Applies the table to a configuration as DeepSpeed or accelerate reads it. Raises [`ConfigError`] if it names a
    file of DeepSpeed that cannot be read."""
    deepspeed, accelerate = dialects()["deepspeed"], dialects()["accelerate"]
    if config.keys().isdisjoint(("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")):
        result = Migration(deepspeed.replaced)
        result.apply(config, deepspeed)
        return result
    result = Migration(accelerate.replaced)
    used = _used(config, result)
    file = (used.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if file not in (None, "none"):
        result.apply(_read_config(file), deepspeed)
    result.apply(used, accelerate, with_defaults=file in (None, "none"))
    return result


def _used(config: Section, result: Migration) -> Section:
    """Returns the keys that accelerate uses. Adds the prefix that it allows to omit from FSDP's keys."""
    used = {key: value for key, value in config.items() if value not in ({}, None)}
    kind = str(config.get("distributed_type", "")).upper()
    for key in [key for owner, key in ENGINE_SECTIONS.items() if kind and owner != kind and key in used]:
        del used[key]
        result.always[key] = f"distributed_type is {kind}, so it is not used"
    if isinstance(used.get("fsdp_config"), dict):
        fsdp = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in used["fsdp_config"].items()}
        if fsdp.get("fsdp_offload_params"):  # parameters are offloaded where they are sharded
            strategy = _lower(fsdp.get("fsdp_reshard_after_forward", fsdp.get("fsdp_sharding_strategy", True)))
            fsdp["fsdp_offload_params"] = "params" if strategy in ("full_shard", "1", "true") else "optimizer"
        used["fsdp_config"] = fsdp
    return used


def rendered(migration: Migration) -> str:
    """Returns the text to print."""
    lines = []
    for name, value in migration.flags.items():
        remark = migration.remarks[name] and f"; {migration.remarks[name]}"
        lines.append(f"{_flag(name, value):40} {migration.sources[name]}{remark}")
    for title, entries in (
        ("nothing to set", migration.always),
        ("no counterpart", migration.missing),
    ):
        if entries:
            lines += ["", f"{title}:", *(f"  {path}: {text}" for path, text in entries.items())]
    command = " ".join(_flag(name, value) for name, value in migration.flags.items())
    return "\n".join([*lines, "", f"in place of {migration.replaced}:", f"  {command}"])


def _flag(name: str, value: str) -> str:
    return f"--{name} {value if name in TAKES_SEVERAL else shlex.quote(value)}"
