"""The tool `migrate`: turns a configuration of DeepSpeed or accelerate into flags, and names keys without any.

What each key is here stands in one table, `migrate.yaml`, whose notation its first lines explain.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
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
YAML_SUFFIXES = (".yaml", ".yml")
AUTO = "auto"
# In a file of accelerate's, the name of DeepSpeed's own file, whose keys then count.
DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
# The sections of which accelerate reads the one that `distributed_type` names.
ENGINE_SECTIONS = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
# Keys that name a model, which no configuration of DeepSpeed or accelerate does.
OTHERS = {"base_model": "Axolotl", "model_name_or_path": "LLaMA-Factory"}
TAKES_SEVERAL = ("report_to",)  # the values of several keys stand beside one another

Flags = dict[str, str]  # flag without dashes -> value
Section = Mapping[str, Any]  # the key's neighbours in the file, by name


class NoCounterpart(Exception):
    """Raised for a value that has no counterpart, of a key that has flags."""


@dataclass(frozen=True)
class Rule:
    """A line of the table."""

    verdict: str  # "flag", "if", "always" or "none"
    flags: Flags  # flags without dashes, with the value that the table gives each, or ""
    remark: str  # what is different, or why there is no flag
    more: dict[str, Any]  # the other keys of a line that is a mapping

    def convert(self, value: Any, section: Section) -> Flags:
        """Returns the flags for a value, with their values. Raises [`NoCounterpart`] where it has none, and
        `TypeError` or `ValueError` where it is of another kind."""
        if any(section.get(name) != wanted for name, wanted in self.more.get("where", {}).items()):
            return {}
        if "by" in self.more:
            return CONVERTERS[self.more["by"]](self, value, section)
        if self.verdict == "if":
            is_on = value.get("enabled") if isinstance(value, dict) else value
            return {name: text or "True" for name, text in self.flags.items()} if is_on else {}
        first = next(iter(self.flags))
        for pattern, found in self.more.get("values", {}).items():
            if fnmatchcase(_lower(value), _lower(pattern)):
                return found if isinstance(found, dict) else {} if found is None else {first: str(found)}
        if "else" in self.more:
            raise NoCounterpart(self.more["else"])
        if len(self.flags) > 1:
            return {name: str(item) for name, item in zip(self.flags, value, strict=True)}
        return {first: self.more["form"] % json.dumps(value) if "form" in self.more else str(value)}


@dataclass(frozen=True)
class Dialect:
    """The table for the configurations of one program."""

    program: str  # its name and version
    rules: dict[str, Rule]  # by key, in the order in which they are applied
    defaults: list[dict[str, Any]]  # what it takes for keys that are absent, as in the table
    replaced: str  # what the flags are given in place of


@cache
def dialects() -> dict[str, Dialect]:
    """Reads the table: the [`Dialect`] of "deepspeed", and that of "accelerate"."""
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
    """A value or a pattern in small letters; 1.0 is 1."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).lower()


def _torch_autocast(rule: Rule, value: Any, section: Section) -> Flags:
    """Autocast in the section's dtype."""
    dtype = str(section.get("dtype", "bfloat16")).removeprefix("torch.")
    half = "fp16" if dtype in ("float16", "half", "fp16") else "bf16"
    return {half: "True", "zero_autocast": "True"} if value else {}


def _fsdp_offload(rule: Rule, value: Any, section: Section) -> Flags:
    """Parameters are offloaded where they are sharded; otherwise what is sharded is."""
    strategy = section.get("fsdp_reshard_after_forward", section.get("fsdp_sharding_strategy", True))
    stage = rule.more["values"].get(_lower(strategy))
    return {"zero_offload": "params" if stage == 3 else "optimizer"} if value else {}


def _dynamo_backend(rule: Rule, value: Any, section: Section) -> Flags:
    return {"torch_compile": "True", "torch_compile_backend": str(value).lower()} if value != "NO" else {}


