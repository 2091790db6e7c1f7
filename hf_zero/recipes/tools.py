"""From the command line of a tool to the tool."""

from dataclasses import fields

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import Parser, unknown_message
from hf_zero.recipes.tasks import TOOLS


def make_tool_parser(tool: str) -> Parser:
    """Builds the parser of one tool.

    Args:
        tool (`str`): A key of `TOOLS`.

    Returns:
        [`Parser`]: It takes the folder, and the fields of the tool's `Arguments` as keys.
    """
    arguments = TOOLS[tool].load().Arguments
    summary = TOOLS[tool].summary
    parser = Parser(arguments, prog=f"python -m hf_zero.recipes {tool}", description=summary, allow_abbrev=False)
    parser.add_argument("folder", help="the model folder")
    return parser


def run_tool(tool: str, argv: list[str]) -> None:
    """Runs one tool.

    Args:
        tool (`str`): A key of `TOOLS`.
        argv (`list[str]`): What follows the tool on the command line.

    Raises:
        HfZeroError: What is wrong with the command line, or with the folder.
    """
    module = TOOLS[tool].load()
    known = {field.name for field in fields(module.Arguments)}
    namespace, unknown = make_tool_parser(tool).parse_known_args(argv)
    if unknown:
        raise ConfigError(unknown_message("command line", unknown[0].split("=")[0], known))
    values = vars(namespace)
    folder = values.pop("folder")
    module.run(folder, module.Arguments(**values))
