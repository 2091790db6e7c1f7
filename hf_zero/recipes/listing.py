"""The tool `list`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_zero.recipes.parser import ready_made
from hf_zero.recipes.tasks import TASKS, TOOLS, Command


POSITIONAL = ()


@dataclass
class Arguments:
    """`list` takes nothing."""


def run(arguments: Arguments) -> None:
    """Prints the tasks, the tools and the ready-made files, one per line."""
    for title, table in (("tasks", TASKS), ("tools", TOOLS)):
        print(f"{title}:\n{listed(table)}\n")
    print(f"recipes, for --config:\n{listed({name: first_comment(path) for name, path in ready_made().items()})}")


def listed(table: Mapping[str, Command | str]) -> str:
    """Returns one indented line per name, with the summaries in one column."""
    width = max(map(len, table), default=0) + 2
    texts = {name: entry if isinstance(entry, str) else entry.summary for name, entry in table.items()}
    return "\n".join(f"  {name:{width}}{text}".rstrip() for name, text in texts.items())


def first_comment(path: Path) -> str:
    """Returns the first line of the comment at the beginning of a YAML file."""
    first, *_ = path.read_text(encoding="utf-8").splitlines() or [""]
    return first.lstrip("# ") if first.startswith("#") else ""
