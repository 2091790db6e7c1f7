"""The names of the modes, without importing any of them."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field


SIMPLE_MODES = (
    "plain",
    "plain-bf16",
    "ddp",
    "zero_redundancy",
    "fsdp2",
    "fsdp2-noreshard",
    "fsdp2-hybrid",
    "fsdp2-offload",
)
STAGED_MODES = {
    "deepspeed": (1, 2, 3),
    "deepspeed-offload": (2, 3),
    "deepspeed-tiled": (3,),
    "deepspeed-ulysses": (3,),
    "hf_zero": (0, 1, 2, 3),
}
CHECKPOINTING = "+checkpointing"  # at the end of a name: gradient checkpointing of every block
ALL_MODES = SIMPLE_MODES + tuple(f"{family}-{stage}" for family, stages in STAGED_MODES.items() for stage in stages)


@dataclass(frozen=True)
class ModeName:
    family: str
    stage: int | None = None
    options: dict = field(default_factory=dict)
    checkpointing: bool = False


def parse_mode(name: str) -> ModeName:
    """Reads a mode's name: one of `ALL_MODES`, for hf_zero with options of `hf_zero.shard` as `@name=value`.

    Two further options are about the training step. `@in_backward=True`: gradients are not clipped, and the update is
    made inside `optimizer.in_backward()`. `@last_backward=True`: the engine is told which backward is a step's last.
    `+checkpointing` behind any name recomputes every block in backward.

    Raises:
        ValueError: for any other name, listing the modes.
    """
    checkpointing = name.endswith(CHECKPOINTING)
    base, *options = name.removesuffix(CHECKPOINTING).split("@")
    family, _, stage = base.rpartition("-")
    if base not in ALL_MODES or (options and family != "hf_zero"):
        raise ValueError(f"unknown mode {name!r}; the modes are {', '.join(ALL_MODES)}")
    if base in SIMPLE_MODES:
        return ModeName(base, checkpointing=checkpointing)
    pairs = [option.partition("=") for option in options]
    return ModeName(family, int(stage), {key: _value(text) for key, _, text in pairs}, checkpointing)


def split_modes(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """Reads comma-separated modes; skips those whose package is not installed, with a message."""
    names = []
    for name in dict.fromkeys(name.strip() for name in text.split(",") if name.strip()):
        try:
            family = parse_mode(name).family
        except ValueError as error:
            parser.error(str(error))
        if is_installed(family):
            names.append(name)
    return names


def is_installed(family: str) -> bool:
    """Whether the package that a family of modes needs is installed; prints a message if not."""
    package = family.partition("-")[0]
    if package != "deepspeed" or importlib.util.find_spec(package):
        return True
    print(f"{family}: skipped, the package {package!r} is not installed (extra: bench)", file=sys.stderr)
    return False


def _value(text: str) -> bool | int | float | str:
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
