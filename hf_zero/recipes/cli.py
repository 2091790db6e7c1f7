"""`python -m hf_zero.recipes <task> ...`: from the command line to a running task or tool, or to one clear line."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.recipes.tasks import TASKS, TOOLS, Task


if TYPE_CHECKING:
    from hf_zero.recipes.settings import Settings


EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130

USAGE = """usage: python -m hf_zero.recipes <task> [--config FILE] [--num_processes N] [--zero_stage 0|1|2|3] [--key]
       python -m hf_zero.recipes <tool> FOLDER [--key]

tasks:
{tasks}

tools:
{tools}

`python -m hf_zero.recipes <task or tool> --help` lists all keys. The command line wins over the file. Under torchrun
leave --num_processes out."""


def main(argv: list[str]) -> int:
    """Runs one task or tool.

    Args:
        argv (`list[str]`): The command line without the program.

    Returns:
        `int`: The exit code: 0, 1 for a run that failed, 2 for a setting that cannot work, 130 after Ctrl-C.
    """
    try:
        _main(argv)
    except HfZeroError as error:
        print(f"hf_zero.recipes: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILURE
    except KeyboardInterrupt:
        print("hf_zero.recipes: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(tasks=_listed(TASKS), tools=_listed(TOOLS)))
        return
    if argv[0] in TOOLS:
        from hf_zero.recipes.tools import run_tool

        run_tool(argv[0], argv[1:])
    else:
        _run_task_of(argv[0], argv[1:])


def _run_task_of(task: str, argv: list[str]) -> None:
    if task not in TASKS:
        raise ConfigError(f"task {task!r}: expected one of {', '.join((*TASKS, *TOOLS))}")
    from hf_zero.recipes.checks import check_training_settings, launched_world_size
    from hf_zero.recipes.settings import parse_settings

    settings = parse_settings(task, argv)
    world_size = launched_world_size(settings.num_processes)
    check_training_settings(settings.training)
    TASKS[task].load().check(settings.arguments)
    if world_size is None and (settings.num_processes or 1) > 1:
        from hf_zero.recipes.launch import launch

        launch(settings.num_processes, run_task, settings)
    else:
        run_task(settings)


def run_task(settings: "Settings") -> None:
    """Trains, in every process of the run.

    Args:
        settings ([`Settings`]): What to do; the rank comes from the environment.
    """
    TASKS[settings.task].load().run(settings.arguments, settings.training_arguments())


def _listed(table: Mapping[str, Task]) -> str:
    return "\n".join(f"  {name:12}{entry.summary}" for name, entry in table.items())