CONVERTERS: dict[str, Callable[[Rule, Any, Section], Flags]] = {
    "torch_autocast": _torch_autocast,
    "fsdp_offload": _fsdp_offload,
    "dynamo_backend": _dynamo_backend,
}


@dataclass
class Arguments:
    """`migrate` has no keys."""


@dataclass
class Migration:
    """The flags, and what was found of each key."""

    replaced: str  # what the flags are given in place of
    # flag without dashes -> value; several values of one stand apart by spaces
    flags: Flags = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # flag -> the key that it comes from
    # key that counts for nothing beside another one of the file -> that one
    overruled: dict[str, str] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)  # key whose flag does something else than it -> what
    # key whose value was "auto" -> the flags that decide, as they did
    auto: dict[str, str] = field(default_factory=dict)
    always: dict[str, str] = field(default_factory=dict)  # key that needs no flag -> why
    missing: dict[str, str] = field(default_factory=dict)  # key without a counterpart -> why


def run(file: str, arguments: Arguments) -> None:
    """Prints the flags, one a line with the key that each comes from, what needs none, and what has none."""
    print(rendered(migrated(_read_config(file))))


def _read_config(file: str) -> dict[str, Any]:
    """Reads the object in a JSON or YAML file."""
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
    for key, program in OTHERS.items():
        if isinstance(config, dict) and key in config:
            raise ConfigError(
                f"{file}: has {key!r}, a key of {program}, expected a configuration of DeepSpeed or accelerate; "
                "docs/coming-from.md says what its keys are called here"
            )
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file}: a {type(config).__name__} at the top, expected the keys of a configuration of DeepSpeed or "
            "accelerate"
        )
    return config


def migrated(config: Section) -> Migration:
    """Applies the table to all keys of a configuration, as DeepSpeed or accelerate reads it. Raises [`ConfigError`]
    where it names a file of DeepSpeed's that cannot be read."""
    deepspeed, accelerate = dialects()["deepspeed"], dialects()["accelerate"]
    if config.keys().isdisjoint(("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")):
        result = Migration(deepspeed.replaced)
        _apply_deepspeed(config, result)
        return result
    result = Migration(accelerate.replaced)
    found = _keys(_used(config, result), accelerate.rules)
    file = found[DEEPSPEED_FILE].value if DEEPSPEED_FILE in found else None
    has_own_file = file not in (None, "none")  # whose defaults count, not accelerate's
    if has_own_file:
        _apply_deepspeed(_read_config(file), result)
    _apply_all(found, accelerate, result, with_defaults=not has_own_file)
    return result


