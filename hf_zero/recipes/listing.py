"""`list`: the tasks, the tools, and the ready-made recipes."""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.recipes.ready_made import first_comment, ready_made
from hf_zero.recipes.tasks import TASKS, TOOLS, Task


POSITIONAL = None


@dataclass
class Arguments:
    """`list` takes nothing."""


def run(arguments: Arguments) -> None:
    """Prints one line each."""
    for title, table in (("tasks", TASKS), ("tools", TOOLS)):
        print(f"{title}:\n{listed(summaries(table))}\n")
    print(f"recipes, for --config:\n{listed({name: first_comment(path) for name, path in ready_made().items()})}")


def summaries(table: Mapping[str, Task]) -> dict[str, str]:
    """What each task or tool does, in one line."""
    return {name: entry.summary for name, entry in table.items()}


def listed(table: Mapping[str, str]) -> str:
    """One line for each name, indented, summaries in one column."""
    width = max(map(len, table), default=0) + 2
    return "\n".join(f"  {name:{width}}{summary}".rstrip() for name, summary in table.items())
