"""The recipes that come with hf_zero, found by the names of their files."""

from collections.abc import Iterable
from pathlib import Path

from hf_zero.errors import nearest


# An installed package has the files beside this one (`setup.py`), a checkout has them in its folder recipes/.
FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[2] / "recipes")


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
