"""The tool `list`, and the ready-made YAML files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_zero.errors import nearest
from hf_zero.recipes.tasks import TASKS, TOOLS, Task


POSITIONAL = None
# An installed package has the files beside this one (`setup.py`), a checkout has them in its folder recipes/.
FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[2] / "recipes")


@dataclass
class Arguments:
    """`list` takes nothing."""


def run(arguments: Arguments) -> None:
    """Prints the tasks, the tools and the ready-made files, a line each."""
    for title, table in (("tasks", TASKS), ("tools", TOOLS)):
        print(f"{title}:\n{listed(summaries(table))}\n")
    print(f"recipes, for --config:\n{listed({name: first_comment(path) for name, path in ready_made().items()})}")


def summaries(table: Mapping[str, Task]) -> dict[str, str]:
    """Returns the summaries of a table of tasks or tools, by name."""
    return {name: entry.summary for name, entry in table.items()}


def listed(table: Mapping[str, str]) -> str:
    """Returns one indented line for each name, with the summaries in one column."""
    width = max(map(len, table), default=0) + 2
    return "\n".join(f"  {name:{width}}{summary}".rstrip() for name, summary in table.items())


def ready_made(folders: Iterable[Path] = FOLDERS) -> dict[str, Path]:
    """Returns the ready-made YAML files by name, from the first folder that has any."""
    found = (sorted(folder.glob("*.yaml")) for folder in folders)
    return {path.name: path for path in next(filter(None, found), [])}


def config_file(config: str) -> Path:
    """Returns the file that `--config` names, or the ready-made file of that name if there is no such file here."""
    path = Path(config)
    return path if path.exists() else ready_made().get(config, path)


def hint(config: str) -> str:
    """Returns the end of the message about a missing file: the ready-made file with the nearest name."""
    found = nearest(Path(config).name, ready_made())
    return f"; did you mean {found}?" if found else ""


def first_comment(path: Path) -> str:
    """Returns the first line of the comment at the beginning of a YAML file, which says what it does."""
    first, *_ = path.read_text(encoding="utf-8").splitlines() or [""]
    return first.lstrip("# ") if first.startswith("#") else ""
