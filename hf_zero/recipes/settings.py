"""The command line over the YAML file over the defaults, all through `HfArgumentParser`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import Parser, unknown_message
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroTrainingArguments


@dataclass(frozen=True)
class Settings:
    """One run, as asked for.

    Args:
        task (`str`): A key of `TASKS`.
        arguments (`Any`): The task's own arguments, an instance of its `Arguments`.
        training (`dict[str, Any]`): Keyword arguments of `ZeroTrainingArguments`. They stay a dict until the process
            that trains is running: making the object picks the device and joins the process group.
        num_processes (`int`, *optional*): How many processes to start on this machine.
    """

    task: str
    arguments: Any
    training: dict[str, Any]
    num_processes: int | None

    def training_arguments(self) -> ZeroTrainingArguments:
        """Makes the training arguments, in the process that trains.

        Raises:
            ConfigError: If a value contradicts another one.
        """
        try:
            return ZeroTrainingArguments(**self.training)
        except (ValueError, TypeError) as error:
            raise ConfigError(" ".join(str(error).split())) from error


@dataclass
class LaunchArguments:
    num_processes: int | None = None


def make_parser(task: str) -> HfArgumentParser:
    """Builds the parser of one task.

    Args:
        task (`str`): A key of `TASKS`.

    Returns:
        `HfArgumentParser`: It knows `--config`, `--num_processes`, the task's arguments and all training arguments,
        and raises [`ConfigError`] where argparse would exit.
    """
    types = (LaunchArguments, TASKS[task].load().Arguments, ZeroTrainingArguments)
    parser = Parser(
        types, prog=f"python -m hf_zero.recipes {task}", description=TASKS[task].summary, allow_abbrev=False
    )
    parser.add_argument("--config", help="YAML file with any of the keys below; the command line wins over it")
    return parser


def parse_settings(task: str, argv: list[str]) -> Settings:
    """Merges YAML and command line.

    Args:
        task (`str`): A key of `TASKS`.
        argv (`list[str]`): What follows the task on the command line.

    Returns:
        [`Settings`]: Nothing is loaded or started yet.

    Raises:
        ConfigError: If a key is unknown (the nearest known one is named) or a value does not parse.
    """
    parser = make_parser(task)
    known = {field.name for kind in parser.dataclass_types for field in fields(kind) if field.init}
    config = parser.parse_known_args(argv)[0].config
    from_file = _yaml_flags(config, known) if config else []
    namespace, unknown = parser.parse_known_args(from_file + argv)  # of two equal flags argparse takes the last
    if unknown:
        raise ConfigError(unknown_message("command line", unknown[0].split("=")[0], known))
    values = vars(namespace)
    own_arguments = parser.dataclass_types[1]
    return Settings(
        task=task,
        arguments=own_arguments(**_pick(values, own_arguments)),
        training=_pick(values, ZeroTrainingArguments),
        num_processes=values["num_processes"],
    )


def _pick(values: dict[str, Any], kind: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind) if field.init}


def _yaml_flags(path: str, known: Iterable[str]) -> list[str]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: a {type(content).__name__} at the top, expected lines of `key: value`")
    flags: list[str] = []
    for key, value in content.items():
        if key not in known:
            raise ConfigError(unknown_message(path, str(key), known))
        flags += _flag(key, value)
    return flags


def _flag(key: str, value: Any) -> list[str]:
    if value is None:
        return []  # an empty value leaves the default
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]
