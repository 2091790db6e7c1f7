"""`list`: the tasks, the tools, and the ready-made recipes."""

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


def ready_made(folders: Iterable[Path] = FOLDERS) -> dict[str, Path]:
    """The YAML files by name, those of the first folder that has any."""
    found = (sorted(folder.glob("*.yaml")) for folder in folders)
    return {path.name: path for path in next(filter(None, found), [])}


def config_file(config: str) -> Path:
    """The file that `--config` names: where there is none, a ready-made one of that name."""
    path = Path(config)
    return path if path.exists() else ready_made().get(config, path)


def hint(config: str) -> str:
    """What to say where `--config` names no file."""
    found = nearest(Path(config).name, ready_made())
    return f"; did you mean {found}?" if found else ""


def first_comment(path: Path) -> str:
    """What a recipe does: the first line of the comment that it begins with."""
    first, *_ = path.read_text(encoding="utf-8").splitlines() or [""]
    return first.lstrip("# ") if first.startswith("#") else ""
