"""The command line `python -m hf_zero.recipes`, which runs a task or a tool, or prints one line that says why not."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_zero.errors import CheckpointError, ConfigError, HfZeroError
from hf_zero.parent import end_with_launcher, tell_launcher
from hf_zero.recipes.listing import listed
from hf_zero.recipes.parser import (
    Parser,
    check_exists,
    given_of,
    looks_like_path,
    no_such_folder,
    parser_for,
    program,
    read_yaml,
    unknown_task_message,
)
from hf_zero.recipes.silence import silence
from hf_zero.recipes.tasks import TASKS, TOOLS


EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130

FILES = ("train_file", "test_file")
# Tools that are given a folder, and those that are given a folder or a hub id, under the key of their messages.
OF_FOLDERS = ("verify", "merge", "push", "convert")
OF_MODELS = {"plan": "model", "chat": "folder", "generate": "folder"}

USAGE = """usage: {program} <task> [--config FILE] [--num_processes N] [--zero_stage 0|1|2|3] [--key value]
       {program} <tool> [what it works on] [--key value]

tasks:
{tasks}

tools:
{tools}

`{program} <task or tool> --help` lists all keys. The command line wins over the file. Under torchrun
leave --num_processes out."""


def main(argv: list[str]) -> int:
    """Runs one task or tool. Returns the exit code: 0, 1 for a run that failed, 2 for a setting that cannot work, 130
    after Ctrl-C."""
    end_with_launcher()
    silence()
    try:
        _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except HfZeroError as error:
        print(f"{_who()}: {' '.join(str(error).split())}", file=sys.stderr)
        tell_launcher(error)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILURE
    except KeyboardInterrupt:
        print(f"{_who()}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def console() -> int:
    """The script `hf-zero`."""
    return main(sys.argv[1:])


def _who() -> str:
    """The name before a message, with the rank under a launcher such as torchrun, where every rank prints."""
    rank = os.environ.get("RANK")
    return "hf-zero" if rank is None else f"hf-zero, rank {rank}"


def _main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(program=program(), tasks=listed(TASKS), tools=listed(TOOLS)))
        return
    if argv[0] in TOOLS:
        refuse_missing(argv[0], argv[1:])
        if argv[0] not in ("list", "migrate"):
            with importing(argv[0]):
                TOOLS[argv[0]].load()
        run_tool(argv[0], argv[1:])
    else:
        _run_task_of(argv[0], argv[1:])


def _run_task_of(task: str, argv: list[str]) -> None:
    if task not in TASKS:
        raise ConfigError(unknown_task_message(task, (*TASKS, *TOOLS)))
    refuse_early(argv)
    with importing(task):
        from hf_zero.recipes.output_dir import check_start
        from hf_zero.recipes.run import dry_run, preprocess, run_task
        from hf_zero.recipes.settings import resolve_settings

    settings = resolve_settings(task, argv)
    if settings.preprocess:
        preprocess(settings)
        return
    check_start(settings)
    if settings.dry_run:
        dry_run(settings)
    elif settings.launched is None and (settings.num_processes or 1) > 1:
        from hf_zero.recipes.launch import launch

        launch(settings.num_processes, run_task, settings)
    else:
        run_task(settings)


def make_tool_parser(tool: str) -> Parser:
    """Builds the parser of one tool: its positionals and the fields of its `Arguments` as keys."""
    module = TOOLS[tool].load()
    parser = parser_for(tool, TOOLS[tool].summary, [module.Arguments])
    for name, explanation in module.POSITIONAL:
        parser.add_argument(name, help=explanation)
    return parser


def run_tool(tool: str, argv: list[str]) -> None:
    """Runs one tool."""
    module = TOOLS[tool].load()
    if hasattr(module, "run_config") and any(flag.partition("=")[0] == "--config" for flag in argv):
        module.run_config(argv)
        return
    values = make_tool_parser(tool).values(argv)
    positional = [values.pop(name) for name, _ in module.POSITIONAL]
    module.run(*positional, module.Arguments(**values))


def refuse_early(argv: list[str]) -> None:
    """Refuses a configuration or a file of rows that is not there."""
    given = given_of(argv, "config", *FILES)
    content = read_yaml(given["config"]) if given["config"] else {}
    for key in FILES:
        name = given[key] or content.get(key)
        if isinstance(name, str) and name:
            check_exists(name, key)


def refuse_missing(tool: str, argv: list[str]) -> None:
    """Refuses what a tool is to work on, and what is not there: the first word of a command line, or its `--config`.
    A name that may be a hub id is left to those who ask the hub."""
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if tool == "plan":
        refuse_early(argv)
        if name is not None and name.endswith((".yaml", ".yml")):
            raise ConfigError(f"model {name!r}: is a YAML file, as of a run; plan that with --config {name}")
    if name is None or Path(name).expanduser().exists():
        return
    if tool in OF_FOLDERS:
        raise CheckpointError(f"{Path(name)}: does not exist; give the folder of a saved model")
    if tool in OF_MODELS and looks_like_path(name):
        raise ConfigError(no_such_folder(name, OF_MODELS[tool]))


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Says what takes so long to the terminal of a user who waits for a task or tool, and leaves no garbage to be
    looked for in what is imported inside: its objects stay, and looking through them took a tenth of the time."""
    if "torch" in sys.modules or not gc.isenabled():  # what others have made may be garbage
        yield
        return
    if sys.stderr.isatty():
        print(f"{program()} {what}: importing torch and transformers", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extensions that are built with nanobind print what is left at the end
