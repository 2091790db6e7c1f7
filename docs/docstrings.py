"""How autodoc reads the package's docstrings: Google's sections, with the backticks of Markdown."""

import re


def to_rst(lines: list[str]) -> list[str]:
    """Turns single backticks into reStructuredText's double ones, and what is indented after a colon into code.

    Args:
        lines (`list[str]`): a docstring, in which napoleon has not yet turned the sections into fields.

    Returns:
        `list[str]`: the same lines, to be read as reStructuredText.
    """
    text = re.sub(r"\[(`[^`]+`)\]", r"\1", "\n".join(lines))
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
    text = re.sub(r"(?m)^\[Note: (.+)\]$", r"**\1**\n", text)
    return re.sub(r"(?m)^(.*\S):\n(?=\n +\S)", r"\1::\n", text).split("\n")


def setup(app) -> dict:
    """Sphinx calls this. Of what listens to docstrings, this comes before napoleon."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}


def _process(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = to_rst(lines)
