"""Rules that turn the keys of another program's configuration into flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


Flags = dict[str, str]  # flag without dashes -> value
Section = dict[str, Any]  # the key's neighbours in the file, by name
Convert = Callable[[Any, Section], Flags]


@dataclass(frozen=True)
class Flag:
    """A key that becomes flags.

    Args:
        names (`str`): Their names without dashes, apart by spaces.
        note (`str`): What is different, or empty.
        convert (`Callable`, *optional*): From the value and its section to flags and values. Raises
            [`NoCounterpart`] for a value without any. By default the value goes to the first flag as it is.
        is_added (`bool`): Whether its value stands beside those that other keys give the flag, which takes several;
            otherwise the later one wins.
        unlike (`str`): What the flag does otherwise than the key, or empty. It is told whenever the value is
            not 0 or off.
    """

    names: str
    note: str = ""
    convert: Convert | None = None
    is_added: bool = False
    unlike: str = ""

    @property
    def flags(self) -> list[str]:
        """The names as a list."""
        return self.names.split()


@dataclass(frozen=True)
class Always:
    """A key that needs no flag.

    Args:
        reason (`str`): Why.
        beside (`tuple[str, ...]`): The keys of its section that have to be set for that, if any.
        otherwise (`str`): What to set where one of them is not.
    """

    reason: str
    beside: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True)
class Missing:
    """A key without a counterpart.

    Args:
        reason (`str`): Why, or what to do instead.
        off (`tuple`): The values under which the other program does not do it either, beside false and nothing.
    """

    reason: str
    off: tuple[Any, ...] = ()


class NoCounterpart(Exception):
    """Raised for a value that has no counterpart, of a key that has flags."""


Rule = Flag | Always | Missing
Sections = Mapping[str, "Rule | Sections"]  # as the file has them


@dataclass(frozen=True)
class Default:
    """The other program's default of a key, if Trainer's default is different.

    Args:
        path (`str`): The key.
        value (`Any`): What it takes.
        where (`str`): A key that has to be in the file for that, or empty.
        among (`tuple[str, ...]`): The values of that key under which it does, in small letters; all where it is empty.
        unless (`str`): Another key that says the same; where it is in the file nothing is left open.
    """

    path: str
    value: Any
    where: str = ""
    among: tuple[str, ...] = ()
    unless: str = ""

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether a file with these values, by key, uses this default."""
        if self.path in values or self.unless in values:
            return False
        if not self.where:
            return True
        return self.where in values and (not self.among or str(values[self.where]).lower() in self.among)


@dataclass(frozen=True)
class Dialect:
    """The rules for the configurations of one program.

    Args:
        program (`str`): Its name and version.
        rules (`dict[str, Rule]`): By key, in the order in which they are applied: a later flag wins over an earlier
            one of the same name, or is added.
        defaults (`tuple[Default, ...]`): What it takes for keys that are absent.
        replaced (`str`): What the flags are given in place of.
    """

    program: str
    rules: dict[str, Rule]
    defaults: tuple[Default, ...]
    replaced: str


def flat(sections: Sections, prefix: str = "") -> dict[str, Rule]:
    """Returns the rules of nested sections by the path of each key, such as "zero_optimization.stage"."""
    rules: dict[str, Rule] = {}
    for key, found in sections.items():
        rules |= flat(found, f"{prefix}{key}.") if isinstance(found, Mapping) else {f"{prefix}{key}": found}
    return rules


def each(keys: str, rule: Rule) -> dict[str, Rule]:
    """Returns the same rule for several keys, which are separated by spaces."""
    return dict.fromkeys(keys.split(), rule)


def switch(names: str) -> Flag:
    """Returns a rule for flags that are true if the key is."""
    return Flag(names, convert=lambda value, section: dict.fromkeys(names.split(), "True") if value else {})


def one_of(name: str, values: dict[str, str], otherwise: str, note: str = "") -> Flag:
    """Returns a rule for a flag whose value is looked up. `otherwise` says why other values have no counterpart."""

    def convert(value: Any, section: Section) -> Flags:
        if str(value).lower() not in values:
            raise NoCounterpart(otherwise)
        return {name: values[str(value).lower()]}

    return Flag(name, note, convert)


def offload(what: str, note: str = "") -> Flag:
    """Returns a rule that sets `zero_offload` if the key names a device."""

    def convert(value: Any, section: Section) -> Flags:
        if value not in ("cpu", "nvme", "none", None):
            raise NoCounterpart("a device is cpu, nvme or none")
        return {"zero_offload": what} if value in ("cpu", "nvme") else {}

    return Flag("zero_offload", note, convert)


def swap_folder(device: str, note: str) -> Flag:
    """Returns a rule for the folder to offload to, used if the key `device` of the same section says nvme."""
    return Flag(
        "zero_offload_dir",
        note,
        lambda value, section: {"zero_offload_dir": str(value)} if section.get(device) == "nvme" else {},
    )
