"""The command line over the YAML file over the defaults, all through `HfArgumentParser`."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import Parser, parser_for, program, unknown_message
from hf_zero.recipes.ready_made import config_file, hint
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroTrainingArguments


AUTO, NEVER = "auto", "never"  # values of `resume`; any other is the folder of a checkpoint


@dataclass(frozen=True)
class Settings:
    """One run, as asked for.

    Args:
        task (`str`): A key of `TASKS`.
        arguments (`Any`): The task's own arguments, an instance of its `Arguments`.
        training (`dict[str, Any]`): Keyword arguments of the task's `Training`. They stay a dict until the process
            that trains is running: making the object picks the device and joins the process group.
        num_processes (`int`, *optional*): How many processes to start on this machine.
        resume (`str`): "auto", "never" or a checkpoint.
        dry_run (`bool`): Say what would be done, and do nothing.
        overwrite_output_dir (`bool`): The model that `output_dir` holds may be replaced.
    """

    task: str
    arguments: Any
    training: dict[str, Any]
    num_processes: int | None
    resume: str = AUTO
    dry_run: bool = False
    overwrite_output_dir: bool = False

    def training_arguments(self) -> ZeroTrainingArguments:
        """Makes the training arguments, in the process that trains.

        Raises:
            ConfigError: If a value contradicts another one.
        """
        try:
            return TASKS[self.task].load().Training(**self.training)
        except (ValueError, TypeError) as error:
            raise ConfigError(" ".join(str(error).split())) from error


@dataclass
class LaunchArguments:
    """What concerns the run as a whole."""

    task: str | None = field(
        default=None, metadata={"help": "Which task a YAML file is for; it has to be the one on the command line."}
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "How many processes to start on this machine; leave it out under torchrun."}
    )
    resume: str = field(
        default=AUTO,
        metadata={
            "help": "auto: goes on from the newest complete checkpoint in output_dir, if there is one; never: starts "
            "anew; or the folder of a checkpoint."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Prints the configuration, the model's units, a sample of the data and the memory to expect, "
            "in this one process; trains and writes nothing."
        },
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Starts anew, and replaces the model that output_dir holds; without it a model of another run is "
            "never overwritten."
        },
    )


def make_parser(task: str) -> Parser:
    """Builds the parser of one task.

    Args:
        task (`str`): A key of `TASKS`.

    Returns:
        [`Parser`]: It knows `--config`, `--num_processes`, the task's arguments and all training arguments.
    """
    summary = TASKS[task].summary
    parser = parser_for(_kinds(task), prog=f"{program()} {task}", description=summary, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of the keys below; the command line wins over it")
    # Its type has a list beside the name, of which HfArgumentParser takes the name alone.
    next(action for action in parser._actions if action.dest == "report_to").nargs = "+"
    return parser


def _kinds(task: str) -> tuple[type, type, type]:
    """The dataclasses whose fields are keys: of the run, of the task, and of its training."""
    module = TASKS[task].load()
    return LaunchArguments, module.Arguments, module.Training


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
    _, own_arguments, training = kinds = _kinds(task)
    known = {field.name for kind in kinds for field in fields(kind) if field.init}
    config = parser.parse_known_args(argv)[0].config
    from_file = _yaml_flags(config, known) if config else []
    with _naming(config):
        parser.parse_known_args(from_file)
    namespace, unknown = parser.parse_known_args(from_file + argv)  # of two equal flags argparse takes the last
    if len(namespace.report_to) == 1:
        namespace.report_to = namespace.report_to[0]
    if unknown:
        raise ConfigError(unknown_message("command line", unknown[0].split("=")[0], known))
    values = vars(namespace)
    if values["task"] not in (None, task):
        where = config or "the flag"
        raise ConfigError(f"task {values['task']!r}: {where} is not for {task}; run the task that it is for")
    return Settings(
        task=task,
        arguments=own_arguments(**_pick(values, own_arguments)),
        training=_pick(values, training),
        num_processes=values["num_processes"],
        resume=_resume(values),
        dry_run=values["dry_run"],
        overwrite_output_dir=values["overwrite_output_dir"],
    )


def _resume(values: dict[str, Any]) -> str:
    """`resume`, or what the training argument of the longer name says."""
    given, resume = values["resume_from_checkpoint"], values["resume"]
    if given is not None:
        if resume != AUTO:
            raise ConfigError(f"resume {resume!r} and resume_from_checkpoint {given!r}: give one of them")
        resume = AUTO if given.lower() == "true" else given
    return NEVER if resume == AUTO and values["overwrite_output_dir"] else resume


def _pick(values: dict[str, Any], kind: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind) if field.init}


@contextmanager
def _naming(path: str | None) -> Iterator[None]:
    """What is refused inside is the file's mistake."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _yaml_flags(path: str, known: Iterable[str]) -> list[str]:
    try:
        content = yaml.safe_load(config_file(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        raise ConfigError(f"--config {path}: no such file, nor a ready-made recipe{hint(path)}") from error
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
    if value in (None, []):
        return []  # an empty value leaves the default
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={json.dumps(value, default=str) if isinstance(value, dict) else value}"]
