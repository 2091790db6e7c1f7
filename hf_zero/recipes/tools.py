"""From the command line of a tool to the tool."""

from dataclasses import fields

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import Parser, parser_for, program, unknown_message
from hf_zero.recipes.tasks import TOOLS


def make_tool_parser(tool: str) -> Parser:
    """Builds the parser of one tool.

    Args:
        tool (`str`): A key of `TOOLS`.

    Returns:
        [`Parser`]: It takes the tool's positional, if it has one, and the fields of its `Arguments` as keys.
    """
    module, summary = TOOLS[tool].load(), TOOLS[tool].summary
    parser = parser_for([module.Arguments], prog=f"{program()} {tool}", description=summary, allow_abbrev=False)
    if module.POSITIONAL:
        name, explanation = module.POSITIONAL
        parser.add_argument(name, help=explanation)
    return parser


def run_tool(tool: str, argv: list[str]) -> None:
    """Runs one tool.

    Args:
        tool (`str`): A key of `TOOLS`.
        argv (`list[str]`): What follows the tool on the command line.

    Raises:
        HfZeroError: What is wrong with the command line, or with what the tool was given.
    """
    module = TOOLS[tool].load()
    known = {field.name for field in fields(module.Arguments)}
    namespace, unknown = make_tool_parser(tool).parse_known_args(argv)
    if unknown:
        raise ConfigError(unknown_message("command line", unknown[0].split("=")[0], known))
    values = vars(namespace)
    positional = [values.pop(module.POSITIONAL[0])] if module.POSITIONAL else []
    module.run(*positional, module.Arguments(**values))
