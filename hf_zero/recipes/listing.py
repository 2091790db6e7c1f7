"""`list`: the tasks, the tools, and the ready-made recipes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_zero.recipes.tasks import TASKS, TOOLS, Task


POSITIONAL = None

# Beside the package in a checkout of the repository; the folder of the same name where the command runs wins.
FOLDERS = (Path("recipes"), Path(__file__).parents[2] / "recipes")


@dataclass
class Arguments:
    """`list` takes nothing."""


def run(arguments: Arguments) -> None:
    """Prints one line each."""
    for title, table in (("tasks", TASKS), ("tools", TOOLS)):
        print(f"{title}:\n{listed(summaries(table))}\n")
    folder = next((folder for folder in FOLDERS if any(folder.glob("*.yaml"))), None)
    if folder is None:
        print("recipes: none here; they are in the folder recipes/ of the repository")
    else:
        print(f"recipes, for --config:\n{listed(recipes(folder))}")


def recipes(folder: Path) -> dict[str, str]:
    """The YAML files of a folder, each with the first line of the comment that it begins with."""
    return {str(path): _first_comment(path) for path in sorted(folder.glob("*.yaml"))}


def summaries(table: Mapping[str, Task]) -> dict[str, str]:
    """What each task or tool does, in one line."""
    return {name: entry.summary for name, entry in table.items()}


def listed(table: Mapping[str, str]) -> str:
    """One line for each name, indented, summaries in one column."""
    width = max(map(len, table), default=0) + 2
    return "\n".join(f"  {name:{width}}{summary}".rstrip() for name, summary in table.items())


def _first_comment(path: Path) -> str:
    first, *_ = path.read_text(encoding="utf-8").splitlines() or [""]
    return first.lstrip("# ") if first.startswith("#") else ""
