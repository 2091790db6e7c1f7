"""The configuration of a run, read from the command line and a YAML file, and the checks before it starts."""

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
import yaml

from hf_zero.accelerator.environment import refuse_other_engines
from hf_zero.activation import refuse_group_size
from hf_zero.comm.groups import refuse_uneven
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.recipes.launch import launched_world_size
from hf_zero.recipes.parser import AUTO, Parser, option, parser_for
from hf_zero.recipes.task import Task
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.checks import check_arguments, check_output_dir


if TYPE_CHECKING:  # importing it takes seconds, and a plan does not need it
    from hf_zero.trainer import ZeroTrainingArguments

NEVER = "never"  # a value of `resume`, as AUTO is; any other is the folder of a checkpoint
# Where a run starts, its secrets, and which process this is, are no part of what it is.
NOT_OF_THE_RUN = ("hub_token", "push_to_hub_token", "resume_from_checkpoint", "local_rank")


@dataclass(frozen=True)
class LaunchArguments:
    """Keys of the run itself."""

    task: str | None = option(None, "Task that the YAML file is for. Must match the command line.")
    num_processes: int | None = option(None, "Number of processes to start on this machine. Omit it under torchrun.")
    resume: str = option(
        AUTO,
        "auto: resume from the newest complete checkpoint in output_dir, if any; never: start over; or a "
        "checkpoint folder.",
    )
    dry_run: bool = option(
        False,
        "Print the configuration, the size of the model, a sample of the data and the expected memory, "
        "in one process, without training or writing.",
    )
    preprocess: bool = option(
        False,
        "Read, check, tokenize and pack the rows in one process without an accelerator, and print their "
        "counts. The run finds them in the cache of datasets.",
    )
    overwrite_output_dir: bool = option(
        False,
        "Start over: remove the checkpoints of an earlier run in output_dir, and replace its model at the end.",
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(LaunchArguments):
    """The configuration of one run: typed values, from the command line and a YAML file."""

    task: str  # a key of `TASKS`
    arguments: Any  # the task's own arguments, an instance of its `Arguments`
    # keyword arguments of the task's `Training`. They stay a dict until the process that trains is running:
    # making the object picks the device and joins the process group
    training: dict[str, Any]
    launched: int | None = None  # how many processes a launcher such as torchrun has started; `None` without one

    @classmethod
    def parse(cls, task: str, argv: list[str], *, is_here: bool = True) -> "RunConfig":
        """Reads the command line behind the task, and the YAML file that it names. Raises [`ConfigError`] if a key is
        unknown or a value does not parse. If the run is not on this machine (`is_here`), it is on one with
        accelerators unless `use_cpu` is set."""
        parser = make_parser(task)
        values, (_, own_arguments, training) = parser.values(argv), parser.kinds
        if len(values["report_to"]) == 1:
            values["report_to"] = values["report_to"][0]
        if values["task"] not in (None, task):
            where = values["config"] or "the flag"
            raise ConfigError(f"task {values['task']!r}: {where} is not for {task}; run the task that it is for")
        of_trainer = {key: _mapping(key, value) for key, value in _pick(values, training).items()}
        if of_trainer["bf16"] is None:  # TRL leaves it open, as it does by default: the device decides
            on_cpu = of_trainer["use_cpu"] or (is_here and not torch.accelerator.is_available())
            of_trainer["bf16"] = not of_trainer["fp16"] and not on_cpu
        return cls(
            **(_pick(values, LaunchArguments) | {"task": task, "resume": _resume(values)}),
            arguments=own_arguments(**_pick(values, own_arguments)),
            training=of_trainer,
        )

    @classmethod
    def resolve(cls, task: str, argv: list[str]) -> "RunConfig":
        """Parses, and refuses a run that cannot work, before a process is started or a weight is read."""
        config = cls.parse(task, argv)
        launched, training, zero = launched_world_size(config.num_processes), config.training, config.zero
        # where only rows are made ready, nothing is left in output_dir
        _check_training(training | ({"output_dir": "."} if config.preprocess else {}))
        config.kind.check_zero(zero, training)
        if not config.preprocess:  # which one process does for any number of ranks
            num_ranks = launched or config.num_processes or 1
            if str(size := training["zero_shard_size"]).isdecimal():
                refuse_uneven(int(size), num_ranks, "zero_shard_size")
            refuse_group_size(training["zero_sequence_parallel"], num_ranks, "zero_sequence_parallel")
        if not config.kind.holds_out:
            _check_test_set(config)
        config.kind.check(config.arguments, training)
        return replace(config, launched=launched)

    @property
    def zero(self) -> ZeroConfig:
        """The settings of ZeRO. Raises [`ConfigError`] if they contradict each other."""
        return ZeroArgumentsMixin.zero_config(cast(ZeroArgumentsMixin, SimpleNamespace(**self.training)))

    @property
    def kind(self) -> Task:
        """The task itself."""
        return TASKS[self.task].load()

    def values(self) -> dict[str, Any]:
        """Returns all keys of the run as YAML knows them, the task first."""
        own = {"task": self.task, **vars(self.arguments)}
        values = {**own, **self.training, "num_processes": self.num_processes}
        return {key: value for key, value in values.items() if key not in NOT_OF_THE_RUN}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The values of a run without any settings."""
        return RunConfig.parse(self.task, []).values()

    def non_default(self) -> dict[str, Any]:
        """Returns the values that differ from their defaults, the task first."""
        return {
            key: value
            for key, value in self.values().items()
            if key == "task" or value != self.defaults.get(key, value)
        }

    def diff(self, saved: Mapping[str, Any], keys: Iterable[str] | None = None) -> tuple[str, Any, Any] | None:
        """Returns the first of some keys, by default of all, that differs from a saved configuration, with its value
        now and its value there."""
        now = self.values()
        before = {**self.defaults, **{key: _mapping(key, value) for key, value in saved.items()}}
        found = (key for key in (now if keys is None else keys) if key in before and now[key] != before[key])
        return next(((key, now[key], before[key]) for key in found), None)

    def training_arguments(self) -> "ZeroTrainingArguments":
        """Builds the training arguments in a training process. Raises [`ConfigError`] if they conflict."""
        try:
            return self.kind.Training(**self.training)
        except (ValueError, TypeError) as error:
            raise ConfigError(" ".join(str(error).split())) from error


def make_parser(task: str) -> Parser:
    """Builds the parser of one task: `--config`, the keys of a run, the task's own and all training arguments."""
    kind = TASKS[task].load()
    parser = parser_for(task, TASKS[task].summary, (LaunchArguments, kind.Arguments, kind.Training))
    parser.add_argument("--config", help="YAML file with any of the keys below; the command line wins over it")
    parser.set_defaults(**kind.defaults)
    # Its type has a list beside the name, of which HfArgumentParser takes the name alone.
    next(action for action in parser._actions if action.dest == "report_to").nargs = "+"
    if any(field.name == "max_length" for field in fields(kind.Training)):  # TRL's, where None means no limit
        parser.nullable = frozenset({"max_length"})
        next(action for action in parser._actions if action.dest == "max_length").type = _tokens
    return parser


def _tokens(text: str) -> int | None:
    """Parses `max_length`: a number of tokens, or none for no limit."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return int(text)
    except ValueError as error:
        hint = "auto is for hf-zero plan, which prints the number" if text == AUTO else "expected a number of tokens"
        raise ArgumentTypeError(f"{text!r}: {hint}") from error


def _resume(values: dict[str, Any]) -> str:
    """Returns `resume`, or the value of `resume_from_checkpoint`."""
    given, resume = values["resume_from_checkpoint"], values["resume"]
    if given is not None:
        if resume != AUTO:
            raise ConfigError(f"resume {resume!r} and resume_from_checkpoint {given!r}: give one of them")
        resume = AUTO if given.lower() == "true" else given
    return NEVER if resume == AUTO and values["overwrite_output_dir"] else resume


def _mapping(key: str, value: Any) -> Any:
    """Returns the value of a key that takes keyword arguments, which are JSON on the command line. As in transformers,
    quotes around numbers, true and false have no meaning there."""
    if not key.endswith("_kwargs") or not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{key} {value!r}: not JSON ({error}); give a mapping, such as {{}}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{key} {value!r}: a {type(found).__name__}, expected a mapping")
    return _unquoted(found)


def _unquoted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unquoted(each) for name, each in value.items()}
    with suppress(ValueError):
        found = json.loads(value.lower()) if isinstance(value, str) else value
        return found if isinstance(found, (bool, int, float)) else value
    return value


def _pick(values: dict[str, Any], kind: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind) if field.init}


def yaml_text(values: dict[str, Any]) -> str:
    """Returns lines of `key: value`, in the order given."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6)


def _check_training(settings: Mapping[str, Any]) -> None:
    """Refuses settings with which no task works."""
    refuse_other_engines(settings)
    check_output_dir(settings.get("output_dir"))
    check_arguments(settings)
    name, lr = settings["lr_scheduler_type"], settings["learning_rate"]
    try:  # each schedule takes other keyword arguments, and some need one
        own = settings["lr_scheduler_kwargs"]
        optimizer = torch.optim.SGD([torch.zeros(1)], abs(lr) or 1.0)
        transformers.get_scheduler(name, optimizer, 0, 1, scheduler_specific_kwargs=own)
    except (TypeError, ValueError) as error:
        given = getattr(name, "value", name)
        raise ConfigError(f"lr_scheduler_type {given}: {error}; change --lr_scheduler_kwargs") from error


def _check_test_set(config: RunConfig) -> None:
    """Raises [`ConfigError`] if the run evaluates and has no rows to evaluate on."""
    arguments, training = config.arguments, config.training
    if arguments.test_file or arguments.dataset_test_split:
        return
    asks = {
        f"eval_strategy {training['eval_strategy']}": training["eval_strategy"] != "no",
        "eval_on_start": training["eval_on_start"],
        "load_best_model_at_end": training["load_best_model_at_end"],
    }
    for name, is_set in asks.items():
        if is_set:
            raise ConfigError(
                f"{name}: there is no test set to evaluate on; give --dataset_test_split or --test_file, or leave "
                "it out"
            )