def rendered(migration: Migration) -> str:
    """Returns the text to print."""
    lines = [f"{_flag(name, value):40} {migration.sources[name]}" for name, value in migration.flags.items()]
    for title, entries in (
        ("overruled by another key of the file", migration.overruled),
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
    return f"--{name} {value if name in TAKES_SEVERAL else shlex.quote(value)}"


@dataclass(frozen=True)
class _Key:
    """A key of a file, with its value, its section and a note on its origin."""

    path: str
    value: Any
    section: Section
    note: str = ""

    @property
    def shown(self) -> str:
        """The value, as in the file."""
        return json.dumps(self.value, default=str) + self.note


def _keys(section: Section, rules: Mapping[str, Rule], prefix: str = "") -> dict[str, _Key]:
    """Returns, by their paths, the keys that have a rule, and those of values under no rule."""
    found: dict[str, _Key] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path not in rules and isinstance(value, dict) and value:
            found |= _keys(value, rules, f"{path}.")
        else:
            found[path] = _Key(path, value, section)
    return found


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


def _apply_deepspeed(config: Section, result: Migration) -> None:
    deepspeed = dialects()["deepspeed"]
    found = _keys(config, deepspeed.rules)
    _apply_all(found, deepspeed, result)
    devices = {part: found.get(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")}
    on_disk = [key for key in devices.values() if key is not None and _lower(key.value) == "nvme"]
    if len(on_disk) == 1 and result.flags.get("zero_offload") == "params":
        result.unlike[on_disk[0].path] = (
            "parameters and optimizer state lie in one place here, so both go to disk; leave --zero_offload_dir out "
            "to keep both in memory"
        )


def _apply_all(found: dict[str, _Key], dialect: Dialect, result: Migration, *, with_defaults: bool = True) -> None:
    note = f" (not in the file, so {dialect.program.split()[0]}'s default)"
    for default in dialect.defaults if with_defaults else ():
        if _applies(default, found):
            found[default["key"]] = _Key(default["key"], default["value"], {}, note)
    order = {path: turn for turn, path in enumerate(dialect.rules)}
    for key in sorted(found.values(), key=lambda key: order.get(key.path, len(order))):
        _apply(key, dialect, result)


def _applies(default: Mapping[str, Any], found: Mapping[str, _Key]) -> bool:
    """Whether a file with these keys and values uses a default of the table."""
    if default["key"] in found or default.get("unless") in found:
        return False
    where, among = default.get("where"), default.get("among")
    return where is None or where in found and (among is None or _lower(found[where].value) in among)


def _apply(key: _Key, dialect: Dialect, result: Migration) -> None:
    rule, value = dialect.rules.get(key.path), key.value
    if rule is None:
        result.missing[key.path] = f"not among the keys of {dialect.program} that are known here"
    elif rule.verdict == "always":
        if value == AUTO or all(key.section.get(name) not in (None, AUTO) for name in rule.more.get("beside", ())):
            result.always[key.path] = rule.remark
        else:
            result.missing[key.path] = f"{key.shown}: {rule.more['else']}"
    elif rule.verdict == "none":
        is_on = value.get("enabled", True) if isinstance(value, dict) else value
        is_off = not is_on or value == AUTO or value in rule.more.get("inactive", ())
        if is_off or key.section.get("enabled") is False:
            result.always[key.path] = f"{json.dumps(is_on, default=str)}: not asked for"
        else:
            result.missing[key.path] = f"{key.shown}: {rule.remark}" if key.note else rule.remark
    elif value == AUTO:
        result.auto[key.path] = " ".join(f"--{name}" for name in rule.flags)
    else:
        _apply_flags(key, rule, result)


def _apply_flags(key: _Key, rule: Rule, result: Migration) -> None:
    try:
        flags = rule.convert(key.value, key.section)
    except NoCounterpart as reason:
        result.missing[key.path] = f"{key.shown}: {reason}"
        return
    except (TypeError, ValueError):
        result.missing[key.path] = f"{key.shown}: not a value that is taken there"
        return
    if not flags:
        result.always[key.path] = f"{key.shown}: the default" + (f" ({rule.remark})" if rule.remark else "")
    if rule.more.get("unlike") and key.value:
        result.unlike[key.path] = rule.remark
    for name, text in flags.items():
        if rule.more.get("wins"):
            _overrule(key, name, text, result)
        is_beside = name in TAKES_SEVERAL and name in result.flags
        result.flags[name] = f"{result.flags[name]} {text}" if is_beside else text
        result.sources[name] = f"{result.sources[name]}, {key.path}" if is_beside else f"{key.path}{key.note}"


def _overrule(key: _Key, name: str, text: str, result: Migration) -> None:
    """Notes which keys a key wins over. Beside "auto" a value in the file has to be the flag's; a default need not."""
    beaten = [path for path, flags in result.auto.items() if key.note and flags == f"--{name}"]
    if name in result.flags and result.flags[name] != text:
        beaten.append(result.sources[name])
    for path in beaten:
        value = AUTO if result.auto.pop(path, None) else result.flags[name]
        result.overruled[path] = f"{value}: {key.path} wins, there too, and is {key.shown}"
