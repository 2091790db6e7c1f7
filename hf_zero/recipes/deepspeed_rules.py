"""What a key of a DeepSpeed configuration can be here, and how its value becomes flags."""

from collections.abc import Callable
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
    """

    flags: tuple[str, ...]
    note: str = ""
    convert: Convert | None = None
    is_added: bool = False


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
        off (`tuple`): The values under which DeepSpeed does not do it either, beside false and nothing.
    """

    reason: str
    off: tuple[Any, ...] = ()


class NoCounterpart(Exception):
    """The key has flags, this value has none."""


Rule = Flag | Always | Missing


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


def swap_folder(value: Any, section: Section) -> Flags:
    """The folder, where the section's device is a disk."""
    return {"zero_offload_dir": str(value)} if section.get("device") == "nvme" else {}


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
    """A cosine that ends above 0."""
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": f'{{"min_lr_rate": {value}}}'}


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
