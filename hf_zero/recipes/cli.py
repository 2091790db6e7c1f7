"""The command line `hf-zero`, or `python -m hf_zero.recipes`. Runs a task or a tool, and prints errors in one line."""

import os
import sys

from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.parent import end_with_launcher, tell_launcher
from hf_zero.recipes.listing import listed
from hf_zero.recipes.parser import Parser, parser_for, program, unknown_task_message
from hf_zero.recipes.silence import silence
from hf_zero.recipes.tasks import TASKS, TOOLS


EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130

USAGE = """usage: {program} <task> [--config FILE] [--num_processes N] [--zero_stage 0|1|2|3] [--key value]
       {program} <tool> [arguments] [--key value]

tasks:
{tasks}

tools:
{tools}

`{program} <task or tool> --help` lists all keys. The command line overrides the file. Omit
--num_processes under torchrun."""


def main(argv: list[str]) -> int:
    """Runs one task or tool. Returns the exit code: 0, 1 for a failed run, 2 for a wrong setting, 130 after Ctrl-C."""
    end_with_launcher()
    silence()
    try:
        _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
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
    """Returns the prefix of messages. It names the rank under a launcher such as torchrun, where every rank prints."""
    rank = os.environ.get("RANK")
    return "hf-zero" if rank is None else f"hf-zero, rank {rank}"


def _main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(program=program(), tasks=listed(TASKS), tools=listed(TOOLS)))
        return
    if argv[0] in TOOLS:
        run_tool(argv[0], argv[1:])
    else:
        _run_task_of(argv[0], argv[1:])


def _run_task_of(task: str, argv: list[str]) -> None:
    if task not in TASKS:
        raise ConfigError(unknown_task_message(task, (*TASKS, *TOOLS)))
    say_importing(task)
    from hf_zero.recipes.launch import run_on
    from hf_zero.recipes.output_dir import check_start
    from hf_zero.recipes.run import dry_run, preprocess, run_task
    from hf_zero.recipes.run_config import RunConfig

    config = RunConfig.resolve(task, argv)
    if config.preprocess:
        preprocess(config)
        return
    check_start(config)
    if config.dry_run:
        dry_run(config)
    else:
        run_on(config.num_processes, run_task, config)


def make_tool_parser(tool: str) -> Parser:
    """Builds the parser of one tool: its positionals and the fields of its `Arguments` as keys."""
    module = TOOLS[tool].load()
    parser = parser_for(tool, TOOLS[tool].summary, [module.Arguments])
    for name, explanation in module.POSITIONAL:
        parser.add_argument(name, help=explanation)
    return parser


def run_tool(tool: str, argv: list[str]) -> None:
    """Runs one tool."""
    if tool not in ("list", "migrate"):
        say_importing(tool)
    module = TOOLS[tool].load()
    if hasattr(module, "run_config") and any(flag.partition("=")[0] == "--config" for flag in argv):
        module.run_config(argv)
        return
    values = make_tool_parser(tool).values(argv)
    positional = [values.pop(name) for name, _ in module.POSITIONAL]
    module.run(*positional, module.Arguments(**values))


def say_importing(what: str) -> None:
    """Prints in a terminal why nothing happens for some seconds."""
    if "torch" not in sys.modules and sys.stderr.isatty():
        print(f"{program()} {what}: importing torch and transformers", file=sys.stderr, flush=True)
