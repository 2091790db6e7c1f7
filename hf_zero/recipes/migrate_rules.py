"""What a key of another program's configuration can be here, and how its value becomes flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


Flags = dict[str, str]  # flag without dashes -> value
Section = dict[str, Any]  # the key's neighbours in the file, by name
Convert = Callable[[Any, Section], Flags]


@dataclass(frozen=True)
class Flag:
    """A key that flags stand for.

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
        """The names, each by itself."""
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
    """The key has flags, this value has none."""


Rule = Flag | Always | Missing
Sections = Mapping[str, "Rule | Sections"]  # as the file has them


@dataclass(frozen=True)
class Default:
    """What the other program takes for a key that its file does not have, where Trainer's own default is another.

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
        """Whether a file with these values, by key, leaves it to the program."""
        if self.path in values or self.unless in values:
            return False
        if not self.where:
            return True
        return self.where in values and (not self.among or str(values[self.where]).lower() in self.among)


@dataclass(frozen=True)
class Dialect:
    """All that is known about the configurations of one program.

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
    """The rules of nested sections by the whole path of each key, such as "zero_optimization.stage"."""
    rules: dict[str, Rule] = {}
    for key, found in sections.items():
        rules |= flat(found, f"{prefix}{key}.") if isinstance(found, Mapping) else {f"{prefix}{key}": found}
    return rules


def each(keys: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several keys, which stand apart by spaces."""
    return dict.fromkeys(keys.split(), rule)


def switch(names: str) -> Flag:
    """Flags that are on where the key is."""
    return Flag(names, convert=lambda value, section: dict.fromkeys(names.split(), "True") if value else {})


def one_of(name: str, values: dict[str, str], otherwise: str, note: str = "") -> Flag:
    """A flag whose value is looked up; `otherwise` says why a value that is not there has no counterpart."""

    def convert(value: Any, section: Section) -> Flags:
        if str(value).lower() not in values:
            raise NoCounterpart(otherwise)
        return {name: values[str(value).lower()]}

    return Flag(name, note, convert)


def offload(what: str, note: str = "") -> Flag:
    """`zero_offload` with one value, where the key names a device that is not none."""

    def convert(value: Any, section: Section) -> Flags:
        if value not in ("cpu", "nvme", "none", None):
            raise NoCounterpart("a device is cpu, nvme or none")
        return {"zero_offload": what} if value in ("cpu", "nvme") else {}

    return Flag("zero_offload", note, convert)


def swap_folder(device: str, note: str) -> Flag:
    """The folder to offload to, where the device that the key's neighbour of this name says is a disk."""
    return Flag(
        "zero_offload_dir",
        note,
        lambda value, section: {"zero_offload_dir": str(value)} if section.get(device) == "nvme" else {},
    )
