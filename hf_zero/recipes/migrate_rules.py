"""What a key of another program's configuration can be here, and how its value becomes flags."""

import json
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
        flags (`tuple[str, ...]`): Their names, without dashes.
        note (`str`): What is different, or empty.
        convert (`Callable`, *optional*): From the value and its section to flags and values. Raises
            [`NoCounterpart`] for a value without any. By default the value goes to the first flag as it is.
        is_added (`bool`): Whether its value stands beside those that other keys give the flag, which takes several;
            otherwise the later one wins.
        unlike (`str`): What the flag does otherwise than the key, or empty. It is told whenever the value is
            not 0 or off.
    """

    flags: tuple[str, ...]
    note: str = ""
    convert: Convert | None = None
    is_added: bool = False
    unlike: str = ""


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


def switch(*flags: str) -> Convert:
    """Flags that are on where the key is."""
    return lambda value, section: dict.fromkeys(flags, "True") if value else {}


def set_if_on(flag: str, to: str) -> Convert:
    """A flag with one value where the key is on."""
    return lambda value, section: {flag: to} if value else {}


def one_of(flag: str, values: dict[str, str], otherwise: str) -> Convert:
    """A flag whose value is looked up; for a value that is not there, why."""

    def convert(value: Any, section: Section) -> Flags:
        if str(value).lower() not in values:
            raise NoCounterpart(otherwise)
        return {flag: values[str(value).lower()]}

    return convert


def offload(what: str) -> Convert:
    """What goes to the host when the section's device is not none."""

    def convert(value: Any, section: Section) -> Flags:
        if value not in ("cpu", "nvme", "none", None):
            raise NoCounterpart("a device is cpu, nvme or none")
        return {"zero_offload": what} if value in ("cpu", "nvme") else {}

    return convert


def swap_folder(device: str) -> Convert:
    """The folder, where the device that the key's neighbour of this name says is a disk."""
    return lambda value, section: {"zero_offload_dir": str(value)} if section.get(device) == "nvme" else {}


def prefetch(value: Any, section: Section) -> Flags:
    """Elements cannot be counted in blocks; none can."""
    return {"zero_prefetch_units": "0"} if value == 0 else {}


def betas(value: Any, section: Section) -> Flags:
    """Adam's two."""
    return {"adam_beta1": str(value[0]), "adam_beta2": str(value[1])}


def decoupled(value: Any, section: Section) -> Flags:
    """Whether it is AdamW."""
    if not value:
        raise NoCounterpart(
            "weight decay is decoupled in --optim adamw_torch_fused; set --weight_decay 0, or go on so"
        )
    return {}


def min_ratio(value: Any, section: Section) -> Flags:
    """Where a cosine ends, as a part of the learning rate."""
    return {"lr_scheduler_kwargs": json.dumps({"min_lr_rate": value})}


def static_scale(value: Any, section: Section) -> Flags:
    """0 is dynamic."""
    if value:
        raise NoCounterpart("the loss scale is always dynamic, and agreed by all ranks")
    return {}


def torch_autocast(value: Any, section: Section) -> Flags:
    """Autocast in the section's dtype."""
    if not value:
        return {}
    dtype = str(section.get("dtype", "bfloat16")).removeprefix("torch.")
    return {"fp16" if dtype in ("float16", "half", "fp16") else "bf16": "True", "zero_autocast": "True"}


def reporter(name: str) -> Convert:
    """Where Trainer reports to, if the section is enabled."""
    return lambda value, section: {"report_to": name} if isinstance(value, dict) and value.get("enabled") else {}
